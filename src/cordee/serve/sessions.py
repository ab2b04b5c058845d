"""KV of idle sessions on this node's disk, for the replica that comes next: a drained engine saves it, a new one has
it again.

While a replica runs, its engine pages idle sessions to host memory by itself. An engine gives a slot to the request
with the longest common prefix, so a session needs no name here.
"""

import json
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from cordee.serve.engines.port import EngineLaunch, SessionFiles, Upstream
from cordee.serve.policy.sessions import FileSpeed, IdleSession, saving_order, shortest_session
from cordee.units import format_bytes, format_duration, plural

KEPT_S = 3600.0
"""Age at which a file goes: chats that paused longer seldom continue."""
FILES_MAX = 64

Ask = Callable[[Upstream], bytes]
"""Sends a request to the engine and returns the answer; it raises OSError if the answer is an error."""


@dataclass(slots=True)
class SavedSessions:
    """The number of sessions that were saved, their bytes, and the seconds that the engine took."""

    sessions: int = 0
    bytes_: int = 0
    seconds: float = 0.0

    def add(self, bytes_: int, seconds: float) -> None:
        """Count one session."""
        self.sessions, self.bytes_, self.seconds = self.sessions + 1, self.bytes_ + bytes_, self.seconds + seconds

    def __str__(self) -> str:
        size = f", {format_bytes(self.bytes_)} in {format_duration(self.seconds)}" if self.sessions else ""
        return f"saved {plural(self.sessions, 'idle session')}{size}"


class IdleSessions:
    """The files of sessions that any replica with this model and these settings on this node may take."""

    def __init__(self, engine: SessionFiles, launch: EngineLaunch, folder: Path) -> None:
        assert launch.session_folder is not None, "the engine writes its files there"
        self._engine, self._own = engine, Path(launch.session_folder)
        model = Path(launch.model)
        stamp = model.stat().st_mtime_ns if model.exists() else 0
        same = json.dumps([launch.model, stamp, launch.context, sorted(map(str, launch.flags.items()))])
        self._shared = folder / sha256(same.encode()).hexdigest()[:32]
        self._shared.mkdir(mode=0o700, parents=True, exist_ok=True)  # The files tell what was said.

    def save(self, ask: Ask, until_s: float) -> SavedSessions:
        """Save the idle slots that are worth it, until a time of the monotonic clock."""
        saved, engine, shortest = SavedSessions(), self._engine, 1
        with suppress(OSError):
            slots = engine.idle_slots(ask(Upstream(engine.slots_path)))
            prefill = engine.prefill_tokens_per_s(ask(Upstream(engine.speed_path)))
            for session in saving_order(IdleSession(slot, tokens) for slot, tokens in slots.items()):
                if time.monotonic() >= until_s or session.tokens < shortest:
                    break
                name = uuid.uuid4().hex
                speed = FileSpeed(*engine.saved(ask(engine.save(session.slot, name))))
                found = shortest_session(speed, prefill, speed.tokens)
                if found is None:  # The longest one is computed again in less time, and so are all others.
                    (self._own / name).unlink(missing_ok=True)
                    break
                shortest = found
                shutil.move(self._own / name, self._shared / f".{name}")
                (self._shared / f".{name}").rename(self._shared / name)  # Whole, also from another file system.
                saved.add(speed.bytes_, speed.seconds)
        return saved

    def restore(self, ask: Ask, slots: int) -> int:
        """Put the newest files into the slots of a new engine, and return how many sessions that are."""
        files = sorted(self._shared.glob("[0-9a-f]*"), key=_age_s)
        for old in (*(path for path in files[:FILES_MAX] if _age_s(path) > KEPT_S), *files[FILES_MAX:]):
            old.unlink(missing_ok=True)
        restored = 0
        for path in files[:FILES_MAX]:
            if restored == slots:
                break
            with suppress(OSError):  # Another replica took it, or the engine cannot read it.
                claimed = path.rename(path.with_name(f".{path.name}"))
                shutil.move(claimed, self._own / path.name)
                ask(self._engine.restore(restored, path.name))
                restored += 1
            (self._own / path.name).unlink(missing_ok=True)
        return restored


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return KEPT_S
