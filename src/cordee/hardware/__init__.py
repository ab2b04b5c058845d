"""The machines: GPUs and prices with their sources, a cluster as a tree, the cost of a collective.

Pure, except `load.py`, which reads the TOML facts and is called from floor 5 up (cli, control, simulate).
"""
