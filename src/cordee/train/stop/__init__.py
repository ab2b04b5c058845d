"""The end of a gang: notices, the step that all ranks agree on, and the last checkpoint."""
