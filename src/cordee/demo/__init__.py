"""The demo: one job is planned, trained, preempted, resumed and accounted, and every claim about it is checked."""
