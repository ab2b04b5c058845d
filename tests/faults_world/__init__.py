"""Fault simulation: the control plane in random worlds that fail, from a seed (docs/design/faults.md)."""
