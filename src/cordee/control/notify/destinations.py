"""The file `notify.toml` of a server's home: where notifications go, by name.

A job names a destination; only the operator can say what it is, so that no job makes the server call any address.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cordee.errors import InputError, SpecError
from cordee.workload.notify import Notify, NotifyKind

FILE = "notify.toml"
KINDS_BY_DEFAULT: tuple[NotifyKind, ...] = ("end", "failure", "hang", "budget")


@dataclass(frozen=True, slots=True)
class Quiet:
    """The hours of a day, in the server's local time, in which only urgent messages are sent.

    >>> Quiet.of("22:00-07:00").until(datetime(2026, 1, 1, 23, 30))
    datetime.datetime(2026, 1, 2, 7, 0)
    >>> Quiet.of("22:00-07:00").until(datetime(2026, 1, 1, 12, 0)) is None
    True
    """

    begin: time
    end: time

    @classmethod
    def of(cls, text: str) -> "Quiet":
        """Return the hours of a text such as 22:00-07:00.

        Raises:
            ValueError: it is none.
        """
        begin, dash, end = text.partition("-")
        try:
            hours = cls(time.fromisoformat(begin.strip()), time.fromisoformat(end.strip()))
        except ValueError:
            raise ValueError(f"{text!r} are no hours: write 22:00-07:00") from None
        if not dash or hours.begin == hours.end:
            raise ValueError(f"{text!r} are no hours: write 22:00-07:00")
        return hours

    def until(self, now: datetime) -> datetime | None:
        """Return the end of the quiet hours in which a moment lies; None: it lies in none."""
        for day in (now.date() - timedelta(days=1), now.date()):
            begin = datetime.combine(day, self.begin)
            end = datetime.combine(day + timedelta(days=self.end <= self.begin), self.end)
            if begin <= now < end:
                return end
        return None


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not an http or https URL")
    return text


def _smtp(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("smtp", "smtps") or not parts.hostname:
        raise ValueError(f"{text!r} is not smtp://HOST:PORT or smtps://USER:PASSWORD@HOST:PORT")
    return text


def _hours(value: Any) -> Any:
    return Quiet.of(value) if isinstance(value, str) else value


class Destination(BaseModel):
    """A receiver: exactly one of a webhook (JSON), Slack's incoming webhook, and e-mail by an SMTP server."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    name: str
    webhook: Annotated[str, AfterValidator(_url)] | None = None
    slack: Annotated[str, AfterValidator(_url)] | None = None
    email: str | None = None
    smtp: Annotated[str, AfterValidator(_smtp)] | None = None
    sender: str | None = Field(default=None, alias="from")
    quiet: Annotated[Quiet | None, BeforeValidator(_hours)] = None

    @model_validator(mode="after")
    def _is_one(self) -> "Destination":
        if sum(each is not None for each in (self.webhook, self.slack, self.email)) != 1:
            raise ValueError("give one of webhook, slack and email")
        if (self.email is None) != (self.smtp is None):
            raise ValueError("email needs smtp, the server that takes it: smtp://HOST:PORT")
        return self

    @property
    def kind(self) -> str:
        """Return the way in which it is reached."""
        return "webhook" if self.webhook else "slack" if self.slack else "email"


@dataclass(frozen=True, slots=True)
class Destinations:
    """The destinations by name, and the default for jobs that name none."""

    by_name: dict[str, Destination] = field(default_factory=dict)
    default: Notify = field(default_factory=Notify)

    def wants(self, name: str, kind: NotifyKind, notify: Notify) -> bool:
        """Return whether messages of a kind about a job with this section go to a destination."""
        to = notify.to if notify.to is not None else (self.default.to or ())
        return name in to and kind in (notify.on or self.default.on or KINDS_BY_DEFAULT)

    def check(self, names: Iterable[str]) -> None:
        """Check that each name is that of a destination.

        Raises:
            SpecError: one is not.
        """
        for name in names:
            if name not in self.by_name:
                known = ", ".join(sorted(self.by_name)) or "none"
                raise SpecError(
                    f"the server has no destination {name!r} of notifications; it has: {known}",
                    hint=f"the operator adds it to {FILE} in the server's home",
                )


def read_destinations(home: Path) -> Destinations:
    """Return what the home's `notify.toml` says; no destination without such a file.

    Raises:
        InputError: it cannot be read, is open to others, or has a mistake; nothing of it is used then.
    """
    path = home / FILE
    try:
        with path.open("rb") as file:
            if path.stat().st_mode & 0o077:
                raise InputError(f"{path} is open to others than its owner", hint=f"chmod 600 {path}")
            tables = tomllib.load(file)
    except FileNotFoundError:
        return Destinations()
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", hint="it must be a TOML file") from None
    where = "default"
    try:
        default = dict(_table(tables.pop("default", {})))
        quiet = default.pop("quiet", None)
        found = {}
        for where, table in tables.items():
            found[where] = Destination.model_validate({"quiet": quiet} | _table(table) | {"name": where})
        where = "default"
        Destinations(found).check(Notify.model_validate(default).to or ())
        return Destinations(found, Notify.model_validate(default))
    except InputError as error:
        raise InputError(f"{path}, [{where}]: {error.message}", hint=error.hint) from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(each) for each in first["loc"])
        said = str(first["msg"]).removeprefix("Value error, ")
        raise InputError(f"{path}, [{where}]: {key + ': ' if key else ''}{said}") from None


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError("it is not a table", hint='write [ops] and below it slack = "https://..."')
    return value
