"""The server's end of the agents: the executor that hands orders out and takes reports in, over one link a node."""
