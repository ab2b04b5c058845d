"""Read number and kind of GPUs as a job asks for them, in the command line and in YAML."""

import re

from cordee.errors import SpecError

_PROFILE = r"(?:mig-)?(\d+g\.\d+gb(?:\+[a-z.]+)?)"
_KIND = r"[A-Za-z][\w. -]*"
# A number alone is how people call a consumer card: 1x4090.
_NAMED = rf"{_KIND}|\d{{4}}[\w. -]*"


def parse_mig(text: str | int | float) -> tuple[str, str | None] | None:
    """Return the profile and the kind of GPU of a MIG instance, as `1g.10gb` or `H100:1g.10gb`; None: it names none.

    Slurm's `1g.10gb:1` and the resource of Kubernetes, `mig-1g.10gb`, are read as well.

    >>> parse_mig("1g.10gb"), parse_mig("H100:3g.40gb"), parse_mig("mig-1g.10gb:1"), parse_mig("1xH100")
    (('1g.10gb', None), ('3g.40gb', 'H100'), ('1g.10gb', None), None)

    Raises:
        SpecError: more than one instance.
    """
    written = str(text).strip()
    before = rf"(?:(\d+)\s*[x*]\s*)?(?:({_KIND})[: ])?"
    found = re.fullmatch(rf"{before}{_PROFILE}(?::(\d+))?(?:\s*[x*]\s*({_KIND}))?", written)
    if found is None:
        return None
    count, kind, profile, behind, after = found.groups()
    if int(count or behind or 1) != 1:
        raise SpecError(
            f"{written!r} is a gang on MIG instances: NCCL and peer-to-peer copies do not work between them",
            hint=f"a job has one of them: gpus: {profile}; more memory is a larger profile, a gang needs whole GPUs",
        )
    return profile, kind or after


def parse_gpus(text: str | int) -> tuple[int, str | None]:
    """Return the total and the kind of `64`, `64xH100` or `H100:64`; of a MIG instance, its name in the catalogue.

    >>> parse_gpus("64xH100"), parse_gpus("H100:64"), parse_gpus(64), parse_gpus("H100:1g.10gb")
    ((64, 'H100'), (64, 'H100'), (64, None), (1, 'H100 1g.10gb'))

    Raises:
        SpecError: not such a text.
    """
    written = str(text).strip()
    if (instance := parse_mig(written)) is not None:
        profile, kind = instance
        if kind is None:
            raise SpecError(f"{written} does not say of which GPU it is an instance", hint=f"write H100:{profile}")
        return 1, f"{kind} {profile}"
    if re.fullmatch(r"\d+\s*[x*]\s*[A-Za-z][\w. -]*(\+\s*\d+\s*[x*]\s*[A-Za-z][\w. -]*)+", written):
        raise SpecError(
            f"{written!r} is a job on several kinds of GPU: ranks have equal work, so the slower kind sets the pace",
            hint="plan each kind by itself, and give the whole job to one; sweeps and services may use several kinds",
        )
    if re.fullmatch(r"\d+", written):
        count, kind = int(written), None
    elif match := re.fullmatch(rf"(\d+)\s*[x*]\s*({_NAMED})", written):
        count, kind = int(match[1]), match[2]
    elif match := re.fullmatch(r"([A-Za-z][\w. -]*):(\d+)", written):
        count, kind = int(match[2]), match[1]
    else:
        _refuse_near_instance(written)
        raise SpecError(f"{written!r} is not a number of GPUs", hint="write the total: 64, 64xH100 or H100:64")
    if count < 1:
        raise SpecError(f"a job needs at least 1 GPU, not {count}", hint="write the total: 64, 64xH100 or H100:64")
    return count, kind


def _refuse_near_instance(written: str) -> None:
    """Refuse what was meant as a MIG instance and misses its form: `H100:4g.40g`, `H100-4g40gb`.

    Raises:
        SpecError: with the instance that was meant.
    """
    found = re.fullmatch(rf"(?:({_KIND}?)[:@ -]\s*)?(\d)g[._ -]?(\d+)\s*g?i?b?", written, re.IGNORECASE)
    if found is not None:
        profile = f"{found[2]}g.{found[3]}gb"
        meant = f"{found[1] or 'H100'}:{profile}"
        raise SpecError(
            f"{written!r} is neither a number of GPUs nor a MIG instance",
            hint=f"did you mean {meant}? a profile has its slices and its memory: 1g.10gb",
        )


def parse_wanted(text: str | int | float) -> tuple[int, int, str | None]:
    """Return GPUs, thousandths of each, and the kind: as `parse_gpus`, or a part of a GPU such as `0.5xH100`.

    >>> parse_wanted("64xH100"), parse_wanted(0.5), parse_wanted("A100:0.25"), parse_wanted(0)
    ((64, 1000, 'H100'), (1, 500, None), (1, 250, 'A100'), (0, 1000, None))

    Raises:
        SpecError: not such a text, or a part that is not in whole thousandths.
    """
    written = str(text).strip()
    found = re.fullmatch(r"0(\.\d+)(?:\s*[x*]\s*(.+))?|(.+):0(\.\d+)", written)
    if written == "0":  # CPU cores and host memory only
        return 0, 1000, None
    if found is None:
        count, kind = parse_gpus(written)
        return count, 1000, kind
    part, name = float(found[1] or found[4]), found[2] or found[3]
    milli = round(part * 1000)
    if milli / 1000 != part or not 0 < milli < 1000:
        raise SpecError(f"{written!r} is not a part of a GPU", hint="write it with up to three digits: 0.5 or 0.125")
    return 1, milli, parse_gpus(f"1x{name}")[1] if name else None
