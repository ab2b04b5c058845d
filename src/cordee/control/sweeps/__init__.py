"""Sweeps: trials as ordinary jobs, which a controller starts, promotes and ends by the results so far."""
