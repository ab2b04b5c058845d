"""A gateway's usage lines as events of the log."""

from collections.abc import Iterable

from cordee.answers.services import UsageLine
from cordee.events import TokensServed
from cordee.ids import JobId


def usage_events(gateway: str, lines: Iterable[UsageLine]) -> list[TokensServed]:
    """Return an event for each line."""
    return [
        TokensServed(
            at_us=line.until_us,
            gateway=gateway,
            job_id=JobId(line.job_id),
            **line.model_dump(exclude={"job_id", "until_us"}),
        )
        for line in lines
    ]
