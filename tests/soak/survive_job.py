"""The job that has to survive: what its ranks and their supervisor both know of it. No torch."""

GLOBAL_BATCH, SAMPLES, SEED = 24, 100, 11
STEPS_PER_S = 5.0  # at most, until there is a file `fast` in the folder
EVERY, HOLD, KEEP = 10, 3, 4  # steps between checkpoints, and between captures in memory; generations
