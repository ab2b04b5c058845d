"""More scenes of `faults.py`: notices, other worlds and shapes, stores and levels, and the longer list."""

import contextlib
import os
import shutil
import signal
import time

import psutil

from cordee.storage.destination import open_blobs
from cordee.storage.generations import check_generation, commit_of
from cordee.storage.log import live_commits, read_entries
from faults_scenes import EVERY, OURS, again, bound, data_files, die_at, last_uploaders_end, scene
from faults_shapes import grown, mutated, reshaped
from faults_store import bad_network
from faults_world import Context, Gang, NotRun, Outcome, Run

# Notices.


def noticed(run: Run, gang: Gang) -> Outcome:
    """A notice was given: ours leaves with nothing lost, whatever the step it was in."""
    codes = gang.wait(30)
    left = all(code is not None for code in codes)
    outcome = again(run, 60, lost_max=0 if run.name == "cordee" else float("inf"))
    if not left:
        return Outcome(False, outcome.lost, outcome.wrong, "the ranks hung after the notice")
    if run.name == "cordee" and any(code != 75 for code in codes):
        return Outcome(False, outcome.lost, outcome.wrong, f"left with {codes}")
    return outcome


def term(gang: Gang, ranks: list[int]) -> None:
    """SIGTERM."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(gang.pids[rank], signal.SIGTERM)


@scene(8, "SIGTERM while a save is under way")
def term_in_a_save(run: Run) -> Outcome:
    delay_s = run.rng.random() * 0.1

    def notices(ctx: Context, step: int) -> None:
        if step == 2 * EVERY:
            pid = os.getpid()
            if os.fork() == 0:  # From outside, as it is in life.
                time.sleep(delay_s)
                os.kill(pid, signal.SIGTERM)
                os._exit(0)

    return noticed(run, run.start(300, in_save=notices, options={"async": True}))


@scene(9, "SIGTERM to one rank only, anywhere in a step", ("cordee", "DCP", "Trainer", "Lightning"), ranks=2)
def term_to_one(run: Run) -> Outcome:
    gang = run.start(1000)
    run.until_step(EVERY + run.rng.randrange(10))
    time.sleep(run.rng.random() * 0.05)
    term(gang, [run.rng.randrange(2)])
    return noticed(run, gang)


@scene(10, "a second SIGTERM in the grace")
def second_term(run: Run) -> Outcome:
    gang = run.start(1000)
    run.until_step(EVERY + run.rng.randrange(10))
    term(gang, [0])
    time.sleep(run.rng.random() * 0.3)
    term(gang, [0])
    return noticed(run, gang)


@scene(11, "SIGTERM in a compile, an evaluation, or a data loader that waits")
def term_in_a_long_step(run: Run) -> Outcome:
    at = run.rng.choice([0, EVERY + 2])

    def waits(ctx: Context, step: int) -> None:
        if step == at:
            started_s = time.monotonic()
            while time.monotonic() - started_s < 1.0:
                time.sleep(0.05)

    gang = run.start(1000, in_step=waits)
    run.until_step(at)
    time.sleep(0.1 + run.rng.random() * 0.5)
    term(gang, [0])
    return noticed(run, gang)


@scene(25, "a notice that is too short: SIGKILL before the deadline", OURS, ranks=2)
def short_notice(run: Run) -> Outcome:
    gang = run.start(1000)
    run.until_step(EVERY + run.rng.randrange(10))
    term(gang, [0, 1])
    time.sleep(run.rng.random() * 0.15)
    gang.kill()
    gang.wait()
    return again(run, 60, lost_max=bound(run))


@scene(26, "a rank is frozen (SIGSTOP) when the notice comes", OURS, ranks=2)
def frozen_rank(run: Run) -> Outcome:
    gang = run.start(1000, grace="3s")
    run.until_step(2 * EVERY + run.rng.randrange(EVERY))
    frozen = run.rng.randrange(2)
    os.kill(gang.pids[frozen], signal.SIGSTOP)
    term(gang, [1 - frozen])
    code = gang.code_of(1 - frozen, 15)
    gang.kill()
    gang.wait()
    outcome = again(run, 60, lost_max=bound(run))
    fine = outcome.survived and code is not None
    return Outcome(fine, outcome.lost, outcome.wrong, outcome.note or ("" if fine else "the other rank hung"))


# Worlds, streams and shapes.


@scene(13, "another number of ranks", ("cordee", "DCP", "Lightning"), ranks=2)
def other_world(run: Run) -> Outcome:
    run.start(2 * EVERY + 2).wait()
    for world, steps in ((1, 20), (2, 25)):
        codes = run.finish(steps, world=world)
        outcome = run.verdict(codes)
        if not outcome.survived:
            return outcome
    return outcome


@scene(14, "a stream of random numbers for each rank", ("cordee", "DCP", "Lightning"), ranks=2)
def streams(run: Run) -> Outcome:
    steps = 4 * EVERY
    run.finish(steps)
    straight = run.diary(1)[-1]["digest"]
    shutil.rmtree(run.to)
    (run.folder / "diary").unlink()
    run.start(steps, in_step=die_at(2 * EVERY + run.rng.randrange(2, EVERY))).wait()
    last_uploaders_end(run)
    outcome = again(run, steps, lost_max=bound(run))
    same = bool(run.diary(run.attempts)) and run.diary(run.attempts)[-1]["digest"] == straight
    note = outcome.note or ("" if same else "the resumed run ends with other weights")
    return Outcome(outcome.survived and same, outcome.lost, outcome.wrong, note)


@scene(19, "the state changes its shape between two attempts' saves", ("cordee", "DCP"))
def other_shape(run: Run) -> Outcome:
    return reshaped(run)


# Stores and levels.


@scene(17, "the object store answers 500 or 503, loses or tears answers", ("cordee", "DCP"))
def bad_store(run: Run) -> Outcome:
    return bad_network(run)


@scene(18, "a replica is corrupt")
def corrupt_replica(run: Run) -> Outcome:
    if run.name != "cordee":
        raise NotRun("keeps no second copy")
    near, home = run.folder / "near", run.folder / "home"
    run.finish(2 * EVERY + 2, to=f"{near},{home}")
    run.to = str(run.rng.choice([near, home]))
    harmed = run.rng.sample(files := data_files(run), run.rng.randrange(1, len(files) + 1))
    for path in harmed:
        data = bytearray(path.read_bytes())
        data[run.rng.randrange(len(data))] ^= 1 << run.rng.randrange(8)
        path.write_bytes(data)
    run.to = f"{near},{home}"
    return again(run, 20, to=run.to, lost_max=0)


# Memory.


@scene(20, "thirty asynchronous saves: does memory grow?", ("cordee", "DCP"))
def memory(run: Run) -> Outcome:
    return grown(run)


@scene(21, "the state changes right after the save returned", ("cordee", "DCP"))
def mutation(run: Run) -> Outcome:
    return mutated(run)


# From the longer list.


@scene(22, "the uploader is killed at a named point", OURS)
def killed_at_a_point(run: Run) -> Outcome:
    points = ["chunks.before", "chunks.one", "part.before", "manifest.before", "commit.before", "commit.after"]
    at = run.rng.choice([*points, "gc.before", "gc.begun", "gc.deleting"])
    turn = 1 if at.startswith("gc") else run.rng.randrange(2, 4)
    codes = run.start(6 * EVERY, keep=2, env={"CORDEE_TEST_KILL_AT": f"{at}:{turn}"}).wait()
    outcome = again(run, 40, lost_max=bound(run))
    fine = outcome.survived and codes in (
        [0],
        [1],
    )  # 1: the final save was the one whose uploader died, and it said so.
    return Outcome(fine, outcome.lost, outcome.wrong, outcome.note or ("" if fine else f"{at}: {codes}"))


@scene(27, "an uploader hangs (SIGSTOP) while the run goes on and ends", OURS)
def hung_uploader(run: Run) -> Outcome:
    gang = run.start(1000, grace="3s")
    run.until_step(EVERY + 1)
    time.sleep(run.rng.random() * 0.2)
    uploaders = gang.uploaders()
    for each in uploaders:
        each.suspend()
    run.until_step(3 * EVERY)
    term(gang, [0])
    code = gang.wait(20)[0]
    for each in uploaders:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    outcome = again(run, 60)
    fine = outcome.survived and code is not None
    return Outcome(
        fine, outcome.lost, outcome.wrong, outcome.note or ("" if fine else "the rank hung with its uploader")
    )


@scene(28, "readers verify and export while retention removes", OURS)
def readers(run: Run) -> Outcome:
    gang = run.start(60, keep=2)
    seen, bad = 0, ""
    while psutil.Process(gang.pids[0]).status() != psutil.STATUS_ZOMBIE:
        blobs = open_blobs(run.to)
        live = live_commits(read_entries(blobs))
        if live:
            problem = check_generation(blobs, commit_of(live[-1]).manifest)
            gone = live[-1].index not in {entry.index for entry in live_commits(read_entries(blobs))}
            seen += 1
            if problem and not gone:
                bad = problem
    codes = gang.wait()
    outcome = again(run, 64)
    fine = outcome.survived and codes == [0] and not bad and seen > 0
    return Outcome(fine, outcome.lost, outcome.wrong, bad or outcome.note)
