"""Executors: who runs the ranks, behind the port in `cordee.control.ports`."""
