"""Preemptions: the attempts that leave so that a waiting job fits. Not where the job is placed."""
