"""Runs the tables of `plan/pipeline/` on real ranks."""
