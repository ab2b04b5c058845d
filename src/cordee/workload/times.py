"""Times that people write: a moment as ISO 8601, and a window of times of day."""

import re
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from cordee.errors import UnitError
from cordee.units import US_PER_S

_WINDOW = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)(?: (\S+))?")
_OFFSET = re.compile(r"[+-]\d\d:\d\d")


def parse_time_us(text: str) -> int:
    """Return a moment in microseconds since the Unix epoch; without an offset it is in UTC.

    >>> parse_time_us("1970-01-01 01:00+01:00"), parse_time_us("1970-01-01T00:01")
    (0, 60000000)

    Raises:
        UnitError: it is none.
    """
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        hint = "write 2026-11-24 06:00 (UTC), or 2026-11-24 06:00+01:00"
        raise UnitError(f"{text!r} is not a time", hint=hint) from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return round(at.timestamp() * US_PER_S)


def parse_window(text: str, day: datetime) -> tuple[int, int, int]:
    """Return begin and end of a window since midnight, and the offset of its zone from UTC that day, in microseconds.

    >>> day = datetime(2026, 1, 1, tzinfo=UTC)
    >>> [us // (3600 * US_PER_S) for us in parse_window("22:00-06:00 Europe/Berlin", day)]
    [22, 6, 1]

    Raises:
        UnitError: it is none.
    """
    found = _WINDOW.fullmatch(text.strip())
    hint = "write 22:00-06:00 (UTC), 22:00-06:00 +01:00 or 22:00-06:00 Europe/Berlin"
    if found is None:
        raise UnitError(f"{text!r} is not a window", hint=hint)
    hours, zone = [int(part) for part in found.groups()[:4]], found[5] or "UTC"
    begin, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
    if max(begin, end) > 24 * 60 or max(hours[1], hours[3]) > 59 or begin == end:
        raise UnitError(f"{text!r} is not a window: times are 00:00 to 24:00, and differ", hint=hint)
    return begin * 60 * US_PER_S, end * 60 * US_PER_S, _offset_us(zone, day, hint)


def _offset_us(zone: str, day: datetime, hint: str) -> int:
    if _OFFSET.fullmatch(zone):
        offset: timedelta | None = datetime.fromisoformat(f"2000-01-01T00:00{zone}").utcoffset()
    else:
        try:
            offset = day.astimezone(ZoneInfo(zone)).utcoffset()
        except (KeyError, ValueError, OSError):
            raise UnitError(f"{zone!r} is not a time zone", hint=hint) from None
    assert offset is not None, "both are aware of their zone"
    return round(offset.total_seconds()) * US_PER_S
