"""The order of the samples, and a batch sampler that keeps it on any number of ranks."""
