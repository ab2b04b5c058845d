"""Small samples of every public format; rows that are no job are counted by kind, or refused with their line."""

import gzip
import json
import sqlite3
from pathlib import Path

import pytest
from crowded_world import crowded

from cordee.errors import TraceError
from cordee.event_json import encode
from cordee.simulate.traces import TraceJob, open_trace
from cordee.units import US_PER_S as S

COMMON = """job_id,user,vc,submit_s,gpus,duration_s,status,cpu_milli,memory_mib,gpu_spec
a,ann,v1,0,8,3600,Pass,4000,1024,V100
b,,v2,10,0.46,60,,,,V100|T4
"""
HELIOS = """job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue
1425512,uVMrF,vchbv,4,16,1,FAILED,2020-06-09 18:41:27,2020-06-09 18:41:27,2020-06-09 18:45:36,249,0
1425511,uXBbc,vcJkd,1,1,1,COMPLETED,2020-06-09 18:41:01,2020-06-09 18:41:01,2020-06-10 04:55:09,36848,0
1425520,uXBbc,vcJkd,0,4,1,COMPLETED,2020-06-09 18:42:01,2020-06-09 18:42:01,2020-06-09 18:43:01,60,0
"""
SEREN = """job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,queue,gpu_time
5778432,u5907,1,8,128,Other,FAILED,2023-03-01 00:18:22+08:00,2023-03-01 00:18:54+08:00,2023-03-01 00:20:51+08:00,117,32,936.0
5778469,u5907,1,8,128,Other,COMPLETED,2023-03-01 00:23:58+08:00,2023-03-01 00:24:11+08:00,2023-03-01 01:09:04+08:00,2693,13,21544.0
"""  # noqa: E501 - as it is published
KALOS = """job_id,user,node_num,gpu_num,cpu_num,mem_per_pod_GB,shared_mem_per_pod,type,state,submit_time,start_time,end_time,fail_time,stop_time,duration,queue,gpu_time
dlctk,uf794,8,64,960,1000,100.0,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,2023-05-17 11:01:16+00:00,2023-05-17 11:01:16+00:00,,18,10.0,1152.0
"""  # noqa: E501 - as it is published
OPENB = """name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time
openb-pod-0000,12000,16384,1,1000,,LS,Running,0,12537496,0
openb-pod-0001,6000,12288,1,460,V100M16,LS,Running,427061,12902960,427065
openb-pod-0096,18708,64512,1,1000,,LS,Pending,10019975,10020052,
openb-pod-0200,8000,100,0,0,,BE,Running,10,20,11
"""
SACCT = """JobID|User|Partition|Submit|Start|End|Elapsed|State|AllocTRES|Timelimit
100|ann|gpu|2024-05-01T10:00:00|2024-05-01T10:05:00|2024-05-02T10:05:01|1-00:00:01|COMPLETED|gres/gpu:a100=16|2-00:00:00
100.batch|||2024-05-01T10:05:00|2024-05-01T10:05:00|2024-05-02T10:05:01|1-00:00:01|COMPLETED|gres/gpu=16|
101|bob|gpu|2024-05-01T10:01:00|2024-05-01T10:05:00|2024-05-01T10:06:00|00:01:00|CANCELLED by 7|gres/gpu=1|UNLIMITED
102|bob|cpu|2024-05-01T10:01:00|2024-05-01T10:05:00|2024-05-01T10:06:00|00:01:00|COMPLETED|cpu=4,node=1|01:00:00
103|bob|gpu|Unknown|Unknown|Unknown|00:00:00|PENDING||01:00:00
"""
PHILLY = [
    {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": "application_1",
        "attempts": [
            {
                "start_time": "2017-10-07 01:12:09",
                "end_time": "2017-10-07 01:13:23",
                "detail": [{"ip": "m47", "gpus": ["gpu0", "gpu1"]}, {"ip": "m48", "gpus": ["gpu0"]}],
            },
            {
                "start_time": "2017-10-07 01:13:30",
                "end_time": "2017-10-07 02:13:30",
                "detail": [{"ip": "m412", "gpus": ["gpu0", "gpu1", "gpu2", "gpu3"]}],
            },
        ],
        "submitted_time": "2017-10-07 01:11:39",
        "user": "ce2f4c",
    },
    {"status": "Killed", "vc": "v", "jobid": "2", "attempts": [], "submitted_time": "2017-10-07 01:00:00", "user": "u"},
    {
        "status": "Failed",
        "vc": "v",
        "jobid": "3",
        "attempts": [
            {"start_time": "2017-10-07 01:12:09", "end_time": None, "detail": [{"ip": "m", "gpus": ["gpu0"]}]}
        ],
        "submitted_time": "2017-10-07 01:00:00",
        "user": "u",
    },
]


def read(
    path: Path, text: str, *, strict: bool = False, form: str | None = None
) -> tuple[list[TraceJob], dict[str, int]]:
    path.write_text(text)
    trace = open_trace(path, form)
    tally = trace.tally(strict=strict)
    jobs = list(trace.jobs(tally))
    assert tally.jobs == len(jobs)
    return jobs, tally.kinds


def test_the_common_form(tmp_path: Path) -> None:
    (a, b), bad = read(tmp_path / "t.csv", COMMON)
    assert (a.gpus, a.duration_us, a.user, a.vc, a.cpu_milli, a.gpu_name) == (8, 3600 * S, "ann", "v1", 4000, "V100")
    assert a.memory_bytes == 1 << 30
    assert (b.gpus, b.gpu_milli, b.gpu_name, b.submit_us) == (1, 460, None, 10 * S)
    assert not bad


INSTANCES = """\
job_id,submit_s,start_s,end_s,gpus,mig
a,0,60,3660,1,1g.10gb
b,2026-01-01T00:00:00,2026-01-01T00:01:00,2026-01-01T02:01:00,H100:3g.40gb,
c,0,60,3660,2,
d,0,60,3660,2,1g.10gb
e,0,60,3660,1,small
f,0,,3660,1,
g,0,60,30,1,
"""


def test_a_start_and_an_end_stand_for_the_run_time_and_a_profile_for_a_part_of_a_gpu(tmp_path: Path) -> None:
    jobs, bad = read(tmp_path / "t.csv", INSTANCES)
    assert [(job.job_id, job.duration_us // S, job.gpus, job.mig, job.gpu_name) for job in jobs] == [
        ("a", 3600, 1, "1g.10gb", None), ("c", 3600, 2, "", None), ("b", 7200, 1, "3g.40gb", "H100"),
    ]  # fmt: skip
    assert bad == {"a gang on MIG instances": 1, "mig is no MIG profile": 1, "no start": 1, "negative run time": 1}


def test_slurm_without_a_run_time_and_with_a_mig_instance(tmp_path: Path) -> None:
    text = (
        "JobID|Submit|Start|End|State|AllocTRES\n"
        "1|2026-01-01T00:00:00|2026-01-01T00:01:00|2026-01-01T01:01:00|COMPLETED|cpu=4,gres/gpu:a100_1g.5gb=1\n"
        "2|2026-01-01T00:00:00|2026-01-01T00:01:00|Unknown|RUNNING|gres/gpu=8\n"
    )
    (job,), bad = read(tmp_path / "sacct.txt", text)
    assert (job.duration_us, job.gpus, job.mig, job.gpu_name) == (3600 * S, 1, "1g.5gb", "a100")
    assert bad == {"no end": 1}


def test_helios(tmp_path: Path) -> None:
    (first, second), bad = read(tmp_path / "cluster_log.csv", HELIOS)
    assert (first.job_id, first.submit_us, first.gpus, first.duration_us) == ("1425511", 0, 1, 36848 * S)
    assert (second.submit_us, second.vc, second.status, second.gpus) == (26 * S, "vchbv", "FAILED", 4)
    assert bad == {"asks for no GPU": 1}


@pytest.mark.parametrize(("text", "found"), [(SEREN, [(8, 117), (8, 2693)]), (KALOS, [(64, 18)])])
def test_acme(tmp_path: Path, text: str, found: list[tuple[int, int]]) -> None:
    jobs, bad = read(tmp_path / "trace.csv", text)
    assert [(job.gpus, job.duration_us // S) for job in jobs] == found and not bad
    assert jobs[-1].submit_us == (336 * S if len(jobs) == 2 else 0)


def test_alibaba_2023(tmp_path: Path) -> None:
    (first, second), bad = read(tmp_path / "openb.csv", OPENB)
    assert (first.duration_us, first.gpu_milli) == (12537496 * S, 1000)
    assert (second.duration_us, second.gpu_milli, second.gpu_name) == ((12902960 - 427065) * S, 460, "V100M16")
    assert bad == {"never ran": 1, "asks for no GPU": 1}


def test_slurm(tmp_path: Path) -> None:
    (first, second), bad = read(tmp_path / "sacct.txt", SACCT)
    assert (first.gpus, first.duration_us, first.gpu_name) == (16, 86_401 * S, "a100")
    assert first.time_limit_us == 2 * 86_400 * S
    assert (second.job_id, second.gpus, second.status, second.submit_us) == ("101", 1, "CANCELLED", 60 * S)
    assert second.time_limit_us is None
    assert bad == {"asks for no GPU": 1, "no submission time": 1}, "a step of a job is no job, and no bad row"


def test_a_quote_in_a_name_of_slurm_takes_in_no_rows(tmp_path: Path) -> None:
    text = SACCT.replace("|Partition|", "|JobName|").replace("|gpu|", '|"run|')
    jobs, _ = read(tmp_path / "sacct.txt", text)
    assert [job.job_id for job in jobs] == ["100", "101"]


def test_philly(tmp_path: Path) -> None:
    (job,), bad = read(tmp_path / "cluster_job_log", json.dumps(PHILLY))
    assert (job.gpus, job.duration_us, job.vc, job.status) == (4, 3674 * S, "ee9e8c", "Pass")
    assert bad == {"never ran": 1, "had not ended": 1}


def test_alibaba_2020(tmp_path: Path) -> None:
    (tmp_path / "pai_job_table.csv").write_text(
        "j1,i1,u1,Terminated,1000.0,2000.0\nj2,i2,u2,Failed,900.0,950.0\nj3,i3,u3,Running,1000.0,\nj4,i4,u4,Failed,1.0,2.0\n"
    )
    (tmp_path / "pai_task_table.csv").write_text(
        "j1,ps,1.0,Terminated,1010.0,2000.0,600.0,10.0,,\n"
        "j1,worker,2.0,Terminated,1010.0,2000.0,400.0,10.0,100.0,V100\n"
        "j2,tensorflow,1.0,Failed,910.0,950.0,600.0,29.0,50.0,MISC\n"
        "j3,tensorflow,1.0,Running,1010.0,,600.0,29.0,50.0,T4\n"
    )
    trace = open_trace(tmp_path)
    tally = trace.tally()
    first, second = trace.jobs(tally)
    assert (first.job_id, first.gpus, first.gpu_milli, first.duration_us, first.gpu_name) == (
        "j2",
        1,
        500,
        40 * S,
        None,
    )
    assert (second.gpus, second.cpu_milli, second.duration_us, second.gpu_name) == (2, 14_000, 990 * S, "V100")
    assert second.submit_us == 100 * S
    assert tally.kinds == {"had not ended": 1, "no task": 1}
    (tmp_path / "pai_instance_table.csv").write_text("j1,worker,n,w,i,Terminated,1100.0,1900.0,m\n")
    assert [job.duration_us // S for job in trace.jobs(trace.tally())] == [40, 800], "instances are more exact"


def test_cordees_own_log(tmp_path: Path) -> None:
    done = crowded(3)
    lines = [json.dumps(encode(event)) for event in done.log]
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    with sqlite3.connect(tmp_path / "cordee.db") as home:
        home.execute("CREATE TABLE log (number INTEGER PRIMARY KEY, body TEXT)")
        home.executemany("INSERT INTO log VALUES (?, ?)", enumerate(lines, start=1))
    home.close()
    from_lines, from_home = (list(open_trace(each).jobs(open_trace(each).tally())) for each in (path, tmp_path))
    assert from_lines == from_home and len(from_lines) == 40
    assert all(job.status == "done" and job.duration_us > 0 for job in from_lines)


BAD = """job_id,submit_s,gpus,duration_s
good,1,1,10
minus,-1,1,10
back,2,1,-5
less,2,-1,5
words,now,1,10
none,3,,10
short,4,1
nan,5,nan,10
inf,5,1,inf
"""


def test_bad_rows_are_counted_by_kind_and_the_rest_is_read(tmp_path: Path) -> None:
    jobs, bad = read(tmp_path / "t.csv", BAD)
    assert [job.job_id for job in jobs] == ["good"]
    assert bad == {
        "negative submission time": 1,
        "negative run time": 1,
        "negative number of GPUs": 1,
        "submission time is no time": 1,
        "no number of GPUs": 1,
        "3 columns in place of 4": 1,
        "number of GPUs is no number": 1,
        "run time is no time": 1,
    }


DATES = """job_id,submit_s,gpus,duration_s,tier
a,2026-03-29 00:30:00,1,01:00:00,Production
b,2026-03-29T03:30:00+02:00,1.5,1h30m,gold
c,2026-03-29T01:30:01,0.5,1e18,
"""


def test_dates_and_lengths_with_units_are_read_and_what_runs_differently_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(DATES)
    tally = open_trace(path).tally()
    jobs = list(open_trace(path).jobs(tally))
    assert [(job.submit_us, job.duration_us, job.gpus, job.tier) for job in jobs] == [
        (0, 3600 * S, 1, "production"),
        (3600 * S, 5400 * S, 2, "gold"),
    ]
    assert tally.kinds == {"runs for more than a hundred years": 1}
    assert tally.changes == {
        "GPUs are no whole number: runs on the next larger one": 1,
        "an unknown tier: runs as standard": 1,
    }
    with pytest.raises(TraceError, match="line 3: GPUs are no whole number"):
        list(open_trace(path).jobs(open_trace(path).tally(strict=True)))


def test_times_of_the_common_form_count_from_the_first_job(tmp_path: Path) -> None:
    """Seconds since 1970 made `--until 30d` end before the first job."""
    text = "job_id,submit_s,gpus,duration_s\nb,1700000060,1,10\na,1700000000,1,10\n"
    assert [(job.job_id, job.submit_us // S) for job in read(tmp_path / "t.csv", text)[0]] == [
        ("a", 0),
        ("b", 60),
    ]


def test_the_same_row_again_is_left_out_and_another_of_its_id_runs(tmp_path: Path) -> None:
    """An export of overlapping weeks has jobs twice, which doubled their load without a word."""
    text = "job_id,submit_s,gpus,duration_s\na,0,1,10\nb,0,1,10\na,0,1,10\na,0,1,20\na,5,1,10\n,5,1,10\n,5,1,10\n"
    jobs, bad = read(tmp_path / "t.csv", text)
    assert [(job.job_id, job.submit_us // S, job.duration_us // S) for job in jobs] == [
        ("a", 0, 10),
        ("b", 0, 10),
        ("a", 0, 20),
        ("a", 5, 10),
        ("", 5, 10),
        ("", 5, 10),
    ]
    assert bad == {"the same row again": 1}


def test_strict_is_an_error_with_the_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"t\.csv, line 3: negative submission time"):
        read(tmp_path / "t.csv", BAD, strict=True)


@pytest.mark.parametrize(
    ("text", "form", "says"),
    [
        ("job_id,gpus\n", None, "start_s and end_s in place of duration_s"),
        ("", None, "t.csv is empty"),
        ("job_id,submit_s,duration_s\n", "common", "no column gpus"),
        ("{}", "philly", "no list of jobs"),
        ("[1,", "philly", "is not JSON"),
        ("x", "csv", "no format 'csv'"),
        ('{"kind": "Nothing"}', None, "record 1: unknown kind"),
    ],
)
def test_open_trace_refuses_other_files(tmp_path: Path, text: str, form: str | None, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        read(tmp_path / "t.csv", text, form=form)


def test_files_that_are_not_there_or_cut_off(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        open_trace(tmp_path / "none.csv")
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(COMMON.encode())[:40])
    with pytest.raises(TraceError, match="cannot be read"):
        open_trace(cut)
    with pytest.raises(TraceError, match="neither PAI tables"):
        open_trace(tmp_path)
