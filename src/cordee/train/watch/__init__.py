"""Find the rank that hangs or keeps the others waiting, from beside the loop."""
