"""The state of the scheduler: jobs, attempts, nodes, and the indexes that make a cycle cheap."""
