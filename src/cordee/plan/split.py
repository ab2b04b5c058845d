"""Splits of the layers over the stages of a pipeline: even, with the odd ones in the middle, or with light ends.

A split is one number of layers for each stage, in the model's order; with chunks a rank has several stages.
"""

import re
from functools import lru_cache
from itertools import groupby

from cordee.errors import LayoutError

Split = tuple[int, ...]


@lru_cache(maxsize=1024)
def stage_layers(layers: int, stages: int) -> Split:
    """Return the layers of each stage. Odd ones go to the middle: the ends hold the embedding and the head.

    >>> stage_layers(80, 4), stage_layers(126, 4), stage_layers(61, 4)
    ((20, 20, 20, 20), (31, 32, 32, 31), (15, 16, 15, 15))
    """
    base, extra = divmod(layers, stages)
    from_the_middle = sorted(range(stages), key=lambda stage: (abs(2 * stage - (stages - 1)), stage))
    favoured = set(from_the_middle[:extra])
    return tuple(base + (stage in favoured) for stage in range(stages))


def light_ends(layers: int, stages: int) -> Split:
    """Return the same with embedding and head counted as a layer each, as BLOOM and Llama 3 405B were trained.

    >>> light_ends(126, 16), light_ends(70, 12)
    ((7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7), (5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5))
    """
    first, *middle, last = stage_layers(layers + 2, stages)
    return (first - 1, *middle, last - 1)


@lru_cache(maxsize=1024)
def splits(layers: int, stages: int) -> tuple[Split | None, ...]:
    """Return the splits worth trying, without those that leave a stage empty; None is the even one.

    >>> splits(80, 4), splits(80, 2), splits(126, 16) == (light_ends(126, 16),), splits(8, 8)
    ((None, (19, 21, 21, 19)), (None,), True, (None,))
    """
    if stages == 1:
        return (None,)
    even, ends = stage_layers(layers, stages), light_ends(layers, stages)
    plain = even if layers % stages else None
    return (plain,) if ends == even or min(ends) < 1 else (plain, ends)


def split_text(split: Split) -> str:
    """Return the split as it is printed and read: equal neighbours once, with their number.

    >>> split_text((7, 8, 8, 8, 7)), split_text((5, 5, 4))
    ('7-8x3-7', '5x2-4')
    """
    runs = [(layers, len(list(equal))) for layers, equal in groupby(split)]
    return "-".join(f"{layers}x{count}" if count > 1 else str(layers) for layers, count in runs)


def read_split(text: str) -> Split:
    """Read the split that a text gives.

    >>> read_split("7-8x3-7")
    (7, 8, 8, 8, 7)

    Raises:
        LayoutError: it says none, or a stage without a layer.
    """
    found: list[int] = []
    for run in text.split("-"):
        match = re.fullmatch(r"([1-9][0-9]{0,4})(?:x([1-9][0-9]{0,3}))?", run)
        if match is None:
            raise LayoutError(f"split {text!r} cannot be read", hint="write the layers of each stage: split=7-8x14-7")
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)
