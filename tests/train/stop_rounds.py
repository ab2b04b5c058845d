"""Rounds of the stop protocol on real ranks, drawn from a seed: `stop_rounds.py --seed 7 --rounds 1`.

Round k of a run that starts with seed s is the round of seed s + k, whatever came before. Ranks are skewed at random,
notices come at random ranks and times, sometimes twice, and rank 0 asks for saves in between.
"""

import argparse
import os
import random
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

from cordee.train.stop.agreement import Agreement, BoundaryAction
from forked import gang

MODES = ("blocking", "async", "pipeline", "alone", "done")
OPTIONS = ("save 2", "save 1", "finish", "try 1")
WINDOW = 12  # the host runs this many steps ahead of what it has launched


class Traffic:
    """The communication of one step, matched within it."""

    def __init__(self, mode: str, rank: int, world: int, slow: int, mine: random.Random) -> None:
        self.mode, self.rank, self.world, self.mine = mode, rank, world, mine
        self.slow = rank == slow
        self.pending: list[tuple[dist.Work, torch.Tensor]] = []

    def step(self, number: int) -> None:
        if self.mode == "blocking":
            if self.mine.random() < 0.3:
                time.sleep(self.mine.random() * 0.01)
            dist.all_reduce(torch.ones(1))
            return
        value = torch.tensor([float(number)])
        if self.mode == "async":
            self.pending.append((dist.all_reduce(value, async_op=True), value))
        elif self.mode == "pipeline":
            if self.rank > 0:
                dist.recv(value, self.rank - 1)
                assert value.item() == number, (value.item(), number)
            if self.rank < self.world - 1:
                sent = value.clone()
                self.pending.append((dist.isend(sent, self.rank + 1), sent))
        if self.slow or self.mode in ("alone", "done"):
            time.sleep(self.mine.random() * 0.008)
        if len(self.pending) > WINDOW:
            self.pending.pop(0)[0].wait()

    def finish(self) -> None:
        for work, _ in self.pending:
            work.wait()


def one_round(seed: int, rank: int, world: int) -> tuple[float, int]:
    """The longest hold in seconds, and how far the hosts were apart when they pledged."""
    drawn = random.Random(seed)
    mode = drawn.choice(MODES)
    n_steps = drawn.randrange(5, 40) if mode == "done" else 1_000_000
    noticers = drawn.sample(range(world), drawn.choice([1, 1, 2, world]))
    notices = [(drawn.random() * 0.3, noticer) for noticer in noticers for _ in range(drawn.choice([1, 2]))]
    saves = sorted(drawn.random() * 0.3 for _ in range(drawn.choice([0, 0, 2, 5])))
    traffic = Traffic(mode, rank, world, drawn.randrange(world), random.Random(seed * 1000 + rank))
    first_step = drawn.choice([0, 17])
    store = dist.distributed_c10d._get_default_store()
    told: list[float] = []
    agreement = Agreement(
        first_step=first_step,
        rank=rank,
        world_size=world,
        store=store,
        prefix=f"stop/{seed}",
        on_leave=told.append,
        undecided_s=20.0,
    )
    timers = [threading.Timer(when, agreement.request, kwargs={"leave_in_s": 30.0}) for when, r in notices if r == rank]
    timers += [threading.Timer(when, agreement.request) for when in saves if rank == 0]
    for timer in timers:
        timer.start()
    number, verdict, saved_at = first_step, BoundaryAction.BEGIN, []
    while number < first_step + n_steps:
        while (verdict := agreement.at(number)) is BoundaryAction.SAVE:
            dist.barrier()  # would hang or mismatch if the ranks were at different boundaries
            saved_at.append(number)
            agreement.conclude()
        if verdict is BoundaryAction.LEAVE:
            break
        traffic.step(number)
        number += 1
    pledge = agreement.begun
    traffic.finish()
    for timer in timers:
        timer.cancel()
        timer.join()
    accepted = {option for option in OPTIONS if traffic.mine.random() < 0.7}
    chosen = agreement.choose(OPTIONS, accepted, 30.0) if verdict is BoundaryAction.LEAVE else None
    agreement.count_out(30.0)
    everyone: list[tuple[int, list[int], float, int]] = [(0, [], 0.0, 0)] * world
    dist.all_gather_object(everyone, (number, saved_at, agreement.held_s_max, pledge))
    choices: list[tuple[set[str], str | None]] = [(set(), None)] * world
    dist.all_gather_object(choices, (accepted, chosen))
    if verdict is BoundaryAction.LEAVE:
        common = [option for option in OPTIONS if all(option in theirs for theirs, _ in choices)]
        assert {theirs for _, theirs in choices} == {next(iter(common), None)}, f"they chose differently: {choices}"
    # A save agreed on for the last boundary is the final save's, which a rank that is done makes anyway.
    saves_of = [[step for step in each[1] if step < first_step + n_steps] for each in everyone]
    assert len({each[0] for each in everyone}) == 1, f"left at different steps: {everyone}"
    assert all(each == saves_of[0] for each in saves_of), f"saved at different steps: {everyone}"
    if number < first_step + n_steps:
        assert told or rank in noticers, "a rank left without being told how long it has"
    return max(each[2] for each in everyone), len(saves_of[0])


def run_rank(seed: int, rounds: int) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    held_s, saves = 0.0, 0
    for each in range(seed, seed + rounds):
        try:
            longest_s, saved = one_round(each, rank, world)
        except BaseException:
            print(f"replay: python tests/train/stop_rounds.py --seed {each} --rounds 1 --world {world}", flush=True)
            raise
        held_s, saves = max(held_s, longest_s), saves + saved
    if rank == 0:
        print(f"{rounds} rounds on {world} ranks, {saves} saves; longest hold {held_s * 1000:.1f} ms", flush=True)
    dist.destroy_process_group()


def start(seed: int, rounds: int, world: int) -> int:
    # torch asks the name server about each peer; a slow one would stall it.
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    return max(abs(code) for code, _ in gang(world, lambda _: run_rank(seed, rounds)))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--world", type=int, default=4)
    args = parser.parse_args()
    return start(args.seed, args.rounds, args.world)


if __name__ == "__main__":
    sys.exit(main())
