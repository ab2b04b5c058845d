"""Read which checkpoints to keep: a number of the newest, each Nth, those of a time."""

import re
from dataclasses import dataclass

from cordee.errors import InputError
from cordee.units import parse_duration_s

KEEP_MIN = 2
_HINT = 'write "3", "3, every 10" or "3, every 10, 7d"'


@dataclass(frozen=True, slots=True)
class Keep:
    """The newest `last` that verify; of the rest each `every`th, and those within `within_s` of the newest."""

    last: int = KEEP_MIN
    every: int | None = None
    within_s: float | None = None

    def __str__(self) -> str:
        """Return the text that `parse_keep` reads."""
        every = f", every {self.every}" if self.every else ""
        return f"{self.last}{every}" + (f", {self.within_s:.17g}s" if self.within_s else "")


def parse_keep(text: "str | int | Keep") -> Keep:
    """Read a text such as `3, every 10, 7d`.

    Raises:
        InputError: the text cannot be read, or keeps fewer than two.

    >>> parse_keep("3, every 10, 7d")
    Keep(last=3, every=10, within_s=604800.0)
    """
    if isinstance(text, Keep):
        return text
    last, every, within_s = KEEP_MIN, None, None
    for part in (part.strip() for part in str(text).split(",")):
        if re.fullmatch(r"-?\d+", part):
            last = int(part)
        elif found := re.fullmatch(r"every (\d+)", part):
            every = int(found[1])
        else:
            try:
                within_s = parse_duration_s(part)
            except InputError as error:
                raise InputError(f"keep={text}: {part!r} cannot be read", hint=_HINT) from error
    if last < KEEP_MIN:
        raise InputError(
            f"keep={last} generations is not possible: at least {KEEP_MIN} stay",
            hint="the newest one may turn out to be damaged, and then the one before it is needed",
        )
    if every == 0:
        raise InputError(f"keep={text}: every 0 keeps none", hint=_HINT)
    return Keep(last, every, within_s)
