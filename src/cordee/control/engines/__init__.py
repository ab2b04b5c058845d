"""Engines: they find machines, start agents on them and know of their deaths, and nothing else."""
