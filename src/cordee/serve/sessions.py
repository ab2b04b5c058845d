"""KV of idle sessions on this node's disk, for the engine that comes next: one that crashed or drained has it again.

A session that pauses is written while its engine has nothing to do, the others when it drains. In between the engine
pages idle sessions to host memory by itself. An engine gives a slot to the request
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
PAUSE_S = 10.0
"""Pause after which a session is written to disk, if its engine has no request at all: writing holds others up."""

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
    """The files of one engine's sessions, which any replica with its model and settings on this node may take.

    Attributes:
        restored: the engine has got those that were there when it started.
    """

    def __init__(self, engine: SessionFiles, launch: EngineLaunch, folder: Path) -> None:
        assert launch.session_folder is not None, "the engine writes its files there"
        self.restored = False
        self._since: dict[int, tuple[int, float]] = {}  # By slot: the tokens of its session, and since when.
        self._kept: dict[int, tuple[int, Path | None]] = {}  # By slot: the tokens on disk, and their file if it pays.
        self._engine, self._own = engine, Path(launch.session_folder)
        model = Path(launch.model)
        stamp = model.stat().st_mtime_ns if model.exists() else 0
        same = json.dumps([launch.model, stamp, launch.context, sorted(map(str, launch.flags.items()))])
        self._shared = folder / sha256(same.encode()).hexdigest()[:32]
        self._shared.mkdir(mode=0o700, parents=True, exist_ok=True)  # The files tell what was said.

    def keep(self, ask: Ask, now_s: float) -> SavedSessions:
        """Save the longest session that has paused and is not on disk yet, of an engine that has no request.

        Args:
            ask: asks the engine.
            now_s: the time, of the clock of earlier calls.
        """
        saved = SavedSessions()
        with suppress(OSError):
            slots = self._engine.idle_slots(ask(Upstream(self._engine.slots_path)))
            self._since = {
                slot: before if (before := self._since.get(slot)) and before[0] == tokens else (tokens, now_s)
                for slot, tokens in slots.items()
            }
            due = (IdleSession(slot, tokens) for slot, (tokens, at) in self._since.items() if now_s - at >= PAUSE_S)
            for session in saving_order(each for each in due if not self._is_kept(each))[:1]:
                self._save(ask, session, saved)
        return saved

    def save(self, ask: Ask, until_s: float) -> SavedSessions:
        """Save the idle slots that are worth it, until a time of the monotonic clock."""
        saved, engine, shortest = SavedSessions(), self._engine, 1
        with suppress(OSError):
            slots = engine.idle_slots(ask(Upstream(engine.slots_path)))
            for session in saving_order(IdleSession(slot, tokens) for slot, tokens in slots.items()):
                if time.monotonic() >= until_s or session.tokens < shortest:
                    break
                if self._is_kept(session):
                    continue
                found = self._save(ask, session, saved)
                if found is None:  # The longest one is computed again in less time, and so are all others.
                    break
                shortest = found
        return saved

    def _is_kept(self, session: IdleSession) -> bool:
        tokens, path = self._kept.get(session.slot, (0, None))
        return tokens == session.tokens and (path is None or path.exists())

    def _save(self, ask: Ask, session: IdleSession, saved: SavedSessions) -> int | None:
        """Write a session; return from how many tokens on a file pays, None: it does not, and there is none."""
        name, engine = uuid.uuid4().hex, self._engine
        prefill = engine.prefill_tokens_per_s(ask(Upstream(engine.speed_path)))
        speed = FileSpeed(*engine.saved(ask(engine.save(session.slot, name))))
        found = shortest_session(speed, prefill, speed.tokens)
        _, before = self._kept.get(session.slot, (0, None))
        if found is None:
            (self._own / name).unlink(missing_ok=True)
            self._kept[session.slot] = (session.tokens, None)
            return None
        shutil.move(self._own / name, self._shared / f".{name}")
        kept = (self._shared / f".{name}").rename(self._shared / name)  # Whole, also from another file system.
        if before is not None:
            before.unlink(missing_ok=True)  # Of the same session when it was shorter.
        self._kept[session.slot] = (session.tokens, kept)
        saved.add(speed.bytes_, speed.seconds)
        return found

    def restore(self, ask: Ask, slots: int) -> int:
        """Put the newest files into the slots of a new engine, and return how many sessions that are."""
        self.restored = True
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
