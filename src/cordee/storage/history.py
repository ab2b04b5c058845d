"""A job's past attempts, from the log: the known length of each, and how it ended."""

from dataclasses import dataclass

from cordee.storage.log import LogEntry
from cordee.units import US_PER_S

LEFT = "left"
"""`ending` of a commit record: the attempt left, or finished, with all its work saved."""

RESCUED = "rescued"
"""`ending`: the trainers died, and their uploaders committed a capture in memory."""


@dataclass(frozen=True, slots=True)
class PastAttempt:
    """One attempt before the newest: from its `open` to its last record with a time."""

    ranks: int
    seconds: float
    left: bool


def past_attempts(entries: list[LogEntry]) -> list[PastAttempt]:
    """Return all attempts with a start time, without the newest, which is running; oldest first."""
    records = [entry.record for entry in entries if entry.record]
    opened = [record for record in records if record.kind == "open"]
    found = []
    for record in opened[:-1]:
        if "at_us" not in record.fields:
            continue  # written by an older Cordee
        commits = [each.fields for each in records if each.kind == "commit" and each.nonce == record.nonce]
        began_us = record.fields["at_us"]
        last_us = max((fields["at_us"] for fields in commits if "at_us" in fields), default=began_us)
        left = bool(commits) and commits[-1].get("ending") == LEFT
        found.append(PastAttempt(record.fields["world_size"], max(0, last_us - began_us) / US_PER_S, left))
    return found
