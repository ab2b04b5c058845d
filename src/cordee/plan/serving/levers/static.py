"""Static against continuous batching: the fraction of its slots that a batch uses if it waits for its longest answer.

A static batch of B answers runs for as many steps as the longest has tokens, so its slots are used for mean / maximum
of the time; continuous batching (Orca, OSDI 2022) gives a free slot to the next request after each step.
"""

from collections.abc import Sequence


def static_use(batch: int, lengths: Sequence[int] = ()) -> float:
    """Return the expected fraction of slots in use in static batches of answers of these lengths.

    The expected maximum of B draws is the sum over the sorted lengths of length x its chance to be the largest. Without
    lengths they are exponential, and their maximum is the mean times 1 + 1/2 + ... + 1/B.

    >>> round(static_use(16), 2), static_use(8, [50, 50, 50]), static_use(1, [1, 99])
    (0.3, 1.0, 1.0)
    """
    if not lengths:
        return 1 / sum(1 / rank for rank in range(1, batch + 1))
    ordered, count = sorted(lengths), len(lengths)
    longest = sum(
        length * ((rank / count) ** batch - ((rank - 1) / count) ** batch) for rank, length in enumerate(ordered, 1)
    )
    return sum(ordered) / count / longest
