"""Checkpoints inside a rank: capture, upload and resume, and when a save is due."""
