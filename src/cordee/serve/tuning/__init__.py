"""Tuning of a service that runs: the load (load.py), and the replica that it is measured on (replica.py)."""
