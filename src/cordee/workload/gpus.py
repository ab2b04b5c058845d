"""How many GPUs a job asks for, and of which kind: one reading for the command line and the YAML."""

import re

from cordee.errors import SpecError


def parse_gpus(text: str | int) -> tuple[int, str | None]:
    """The total and the kind of `64`, `64xH100` or `H100:64`.

    >>> parse_gpus("64xH100"), parse_gpus("H100:64"), parse_gpus(64)
    ((64, 'H100'), (64, 'H100'), (64, None))

    Raises:
        SpecError: not such a text.
    """
    written = str(text).strip()
    if re.fullmatch(r"\d+", written):
        count, kind = int(written), None
    elif match := re.fullmatch(r"(\d+)\s*[x*]\s*([A-Za-z][\w. -]*)", written):
        count, kind = int(match[1]), match[2]
    elif match := re.fullmatch(r"([A-Za-z][\w. -]*):(\d+)", written):
        count, kind = int(match[2]), match[1]
    else:
        raise SpecError(f"{written!r} is not a number of GPUs", hint="write the total: 64, 64xH100 or H100:64")
    if count < 1:
        raise SpecError(f"a job needs at least 1 GPU, not {count}", hint="write the total: 64, 64xH100 or H100:64")
    return count, kind
