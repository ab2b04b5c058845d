"""Time zones of windows: the offset of a zone from UTC on the day of a submission."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from cordee.errors import UnitError
from cordee.units import US_PER_S
from cordee.workload.times import parse_offset_us, parse_window


def window_of(text: str | None) -> tuple[int, ...]:
    """Return the window of a spec as a job has it: begin, end and offset, in microseconds; empty without one.

    Raises:
        UnitError: this machine does not know its time zone.
    """
    if text is None:
        return ()
    begin_us, end_us, zone = parse_window(text)
    offset_us = parse_offset_us(zone)
    if offset_us is None:
        try:
            offset = datetime.now(UTC).astimezone(ZoneInfo(zone)).utcoffset()
        except (KeyError, ValueError, OSError):
            hint = "write a name such as Europe/Berlin, or an offset: +01:00"
            raise UnitError(f"window: {zone!r} is not a time zone", hint=hint) from None
        assert offset is not None, "a time with a zone has an offset"
        offset_us = round(offset.total_seconds()) * US_PER_S
    return begin_us, end_us, offset_us
