"""The dataset cache of a node: each byte of a dataset is fetched once, for all jobs on it.

`cordee.data` reads pieces of objects from the node's disk and verifies them; fetchers, processes beside the jobs, bring
the missing ones. Readers and fetchers meet on the disk only, so that any of them may be killed at any time.
"""
