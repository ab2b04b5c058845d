"""The command line: one file for each family of verbs. It prints; what it prints is computed below."""
