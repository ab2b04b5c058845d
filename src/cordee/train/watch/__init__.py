"""Which rank hangs or keeps the others waiting, found from beside the loop."""
