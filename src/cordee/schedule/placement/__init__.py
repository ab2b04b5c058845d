"""Placement of gangs: shapes, free GPUs by domain, packing. Not the order of jobs, nor the choice of victims."""
