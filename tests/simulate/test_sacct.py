"""Accounting of Slurm: what its rows mean, what a cluster has lost by it, and its replay."""

from collections.abc import Iterator
from datetime import UTC
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from cordee.account.elsewhere import CUT_SHORT, OtherAttempt, OtherCost, other_cost
from cordee.errors import TraceError
from cordee.simulate.cluster import cluster
from cordee.simulate.policies import named_policies
from cordee.simulate.traces.job import Tally
from cordee.simulate.traces.sacct import Export, read_export
from cordee.simulate.what_if import what_if
from cordee.units import US_PER_HOUR, US_PER_S

SAMPLE = Path(__file__).parents[1] / "data" / "sacct.txt"
HEAD = "JobID|JobName|User|State|Submit|Start|End|ElapsedRaw|AllocTRES\n"
DAY = "2026-03-02T"


def read(path: Path, zone: str | None = None) -> tuple[Export, Tally]:
    tally = Tally(str(path))
    return read_export(path, tally, ZoneInfo(zone) if zone else UTC), tally


def written(folder: Path, text: str) -> Path:
    path = folder / "sacct.txt"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def sample() -> Export:
    return read(SAMPLE)[0]


def cost_of(export: Export, by: str = "user", every_us: int | None = None, gpus: int | None = 32) -> OtherCost:
    return other_cost(export.attempts, by=by, price_of=lambda kind: 2_000_000, gpus=gpus, every_us=every_us)


def test_every_gpu_hour_of_the_sample_has_the_end_that_slurm_says(sample: Export) -> None:
    found = cost_of(sample)
    hours = {end: gpu_us / US_PER_HOUR for end, gpu_us in found.total.gpu_us.items()}
    assert hours == {
        "completed": 160 + 96 + 64 + 8 + 8 + 56 + 4 + 8,
        "running": 140,  # from 21.25 h to the end of the export
        "cancelled": 16,
        "failed": 2,
        "out_of_memory": 2,
        "timeout": 32,
        "node_fail": 48,
        "preempted": 64,
        "requeued": 64,
    }
    assert found.total.jobs == 15 and found.total.attempts == 16
    assert found.gpus * (found.to_us - found.from_us) == found.total.held_gpu_us + found.idle_gpu_us
    assert sum(row.held_micro_usd for row in found.rows) == found.total.held_micro_usd == 772 * 2_000_000
    assert found.total.lost_gpu_us == sum(found.total.gpu_us[end] for end in CUT_SHORT)
    assert {row.key: row.lost_gpu_us / US_PER_HOUR for row in cost_of(sample, "account").rows} == {
        "nlp": 64 + 64 + 34,
        "vision": 48 + 2,
    }


def test_jobs_that_save_lose_half_an_interval(sample: Export) -> None:
    found = cost_of(sample, every_us=US_PER_HOUR)
    assert found.total.lost_gpu_us / US_PER_HOUR == 16 / 2 + 16 / 2 + 8 / 2 + 8 / 2 + 2 + 2
    assert "every 1h" in found.assumptions[0]


def test_the_most_gpus_at_once_stand_for_a_cluster_that_is_not_given(sample: Export) -> None:
    found = cost_of(sample, gpus=None)
    assert found.gpus == 32 and not found.gpus_given
    assert any("the most that were held at once" in line for line in found.assumptions)


def test_a_window_cuts_attempts_at_its_bounds(sample: Export) -> None:
    zero_us = min(each.start_us for each in sample.attempts if each.start_us is not None)
    found = other_cost(
        sample.attempts,
        by="user",
        price_of=lambda kind: 0,
        gpus=32,
        window_us=(zero_us + US_PER_HOUR, zero_us + 2 * US_PER_HOUR),
    )
    assert found.total.held_gpu_us == 32 * US_PER_HOUR and found.idle_gpu_us == 0


def test_rows_that_are_no_attempts_are_counted(sample: Export) -> None:
    export, tally = read(SAMPLE)
    assert tally.kinds == {"asks for no GPU": 1, "7 columns in place of 19: cut off": 1}
    assert export.steps == 42 and export.again == 1 and export.without_first == 0
    waiting = [each for each in export.attempts if each.start_us is None]
    assert {each.job_id for each in waiting} == {"4104_[3-9%3]", "4109"}


@pytest.mark.parametrize(
    ("rows", "attempts"),
    [
        # A name with the delimiter and a quote, as sacct writes it; GPUs of a kind only; CANCELLED by a user.
        (f'1|a|b "c|ann|CANCELLED by 7|{DAY}10:00:00|{DAY}10:00:00|{DAY}11:00:00|3600|gres/gpu:a100=2,node=1\n',
         [("ann", "cancelled", 2, "a100", 3600)]),
        # `sacct -p` ends each line with the delimiter; several kinds; days in Elapsed.
        (f"1|x|ann|FAILED|{DAY}10:00:00|{DAY}10:00:00|{DAY}11:00:00|1-00:00:01|gres/gpu:a=2,gres/gpu:b=4|\n",
         [("ann", "failed", 6, "b", 86401)]),
        # Two exports of a job that ran across the bound: the later one counts.
        ((f"1|x|ann|RUNNING|{DAY}10:00:00|{DAY}10:00:00|Unknown|3600|gres/gpu=8\n"
          f"1|x|ann|COMPLETED|{DAY}10:00:00|{DAY}10:00:00|{DAY}12:00:00|7200|gres/gpu=8\n"),
         [("ann", "completed", 8, "", 7200)]),
        # In the earlier one it still waited.
        ((f"1|x|ann|PENDING|{DAY}10:00:00|Unknown|Unknown|0|gres/gpu=8\n"
          f"1|x|ann|NODE_FAIL|{DAY}10:00:00|{DAY}11:00:00|{DAY}12:00:00|3600|gres/gpu=8\n"),
         [("ann", "node_fail", 8, "", 3600)]),
    ],
)  # fmt: skip
def test_formats_that_bite(tmp_path: Path, rows: str, attempts: list[tuple[str, str, int, str, int]]) -> None:
    export, tally = read(written(tmp_path, HEAD + rows))
    found = [
        (each.user, each.end, each.gpus, each.gpu_name, (each.end_us - (each.start_us or 0)) // US_PER_S)
        for each in export.attempts
    ]
    assert found == attempts and not tally.kinds


def test_local_times_across_the_end_of_summer_time_hold_what_slurm_measured(tmp_path: Path) -> None:
    row = "1|x|ann|COMPLETED|2026-10-25T01:00:00|2026-10-25T01:30:00|2026-10-25T02:30:00|7200|gres/gpu=1\n"
    export, _ = read(written(tmp_path, HEAD + row), "Europe/Berlin")
    (each,) = export.attempts
    assert each.start_us is not None and each.end_us - each.start_us == 7200 * US_PER_S


def test_a_csv_table_with_starts_and_seconds(tmp_path: Path) -> None:
    head = "job_id,user,vc,submit_s,start_s,gpus,duration_s,status"
    text = f"{head}\na,ann,v1,0,600,8,3600,Pass\nb,bob,v2,0,60,1,10,Killed\n"
    export, _ = read(written(tmp_path, text))
    assert [(each.account, each.end, each.gpus) for each in export.attempts] == [
        ("v1", "completed", 8),
        ("v2", "cancelled", 1),
    ]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "is empty", "sacct -a -D -X -P"),
        ("JobID|State|Elapsed\n1|COMPLETED|00:00:01\n", "no column Submit, Start, End, AllocTRES" , "sacct -a -D"),
        (HEAD, "has no attempt on GPUs", "export it"),
        (HEAD + f"1|x|a|COMPLETED|{DAY}10:00:00|{DAY}10:00:00|{DAY}11:00:00|3600|cpu=4,node=1\n",
         "1 rows: asks for no GPU", "AccountingStorageTRES=gres/gpu"),
        (HEAD + "1|x|a|COMPL", "3 columns|cut off|4 columns", ""),
        (HEAD + f"1|x|a|BROKEN|{DAY}10:00:00|{DAY}10:00:00|{DAY}11:00:00|3600|gres/gpu=4\n", "unknown state 'B", ""),
        (HEAD + "1|x|a|FAILED|yesterday|now|then|3600|gres/gpu=4\n", "a time that cannot be read", ""),
    ],
)  # fmt: skip
def test_a_file_that_is_no_export_is_named(tmp_path: Path, text: str, message: str, hint: str) -> None:
    with pytest.raises(TraceError, match=message) as refused:
        read(written(tmp_path, text))
    assert hint in (refused.value.hint or "")


def test_requeued_jobs_without_their_earlier_attempts_are_counted(tmp_path: Path) -> None:
    head = HEAD.replace("|AllocTRES", "|AllocTRES|Restarts")
    row = f"1|x|ann|COMPLETED|{DAY}10:00:00|{DAY}10:00:00|{DAY}11:00:00|3600|gres/gpu=8|2\n"
    assert read(written(tmp_path, head + row))[0].without_first == 1


def test_the_replay_repeats_no_lost_work_and_holds_no_gpu_twice(sample: Export) -> None:
    nodes = cluster("4x8xH100", micro_usd_per_gpu_hour=2_000_000)
    policies = named_policies(["cordee", "easy"])
    found = what_if(sample.attempts, nodes, policies, name="sample", every_us=None)
    again = what_if(sample.attempts, nodes, policies, name="sample", every_us=None)
    assert found == again and found.jobs == 13
    assert found.log.lost_gpu_us / US_PER_HOUR == 64 + 64 + 48 and found.log.preemptions == 2
    assert found.log.held_gpu_us / US_PER_HOUR == 772
    needed = 772 - 64 - 64 - 48
    for each in found.replayed:
        assert each.held_gpu_us / US_PER_HOUR >= needed and each.held_gpu_us < found.log.held_gpu_us
        assert each.held_gpu_us + each.idle_gpu_us == pytest.approx(32 * each.makespan_s * US_PER_S)
    assert not found.policies[0].errors
    assert any("scavenge" in line for line in found.assumptions)


def test_what_earlier_attempts_saved_is_not_needed_again() -> None:
    def attempts() -> Iterator[OtherAttempt]:
        for number, end in enumerate(("preempted", "completed")):
            start_us = number * 10 * US_PER_HOUR
            yield OtherAttempt(
                job_id="a",
                end=end,
                gpus=8,
                submit_us=start_us,
                start_us=start_us,
                end_us=start_us + 4 * US_PER_HOUR,
                line=number,
            )

    held = []
    for every_us in (None, 2 * US_PER_HOUR):
        found = what_if(tuple(attempts()), cluster("1x8"), named_policies(["fifo"]), name="a", every_us=every_us)
        held.append(found.replayed[0].held_gpu_us / 8 / US_PER_HOUR)
    assert held == pytest.approx([4, 7], abs=0.1)
