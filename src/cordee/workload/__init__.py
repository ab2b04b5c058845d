"""The work: the shape of a model, and the specification of a job. Pure, except `load.py`."""
