"""The guard of the loss: a detector of spikes, and what all ranks do about one."""
