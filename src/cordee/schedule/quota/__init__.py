"""Queues: quota, limits, borrowing, fair shares. Not the order of jobs within a queue."""
