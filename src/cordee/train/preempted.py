"""The exit of a rank that leaves on a notice."""


class Preempted(SystemExit):
    """The exit of a rank at the agreed step: no line after the loop runs.

    The code is 75 if its checkpoint is durable and 60 if not. Under torchrun, which takes any code but 0 for a failure,
    it is 0 in place of 75.
    """
