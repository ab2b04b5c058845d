"""What the machines are: GPUs and prices with their sources, a cluster as a tree, what a collective costs.

Pure, except `load.py`, which reads the TOML facts and is called from floor 5 up (cli, control, simulate).
"""
