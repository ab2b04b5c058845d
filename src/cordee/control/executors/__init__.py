"""Executors: implementations of the port in `cordee.control.ports` that run the ranks."""
