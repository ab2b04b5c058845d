"""Decisions about requests and replicas: route, admit, order fairly, scale, keep models resident (pure).

The gateway, the controller and the simulator drive the same code. Time is passed in as integer microseconds.
"""
