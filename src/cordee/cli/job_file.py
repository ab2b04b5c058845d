"""Job files and NAME=VALUE texts, as several verbs read them."""

from collections.abc import Sequence
from pathlib import Path

from cordee.errors import SpecError
from cordee.workload.planned import PlannedJob, read_plan
from cordee.workload.spec import JobSpec, parse_spec


def job_from_file(path: Path) -> JobSpec:
    """Read a job file, and the plan that it names."""
    text = _read(path, "give the path of a job's YAML")
    return parse_spec(text, source=str(path), plan_of=lambda plan: plan_of(path.parent / plan))


def plan_of(path: Path, layout: str | None = None) -> PlannedJob:
    """Read a plan that `cordee plan --json` printed."""
    return read_plan(_read(path, "give the file of `cordee plan --json`"), source=str(path), layout=layout)


def _read(path: Path, hint: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecError(f"{path} cannot be read: {reason}", hint=hint) from None


def pairs(texts: Sequence[str], flag: str = "--env") -> dict[str, str]:
    """Return the values of NAME=VALUE texts.

    Raises:
        SpecError: one has no equals sign.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SpecError(f"{flag} {text} is not NAME=VALUE", hint=f"write {flag} {text}=...")
        found[name] = value
    return found
