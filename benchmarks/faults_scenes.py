"""The faults, each injected for real: what a scene does to ranks, uploaders, disks and clocks, and what it then sees.

Numbers up to 21 are those of the list that `faults.py` prints; those above come from the longer one. A scene gets a
`Run` (folder, seeded generator, attempts) and returns an `Outcome`; NotRun says why a product has no such thing.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from cordee.storage.destination import open_blobs
from cordee.storage.generations import check_generation, commit_of
from cordee.storage.log import live_commits, read_entries
from faults_world import Context, NotRun, Outcome, Run

EVERY = 5
ALL = ("cordee", "DCP", "Trainer", "Lightning")
OURS = ("cordee",)
# Steps that may be done twice without a notice: an interval, a step, and what an uploader needs on a loaded machine.
UPLOAD_STEPS_MAX = 100
UNNOTICED_MAX = EVERY + 1 + UPLOAD_STEPS_MAX


@dataclass(frozen=True)
class Scene:
    """One fault."""

    number: int
    name: str
    products: tuple[str, ...]
    ranks: int
    play: Callable[[Run], Outcome]


SCENES: dict[int, Scene] = {}


def scene(
    number: int, name: str, products: tuple[str, ...] = ALL, ranks: int = 1
) -> Callable[[Callable[[Run], Outcome]], Callable[[Run], Outcome]]:
    """Add it to the list."""

    def add(play: Callable[[Run], Outcome]) -> Callable[[Run], Outcome]:
        SCENES[number] = Scene(number, name, products, ranks, play)
        return play

    return add


# What scenes share.


def data_files(run: Run) -> list[Path]:
    """Files of the newest checkpoint that hold tensors."""
    if run.name == "cordee":
        blobs = open_blobs(run.to)
        live = live_commits(read_entries(blobs))
        own = run.files() if not live else [path for path in run.files() if "/chunks/" in str(path)]
        newest = f".{live[-1].record.fields['save']}.{live[-1].record.epoch}" if live and live[-1].record else ""
        return [path for path in own if path.name.endswith(newest)]
    found = run.files(".distcp", ".safetensors", ".bin", ".pt", ".ckpt")
    newest_folder = max((str(path.parent) for path in found), key=_step_in, default="")
    inside = [path for path in found if str(path.parent) == newest_folder]
    return [max(inside, key=lambda path: _step_in(str(path)))] if run.name == "Lightning" else inside


def _step_in(text: str) -> int:
    digits = "".join(each if each.isdigit() else " " for each in text).split()
    return int(digits[-1]) if digits else 0


def newest_whole(run: Run) -> int | None:
    """The step of the newest generation that verifies; None if this is not ours."""
    if run.name != "cordee":
        return None
    blobs = open_blobs(run.to)
    steps = [
        commit.step
        for commit in map(commit_of, live_commits(read_entries(blobs)))
        if check_generation(blobs, commit.manifest) is None
    ]
    return max(steps, default=0)


def again(run: Run, steps: int, *, lost_max: float = float("inf"), **told: object) -> Outcome:
    """A last attempt, which for ours has to load the newest generation that verifies."""
    whole = newest_whole(run)
    codes = run.finish(steps, **told)
    outcome = run.verdict(codes, lost_max=lost_max)
    first = next(iter(run.diary(run.attempts)), None)
    if whole is not None and first is not None and first["step"] < whole:
        return Outcome(False, outcome.lost, outcome.wrong, f"step {whole} verified, but {first['step']} was loaded")
    return outcome


def bound(run: Run) -> float:
    """Of steps done twice without a notice; ours only, the others promise nothing."""
    return UNNOTICED_MAX if run.name == "cordee" else float("inf")


@contextlib.contextmanager
def disk(run: Run, options: str) -> Iterator[Path]:
    """A file system of its own."""
    at = run.folder / "disk"
    at.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", at], check=False).returncode:
        raise NotRun("a small file system needs root and mount()")
    try:
        yield at
    finally:
        for gang in run.gangs:
            gang.kill()
            gang.wait(5)
        subprocess.run(["umount", "-l", at], check=True)


def kill_in_a_save(run: Run, *, with_uploader: bool, ranks: set[int] | None = None, **told: object) -> list[int | None]:
    """An attempt whose ranks (all, or these) die in its second save, at a time that is drawn."""
    delay_s = run.rng.random() * (0.15 if run.name == "cordee" else 0.02)

    def dies(ctx: Context, step: int) -> None:
        if step == 2 * EVERY and (ranks is None or ctx.rank in ranks):
            ctx.die_in(delay_s, with_uploader=with_uploader)

    return run.start(40, in_save=dies, **told).wait(30)


def until_dead(pids: list[int]) -> None:
    """Nobody may write any more when the next attempt looks; ours would not mind."""
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)


def last_uploaders_end(run: Run) -> None:
    """Uploaders go on after their ranks; a scene that asks what is durable waits for them."""

    def gone() -> bool:
        for each in psutil.process_iter(["cmdline", "environ"]):
            ours = (each.info["environ"] or {}).get("FAULTS_FOLDER") == str(run.folder)
            if ours and "cordee.train.checkpoint.uploader" in " ".join(each.info["cmdline"] or ()):
                return False
        return True

    run.until(gone, "uploaders to end")


@scene(0, "none: the run is only ended and started again")
def control(run: Run) -> Outcome:
    run.finish(2 * EVERY + 2)
    return again(run, 20, lost_max=bound(run))


# Damage.


@scene(1, "a bit flips in a shard")
def flip(run: Run) -> Outcome:
    run.finish(2 * EVERY + 2)
    path = run.rng.choice(data_files(run))
    data = bytearray(path.read_bytes())
    data[run.rng.randrange(len(data))] ^= 1 << run.rng.randrange(8)
    path.write_bytes(data)
    return again(run, 20)


@scene(2, "a shard is truncated or missing")
def truncate(run: Run) -> Outcome:
    run.finish(2 * EVERY + 2)
    path = run.rng.choice(data_files(run))
    if run.rng.random() < 0.5:
        path.unlink()
    else:
        os.truncate(path, run.rng.randrange(path.stat().st_size))
    return again(run, 20)


# Deaths while saving.


@scene(3, "a rank is killed in a save over the same id", ("cordee", "DCP"), ranks=2)
def killed_over_the_same_id(run: Run) -> Outcome:
    kill_in_a_save(run, with_uploader=run.rng.random() < 0.5, ranks={1}, options={"same_id": True})
    last_uploaders_end(run)
    return again(run, 20, lost_max=bound(run), options={"same_id": True})


@scene(4, "all ranks are killed in a save with a new id")
def killed_with_a_new_id(run: Run) -> Outcome:
    kill_in_a_save(run, with_uploader=True)
    return again(run, 20, lost_max=bound(run))


@scene(5, "killed between the two renames of a commit", ("cordee", "DCP"))
def killed_in_the_commit(run: Run) -> Outcome:
    if run.name == "cordee":
        at = run.rng.choice(["manifest.before", "commit.before", "commit.after"])
        run.start(40, env={"CORDEE_TEST_KILL_AT": f"{at}:2"}, in_step=die_at(2 * EVERY + 3)).wait()
        return again(run, 20, lost_max=bound(run))

    def dies(ctx: Context, step: int) -> None:
        if step == 2 * EVERY:
            from torch.distributed.checkpoint.filesystem import FileSystem

            FileSystem.rename = lambda *args: ctx.die()  # type: ignore[method-assign]

    run.start(40, in_save=dies, options={"same_id": True}).wait()
    return again(run, 20, options={"same_id": True})


def die_at(at: int) -> Callable[[Context, int], None]:
    """The host is lost in this step."""

    def dies(ctx: Context, step: int) -> None:
        if step == at:
            ctx.die()

    return dies


@scene(6, "two writers: a zombie of the old attempt goes on", ("cordee", "DCP"))
def zombie(run: Run) -> Outcome:
    stop_at = run.rng.randrange(EVERY + 1, 2 * EVERY)
    told = {"same_id": True}

    def freezes(ctx: Context, step: int) -> None:
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)

    old = run.start(3 * EVERY, in_step=freezes, options={**told, "scale": 2})
    run.until(lambda: psutil.Process(old.pids[0]).status() == psutil.STATUS_STOPPED, "the zombie to stop")
    run.finish(3 * EVERY + 2, options=told)
    truth = {each["digest"] for each in run.diary(run.attempts)}
    last = run.diary(run.attempts)[-1]["step"]
    os.kill(old.pids[0], signal.SIGCONT)
    old.wait()
    codes = run.finish(4 * EVERY, options=told)
    first = next(iter(run.diary(run.attempts)), None)
    if first is None:
        return Outcome(False, None, False, run.last_words())
    # The attempt that was started last is the job; what it had committed at its end is loaded, or a step of its own.
    own = first["step"] == last + 1 or first["digest"] in truth
    return Outcome(own and codes == [0], max(0, last + 1 - first["step"]), not own, "" if own else "the zombie's state")


@scene(12, "a stale partial checkpoint lies in the way", ALL)
def stale_partial(run: Run) -> Outcome:
    kill_in_a_save(run, with_uploader=True)
    run.finish(3 * EVERY)  # Passes the step whose save was cut off, and saves it again.
    return again(run, 20)


@scene(16, "killed while the newest replaces the only one", ("cordee", "DCP", "Trainer", "Lightning"))
def retention(run: Run) -> Outcome:
    if run.name == "DCP":
        raise NotRun("keeps what it has saved; has no retention")
    kill_in_a_save(run, with_uploader=True, keep=2, options={"keep_one": True})
    return again(run, 20, lost_max=bound(run), keep=2, options={"keep_one": True})


# Disks and clocks.


@scene(7, "the disk is full in a save, and has room again later")
def full_disk(run: Run) -> Outcome:
    with disk(run, "size=4m") as at:
        filler, to = at / "filler", str(at / "to")
        room = run.rng.randrange(0, 60_000)

        def fills(ctx: Context, step: int) -> None:
            if step == 2 * EVERY - 2:
                fd = os.open(filler, os.O_WRONLY | os.O_CREAT)
                with contextlib.suppress(OSError):
                    while True:
                        os.write(fd, bytes(4096))
                os.close(fd)
                os.truncate(filler, max(0, filler.stat().st_size - room))
            if step == 3 * EVERY - 2:
                filler.unlink(missing_ok=True)

        run.to = to
        codes = run.start(30, to=to, in_step=fills, options={"async": True}).wait()
        went_on = codes == [0]
        filler.unlink(missing_ok=True)
        outcome = again(run, 34, to=to)
        note = "" if went_on else "the failed save ended the run"
        return Outcome(outcome.survived and went_on, outcome.lost, outcome.wrong, note or outcome.note)


@scene(24, "no inode is left, or the file system turns read-only, for a while", OURS)
def no_inodes(run: Run) -> Outcome:
    read_only = run.rng.random() < 0.5
    with disk(run, "size=8m" if read_only else "size=8m,nr_inodes=80") as at:
        run.to = to = str(at / "to")

        def denies(ctx: Context, step: int) -> None:
            if step == 2 * EVERY - 2:
                if read_only:  # Refused while a file is open for writing.
                    subprocess.run(["mount", "-o", "remount,ro", at], check=False)
                else:
                    with contextlib.suppress(OSError):
                        for number in range(100):
                            (at / f"filler{number}").touch()
            if step == 4 * EVERY - 2:
                if read_only:
                    subprocess.run(["mount", "-o", "remount,rw", at], check=True)
                else:
                    for path in at.glob("filler*"):
                        path.unlink()

        codes = run.start(30, to=to, in_step=denies).wait()
        outcome = again(run, 34, to=to)
        return Outcome(outcome.survived and codes == [0], outcome.lost, outcome.wrong, outcome.note)


@scene(15, "clocks: what is old has times of an hour ahead, or behind")
def clocks(run: Run) -> Outcome:
    ahead_s = run.rng.choice([-3600, 3600])

    def skews(ctx: Context, step: int) -> None:
        if step in (EVERY + 4, 2 * EVERY + 4):
            now_s = time.time()
            for path in Path(ctx.to).rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    os.utime(path, (now_s + ahead_s, now_s + ahead_s))

    run.start(3 * EVERY + 3, in_step=skews, keep=2, options={"keep_one": True}).wait()
    return again(run, 30, keep=2, options={"keep_one": True}, lost_max=EVERY + 1)


@scene(23, "the power is cut: what was not synced is gone", OURS)
def power_cut(run: Run) -> Outcome:
    image, at = run.folder / "image", run.folder / "disk"
    at.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", image], check=False, capture_output=True)
    if os.geteuid() or made.returncode or subprocess.run(["mount", "-o", "loop", image, at], check=False).returncode:
        raise NotRun("a file system in a file needs root and loop devices")
    try:
        gang = run.start(400, to=str(at / "to"))
        run.until_step(2 * EVERY)
        time.sleep(run.rng.random() * 0.5)
        writers = [psutil.Process(pid) for pid in gang.pids] + gang.uploaders()
        for each in writers:
            each.suspend()
        told = _committed(at / "to")  # What anybody was told is durable at the cut.
        shutil.copyfile(image, run.folder / "cut")
        gang.kill()
        gang.wait()
    finally:
        subprocess.run(["umount", "-l", at], check=True)
    subprocess.run(["mount", "-o", "loop", run.folder / "cut", at], check=True)
    try:
        run.to = str(at / "to")
        whole = newest_whole(run) or 0
        outcome = again(run, 30, to=run.to)
        lost_commit = whole < told
        note = f"step {told} was committed before the cut, {whole} is there after it" if lost_commit else outcome.note
        return Outcome(outcome.survived and not lost_commit, outcome.lost, outcome.wrong, note)
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def _committed(to: Path) -> int:
    """The newest step in the log that its writer knows of: a record that has its name may not be synced yet."""
    live = live_commits(read_entries(open_blobs(str(to))))
    return commit_of(live[-2]).step if len(live) > 1 else 0
