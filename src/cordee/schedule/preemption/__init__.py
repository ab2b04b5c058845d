"""Which attempts leave so that a waiting job fits, and what they lose. Not where the job is placed."""
