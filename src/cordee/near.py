"""The name that was probably meant, in the hint of an error: one rule for every option and key that takes a name."""

import difflib
import re
from collections.abc import Iterable, Mapping


def nearest(written: str, known: Iterable[str], also: Mapping[str, str] | None = None) -> str | None:
    """Return the known name that is nearest to what was written, whatever its case; None: none is near.

    A name of several words is found by one of them. `also` has what people call a known name elsewhere.

    >>> nearest("Lightnig", ("torch", "lightning")), nearest("rms", ("copy", "rms norm")), nearest("x", ("gemm",))
    ('lightning', 'rms norm', None)
    >>> nearest("TrainingArguments", ("trainer", "cordee"), also={"trainingarguments": "trainer"})
    'trainer'
    """
    plain = written.strip().lower()
    names = {name.lower(): name for name in known} | dict(also or {})
    by_word = (name for each, name in names.items() if plain in re.split(r"[\s_-]+", each))
    close = difflib.get_close_matches(plain, names, n=1)
    return names.get(plain) or next(by_word, None) or (names[close[0]] if close else None)


def did_you_mean(
    written: str, known: Iterable[str], *, also: Mapping[str, str] | None = None, listed: str = "use one of: "
) -> str:
    """Return a hint: the nearest name, if one is near, and all of them.

    >>> did_you_mean("srtf", ("fifo", "srsf"))
    'did you mean srsf? use one of: fifo, srsf'
    """
    names = list(known)
    near = nearest(written, names, also)
    return (f"did you mean {near}? " if near else "") + listed + ", ".join(names)
