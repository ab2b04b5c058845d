"""Times that people write and read: a moment as ISO 8601, and a window of times of day. Pure: no clock, no zones."""

import re

from cordee.errors import UnitError
from cordee.units import US_PER_S

_MOMENT = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d)(?::(\d\d)(?:\.\d+)?)?(Z|[+-]\d\d:\d\d)?")
_WINDOW = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)(?: (\S+))?")
_OFFSET = re.compile(r"([+-])(\d\d):(\d\d)")
_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_EPOCH_DAY = 719_468  # days from 0000-03-01 to 1970-01-01
_ERA_DAYS = 146_097  # days of 400 years
_DAY_S = 86_400


def parse_time_us(text: str) -> int:
    """Return a moment in microseconds since the Unix epoch; without an offset it is in UTC.

    >>> parse_time_us("1970-01-01 01:00+01:00"), parse_time_us("2026-11-24T06:00")
    (0, 1795500000000000)

    Raises:
        UnitError: it is none.
    """
    found = _MOMENT.fullmatch(text.strip())
    numbers = [int(part or 0) for part in found.groups()[:6]] if found is not None else []
    if found is None or not _is_moment(*numbers):
        raise UnitError(f"{text!r} is not a time", hint="write 2026-11-24 06:00 (UTC), or 2026-11-24 06:00+01:00")
    year, month, day, hours, minutes, seconds = numbers
    offset_us = parse_offset_us(found[7] or "Z") or 0
    return ((_days(year, month, day) * 24 + hours) * 60 + minutes) * 60 * US_PER_S + seconds * US_PER_S - offset_us


def _is_moment(year: int, month: int, day: int, hours: int, minutes: int, seconds: int) -> bool:
    if not (year >= 1970 and 1 <= month <= 12 and 1 <= day <= _DAYS[month - 1]):
        return False
    leaps = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return (month != 2 or day <= 28 + leaps) and hours < 24 and minutes < 60 and seconds < 60


def parse_offset_us(zone: str) -> int | None:
    """Return an offset from UTC in microseconds; None: it is no offset, but may be the name of a zone.

    >>> parse_offset_us("-00:30"), parse_offset_us("UTC"), parse_offset_us("Europe/Berlin")
    (-1800000000, 0, None)
    """
    if zone in ("Z", "UTC"):
        return 0
    found = _OFFSET.fullmatch(zone)
    if found is None:
        return None
    us = (int(found[2]) * 60 + int(found[3])) * 60 * US_PER_S
    return -us if found[1] == "-" else us


def parse_window(text: str) -> tuple[int, int, str]:
    """Return begin and end of a window in microseconds since midnight, and its zone, UTC by default.

    >>> parse_window("22:00-06:00 Europe/Berlin")
    (79200000000, 21600000000, 'Europe/Berlin')

    Raises:
        UnitError: it is none.
    """
    found = _WINDOW.fullmatch(text.strip())
    hint = "write 22:00-06:00 (UTC), 22:00-06:00 +01:00 or 22:00-06:00 Europe/Berlin"
    if found is None:
        raise UnitError(f"{text!r} is not a window", hint=hint)
    hours = [int(part) for part in found.groups()[:4]]
    begin, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
    if max(begin, end) > 24 * 60 or max(hours[1], hours[3]) > 59 or begin % (24 * 60) == end % (24 * 60):
        raise UnitError(f"{text!r} is not a window: times are 00:00 to 24:00, and differ", hint=hint)
    return begin * 60 * US_PER_S, end * 60 * US_PER_S, found[5] or "UTC"


def in_utc(at_us: int) -> str:
    """Return a time as people read it.

    >>> in_utc(0), in_utc(parse_time_us("2028-02-29 23:59"))
    ('1970-01-01 00:00 UTC', '2028-02-29 23:59 UTC')
    """
    days, seconds = divmod(at_us // US_PER_S, _DAY_S)
    year, month, day = _date(days)
    return f"{year:04}-{month:02}-{day:02} {seconds // 3600:02}:{seconds // 60 % 60:02} UTC"


def _days(year: int, month: int, day: int) -> int:
    """Return the days from the epoch to a date of the Gregorian calendar; years begin in March: a leap day ends one."""
    year -= month <= 2
    of_era = year % 400
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return year // 400 * _ERA_DAYS + of_era * 365 + of_era // 4 - of_era // 100 + of_year - _EPOCH_DAY


def _date(days: int) -> tuple[int, int, int]:
    """Return the date so many days after the epoch."""
    era, of_era = divmod(days + _EPOCH_DAY, _ERA_DAYS)
    year_of_era = (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    month = (5 * of_year + 2) // 153
    day = of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return year_of_era + era * 400 + (month <= 2), month, day
