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
    spelt = close(plain, names, 1, cutoff=0.5 if len(plain) < 3 else 0.6)
    return names.get(plain) or next(iter(by_word + [names[each] for each in spelt] + by_beginning), None)


def close(written: str, known: Iterable[str], most: int, cutoff: float = 0.5) -> list[str]:
    """Return those of the known names that are spelt most alike, the nearest first.

    >>> close("llama-3-70", ["gpt2", "llama-3-70b", "llama-3-8b"], 2)
    ['llama-3-70b', 'llama-3-8b']
    """
    return difflib.get_close_matches(written, list(known), n=most, cutoff=cutoff)


def nearest_model(written: str, known: Iterable[str]) -> str | None:
    """Return the known name of a product whose number was written, or one with a digit less or more at its end.

    Numbers tell products apart, letters only those with one number. Of numbers with another digit the only one counts
    that has the letters before it. A name without a number is found as `nearest` does.

    >>> products = ("B300", "RTX-3090", "A100-80", "H100", "H100-PCIe", "RTX-A6000", "RTX-6000-Ada")
    >>> [nearest_model(each, products) for each in ("3080", "H10", "H100-PCI", "RTX6000", "H101")]
    [None, 'H100', 'H100-PCIe', 'RTX-6000-Ada', 'H100']
    """
    letters, number = _letters_and_number(written)
    if not number:
        return nearest(written, known)

    def distance(name: str) -> tuple[bool, bool, float]:
        own, its = _letters_and_number(name)
        return own != letters, its != number, -difflib.SequenceMatcher(None, written.lower(), name.lower()).ratio()

    names = list(known)
    near = [each for each in names if _is_nearly((letters, number), _letters_and_number(each))]
    if not near:
        near = [each for each in names if _has_one_other_digit((letters, number), _letters_and_number(each))]
        near = near if len({_letters_and_number(each) for each in near}) == 1 else []
    return min(near, key=distance, default=None)


def _letters_and_number(name: str) -> tuple[str, str]:
    """Return the letters before the first number of a name, and that number."""
    found = re.search(r"\d+", name)
    before = name if found is None else name[: found.start()]
    return re.sub(r"[^a-z]", "", before.lower()), found[0] if found else ""


def _is_nearly(written: tuple[str, str], known: tuple[str, str]) -> bool:
    """Return whether two names have one number, or one has a digit more at its end behind the same letters."""
    short, long = sorted((written[1], known[1]), key=len)
    one_more = len(short) > 1 and long.startswith(short) and len(long) - len(short) == 1
    return short == long or (one_more and written[0] == known[0])


def _has_one_other_digit(written: tuple[str, str], known: tuple[str, str]) -> bool:
    """Return whether two names have the same letters, and numbers of which one digit differs."""
    same = written[0] == known[0] and len(written[1]) == len(known[1])
    return same and sum(one != other for one, other in zip(written[1], known[1], strict=True)) == 1


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
