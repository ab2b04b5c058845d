"""The name that was probably meant, in the hint of an error: one rule for every option and key that takes a name."""

import difflib
import re
from collections.abc import Iterable, Mapping


def nearest(written: str, known: Iterable[str], also: Mapping[str, str] | None = None) -> str | None:
    """Return the known name that is nearest to what was written, whatever its case; None: none is near.

    A name of several words is found by one of them, and any name by how it begins. `also` has what people call a
    known name elsewhere.

    >>> nearest("Lightnig", ("torch", "lightning")), nearest("rms", ("copy", "rms norm")), nearest("x", ("gemm",))
    ('lightning', 'rms norm', None)
    >>> nearest("prod", ("production", "standard"))
    'production'
    >>> nearest("TrainingArguments", ("trainer", "cordee"), also={"trainingarguments": "trainer"})
    'trainer'
    """
    plain = written.strip().lower()
    names = {name.lower(): name for name in known} | dict(also or {})
    by_word = [name for each, name in names.items() if plain in re.split(r"[\s_-]+", each)]
    by_beginning = [name for each, name in names.items() if len(plain) > 2 and each.startswith(plain)]
    # Of a name of two letters one that is right is half of it.
    close = difflib.get_close_matches(plain, names, n=1, cutoff=0.5 if len(plain) < 3 else 0.6)
    return names.get(plain) or next(iter(by_word + [names[each] for each in close] + by_beginning), None)


def meant(written: str, known: Iterable[str], also: Mapping[str, str] | None = None) -> str:
    """Return the beginning of a hint, the nearest name as a question; empty: none is near.

    >>> meant("tq", ("tp", "pp")), meant("x", ("tp", "pp"))
    ('did you mean tp? ', '')
    """
    near = nearest(written, known, also)
    return f"did you mean {near}? " if near else ""


def did_you_mean(
    written: str, known: Iterable[str], *, also: Mapping[str, str] | None = None, listed: str = "use one of: "
) -> str:
    """Return a hint: the nearest name, if one is near, and all of them.

    >>> did_you_mean("srtf", ("fifo", "srsf"))
    'did you mean srsf? use one of: fifo, srsf'
    """
    names = list(known)
    return meant(written, names, also) + listed + ", ".join(names)
