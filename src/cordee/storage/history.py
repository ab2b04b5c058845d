"""What the log tells of a job's past attempts: how long each is known to have lived, and how it ended."""

from dataclasses import dataclass

from cordee.storage.log import LogEntry
from cordee.units import US_PER_S

LEFT = "left"
"""`ending` of a commit record: the attempt left, or finished, with everything that it had done."""

RESCUED = "rescued"
"""`ending`: its trainers had died, and their drains brought what they held."""


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """One attempt before the newest: from its `open` to its last record that says a time."""

    ranks: int
    seconds: float
    left: bool


def past_attempts(entries: list[LogEntry]) -> list[PastAttempt]:
    """All that say when they began, oldest first; the newest `open` is the one that runs."""
    records = [entry.record for entry in entries if entry.record]
    opened = [record for record in records if record.kind == "open"]
    found = []
    for record in opened[:-1]:
        if "at_us" not in record.fields:
            continue  # an older Cordee's
        own = [each.fields for each in records if each.kind == "commit" and each.nonce == record.nonce]
        began_us = record.fields["at_us"]
        last_us = max((fields["at_us"] for fields in own if "at_us" in fields), default=began_us)
        left = bool(own) and own[-1].get("ending") == LEFT
        found.append(PastAttempt(record.fields["world_size"], max(0, last_us - began_us) / US_PER_S, left))
    return found
