"""One job on 4, 2, 3 and 4 ranks: the samples and the losses of the run that nobody interrupted."""

from pathlib import Path

import pytest
from elastic_rank import GLOBAL_BATCH, LEGS, SAMPLES, STEPS

from cordee.train.data.order import SampleOrder
from forked import run_script


@pytest.mark.gang
def test_a_job_goes_on_with_any_number_of_ranks_as_if_nothing_had_happened(tmp_path: Path) -> None:
    found = run_script(Path(__file__).with_name("elastic_rank.py"), str(tmp_path))
    whole, legs, again = found["whole"], found["legs"], found["again"]
    assert [code for code, _ in whole] == [0] * 4
    assert [[code for code, _ in leg] for leg in legs] == [[75] * 4, [75] * 2, [75] * 3, [0] * 4]

    end = whole[0][1].pop()
    assert legs[-1][0][1].pop() == end and end[0] == STEPS, "schedule, scaler and plain values end as they did"
    expected = SampleOrder(length=SAMPLES, global_batch=GLOBAL_BATCH, seed=11, drop_last=False)
    line = [expected.samples(step * GLOBAL_BATCH, GLOBAL_BATCH).tolist() for step in range(STEPS)]
    begun = 0
    for leg, (world, leave_in) in zip(legs, LEGS, strict=True):
        steps = [row[0] for row in leg[0][1]]
        assert len(leg) == world and steps[0] == begun and (leave_in is None or steps[-1] >= leave_in)
        for at, step in enumerate(steps):
            assert [row[1] for row in whole_at(whole, step)] == split(line[step], 4)
            assert [rank[1][at][1] for rank in leg] == split(line[step], world), f"step {step} on {world} ranks"
            assert leg[0][1][at][2] == pytest.approx(whole[0][1][step][2], abs=1e-6), f"the loss of step {step}"
            assert leg[0][1][at][4] == whole[0][1][step][4], "the scale of gradients"
        begun = steps[-1] + 1
    assert begun == STEPS

    common = min(len(rank[1]) for leg in (legs[1], again) for rank in leg)  # each leaves when its ranks have agreed
    draws = [[row[3] for row in rank[1][:common]] for rank in legs[1]]
    assert draws == [[row[3] for row in rank[1][:common]] for rank in again], "two resumes of one checkpoint differ"
    assert len({draw for rank in draws for draw in rank}) == sum(map(len, draws)), "ranks share a stream"


@pytest.mark.gang
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_killed_or_told_to_leave_by_chance(tmp_path: Path, seed: int) -> None:
    """To replay one: python tests/train/elastic_rank.py <new folder> <seed>."""
    found = run_script(Path(__file__).with_name("elastic_rank.py"), str(tmp_path), str(seed))
    expected = SampleOrder(length=SAMPLES, global_batch=GLOBAL_BATCH, seed=11, drop_last=False)
    whole, reached = found["whole"], 0
    for world, leg in found["legs"]:
        for rank, (code, rows) in enumerate(leg):
            for step, taken, loss, _, scale in (row for row in rows or [] if len(row) == 5):
                line = expected.samples(step * GLOBAL_BATCH, GLOBAL_BATCH).tolist()
                assert taken == split(line, world)[rank], f"seed {seed}: step {step} on rank {rank} of {world}"
                if rank == 0:
                    assert loss == pytest.approx(whole[0][1][step][2], abs=1e-6), f"seed {seed}: step {step}"
                    assert scale == whole[0][1][step][4]
            assert code in (0, 1, 60, 75, -9), f"seed {seed}: rank {rank} of {world} left with {code}"
        reached += any(code == 0 for code, _ in leg)
    assert reached == 1 and found["legs"][-1][1][0][1][-1] == whole[0][1][-1]


def whole_at(whole: list, step: int) -> list:
    return [rank[1][step] for rank in whole]


def split(samples: list[int], ranks: int) -> list[list[int]]:
    share = len(samples) // ranks
    return [samples[rank * share : (rank + 1) * share] for rank in range(ranks)]
