"""The job's YAML: what may be left out, how quantities are read, and that every mistake is pointed at."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import SpecError
from cordee.workload import spec
from cordee.workload.gpus import parse_gpus, parse_wanted
from cordee.workload.spec import Checkpoint, JobSpec, Limit, OnHang, OnPreempt, Place, Retries, parse_spec
from cordee.workload.tuning import TuneSpec

FULL = """\
version: 1
name: llama-70b
run: torchrun train.py --seed 1
gpus: H100:64
launch: node
tier: preemptible
capacity: spot
queue: research/llm
priority: 5
estimate: 6h
cpus: 512
memory: 4TiB
place:
  unit: 8
  within: block
elastic:
  sizes: [32, 48]
limit:
  time: 3d12h
  cost: $9,000.50
  preemptions: 3
checkpoint:
  to: s3://bucket/llama
  every: 10m
  keep: 3
retries:
  infrastructure: 10
  script: 0
  exit: {17: 2}
on_preempt:
  grace: 90s
  then: stop
on_hang:
  report_after: 2m
  restart_after: 30m
model:
  name: llama-3-70b
  seq: 8192
  global_batch: 512
  optimizer: adamw-8bit
  layout: tp=8,pp=2
env:
  WANDB_MODE: offline
  WORKERS: 4
secrets: [HF_TOKEN]
"""


def test_only_run_and_gpus_are_required() -> None:
    spec = parse_spec("run: python train.py\ngpus: 4\n")
    assert spec == JobSpec(run="python train.py", gpus=4)
    assert (spec.tier, spec.capacity, spec.queue, spec.launch, spec.name) == (
        "standard", "any", "default", "auto", "job",
    )  # fmt: skip
    assert spec.limit == Limit(time_s=None, cost_micro_usd=None)
    assert spec.checkpoint == Checkpoint(to=None, every_s="auto", keep=2)
    assert spec.on_preempt == OnPreempt(grace_s="auto", then="requeue") and spec.on_preempt.notice_s == 30.0
    assert spec.on_hang == OnHang(report_after_s=60.0, restart_after_s=None)
    assert spec.model is None


def test_all_keys_are_read_into_base_units() -> None:
    spec = parse_spec(FULL)
    assert (spec.gpus, spec.gpu, spec.launch, spec.tier) == (64, "H100", "node", "preemptible")
    assert spec.retries == Retries(infrastructure=10, script=0, exit={17: 2})
    assert spec.limit == Limit(time_s=302_400.0, cost_micro_usd=9_000_500_000, preemptions=3)
    assert (spec.estimate_s, spec.cpus, spec.memory_bytes) == (21_600.0, 512, 4 * 2**40)
    assert spec.place == Place(unit=8, within="block") and spec.sizes == (48, 32)
    assert (spec.checkpoint.to, spec.checkpoint.every_s, spec.checkpoint.keep) == ("s3://bucket/llama", 600.0, 3)
    assert (spec.on_preempt.grace_s, spec.on_preempt.then) == (90.0, "stop")
    assert spec.on_hang == OnHang(report_after_s=120.0, restart_after_s=1800.0)
    assert spec.model is not None
    assert (spec.model.name, spec.model.seq, spec.model.layout) == ("llama-3-70b", 8192, "tp=8,pp=2")
    assert spec.env == {"WANDB_MODE": "offline", "WORKERS": "4"}
    assert spec.secrets == ("HF_TOKEN",)


def test_json_is_a_faithful_form() -> None:
    for text in (FULL, "run: [python, train.py]\ngpus: 1\n"):
        spec = parse_spec(text)
        assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_run_is_a_shell_line_or_a_list_of_words() -> None:
    assert parse_spec("run: python train.py\ngpus: 1").run == "python train.py"
    assert parse_spec("run: [python, train.py]\ngpus: 1").run == ("python", "train.py")
    assert parse_spec("run: |\n  a\n  b\ngpus: 1").run == "a\nb\n"


@given(st.integers(1, 100_000), st.sampled_from(["H100", "A100-80", "RTX 4090", "mi300x"]))
def test_gpus_is_the_total_however_it_is_written(count: int, kind: str) -> None:
    assert parse_gpus(count) == parse_gpus(str(count)) == (count, None)
    assert parse_gpus(f"{count}x{kind}") == parse_gpus(f"{kind}:{count}") == parse_gpus(f"{count} x {kind}")
    assert parse_gpus(f"{count}x{kind}") == (count, kind)


@pytest.mark.parametrize(
    "text", ["", "H100", "0", "0xH100", "-4", "4.5", "8x8", "8x8xH100x", "x4", "H100:", "4 GPUs please"]
)
def test_a_number_of_gpus_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(SpecError):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (0.5, (1, 500, None)),
        ("0.125", (1, 125, None)),
        ("0.5xH100", (1, 500, "H100")),
        ("A100-80:0.25", (1, 250, "A100-80")),
        ("8xH100", (8, 1000, "H100")),
    ],
)
def test_a_part_of_a_gpu_goes_with_one(text: str | float, wanted: tuple[int, int, str | None]) -> None:
    assert parse_wanted(text) == wanted
    spec = parse_spec(f"run: x\ngpus: {text}")
    assert (spec.gpus, spec.gpu_milli, spec.gpu) == wanted


@pytest.mark.parametrize(
    ("text", "mig", "gpu"),
    [
        ("1g.10gb", "1g.10gb", None),
        ("H100:3g.40gb", "3g.40gb", "H100"),
        ("1g.10gb+me x A100", "1g.10gb+me", "A100"),
        ("mig-1g.10gb", "1g.10gb", None),
        ("1g.10gb:1", "1g.10gb", None),
    ],
)
def test_a_mig_instance_goes_with_one_gpu(text: str, mig: str, gpu: str | None) -> None:
    spec = parse_spec(f"run: x\ngpus: '{text}'")
    assert (spec.gpus, spec.gpu_milli, spec.mig, spec.gpu) == (1, 1000, mig, gpu)


@pytest.mark.parametrize("text", ["2x1g.10gb", "1g.10gb:4"])
def test_a_gang_on_mig_instances_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match=r"gang on MIG instances: NCCL .*\n.*gpus: 1g.10gb"):
        parse_spec(f"run: x\ngpus: '{text}'")
    with pytest.raises(SpecError, match="goes with one rank"):
        parse_spec("run: x\ngpus: 1g.10gb\nplace: {within: node}")


@pytest.mark.parametrize("text", ["0.0", "1.5", "0.0004", "0.5x", "0.5x8", "-0.5", "H100:0.5x", "0.5 GPUs please"])
def test_a_part_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="GPU"):
        parse_wanted(text)


def test_an_elastic_job_runs_on_the_halves_in_whole_units() -> None:
    assert parse_spec("run: x\ngpus: 4\nelastic: {sizes: [2], grow_after: 5m}").elastic.grow_after_s == 300
    assert parse_spec("run: x\ngpus: 48\nelastic: {at_least: 4}").sizes == (24, 12, 6)
    assert parse_spec("run: x\ngpus: 48\nelastic: {at_least: 4}\nplace: {unit: 4}").sizes == (24, 12)
    assert parse_spec("run: x\ngpus: 48").sizes == ()


@pytest.mark.parametrize(
    ("line", "place", "says", "hint"),
    [
        ("teir: production", "3:1", "unknown key 'teir'", "did you mean tier?"),
        ("gpu: H100", "3:1", "unknown key 'gpu'", "did you mean gpus?"),
        ("tier: prodution", "3:1", "unknown tier 'prodution'", "did you mean production?"),
        ("tier: prod", "3:1", "unknown tier 'prod'", "did you mean production?"),
        ("tier: spot", "3:1", "unknown tier 'spot'", "capacity: spot"),
        ("checkpoint: {every: 0s}", "3:14", "checkpoint.every = 0.0", "use more than 0"),
        ("model: {name: gpt2, seq: 0}", "3:21", "model.seq = 0", "use 1 or more"),
        ("priority: high", "3:1", "priority = 'high'", "write a whole number"),
        ("priority: 5000", "3:1", "priority = 5000", "use 1000 or less"),
        ("secrets: HF_TOKEN", "3:1", "should be a valid list", "secrets: [HF_TOKEN]"),
        ("capacity: preemptible", "3:1", "unknown capacity 'preemptible'", "any, on-demand, spot"),
        ("launch: mpi", "3:1", "unknown launch 'mpi'", "auto, rank, node"),
        ("limit: {tiem: 3h}", "3:9", "unknown key 'tiem' in limit", "did you mean time?"),
        ("limit: {time_s: 3}", "3:9", "unknown key 'time_s' in limit", "did you mean time?"),
        ("limit:\n  time: 47", "4:3", "limit.time: '47' is not a duration", "47h"),
        ("limit:\n  cost: 500", "4:3", "limit.cost: '500' is not an amount of money", "$500"),
        ("limit:\n  time: [1h]", "4:3", "limit.time cannot be ['1h']", ""),
        ("limit: 47h", "3:1", "limit must be a mapping", "indented"),
        ("retries: {script: -1}", "3:11", "retries.script = -1", "use 0 or more"),
        ("retries: {exit: {0: 1}}", "3:18", "retries.exit.0", "use 1 or more"),
        ("retries: script, 3=1", "3:1", "retries: 'script' cannot be read", "an exit code"),
        ("limit: {preemptions: -1}", "3:9", "limit.preemptions = -1", "use 0 or more"),
        ("estimate: 6", "3:1", "estimate: '6' is not a duration", "47h"),
        ("memory: 64", "3:1", "memory: '64' is not a size", "80GiB"),
        ("memory: 64 gigs", "3:1", "memory: '64 gigs' is not a size", "80GiB"),
        ("cpus: 0", "3:1", "cpus = 0", "use more than 0"),
        ("place: {within: rak}", "3:9", "unknown place.within 'rak'", "did you mean rack?"),
        ("place: {untis: 2}", "3:9", "unknown key 'untis' in place", "did you mean unit?"),
        ("place: {unit: 3}", "", "4 GPUs are not whole units of place.unit = 3", ""),
        ("elastic: {at_least: 4}", "", "elastic.at_least = 4 is not below gpus = 4", ""),
        ("elastic: {sizes: [2, 8]}", "", "elastic.sizes has 8, which is not below gpus = 4", ""),
        ("elastic: {at_least: 1, sizes: [2]}", "3:1", "give either at_least", ""),
        ("elastic: {sizes: 2}", "3:11", "should be a valid list", "sizes: [48, 32]"),
        ("checkpoint: {every: 10}", "3:14", "checkpoint.every: '10' is not a duration", "30m"),
        ("checkpoint: {every: 0s}", "3:14", "checkpoint.every", ""),
        ("checkpoint:\n  keep: 1", "4:3", "checkpoint.keep = 1", "two generations"),
        ("on_preempt: {then: die}", "3:14", "unknown on_preempt.then 'die'", "requeue, stop"),
        ("name: My Job", "3:1", "name = 'My Job'", "lower-case"),
        ("queue: ''", "3:1", "queue = ''", "letters"),
        ("priority: high", "3:1", "priority = 'high'", ""),
        ("version: 2", "3:1", "unknown version 2", "use 1"),
        ("model: {seq: 8192}", "3:1", "give either name", ""),
        ("model: {name: a, config: b}", "3:1", "give either name", ""),
        ("model: {name: a, seq: 0}", "3:18", "model.seq = 0", ""),
        ("env: {A: true}", "3:7", "env.A is not a text", 'A: "..."'),
        ("env: {A: 1.10}", "3:7", "env.A is not a text", "quotes"),
        ("env: {A: b}\nsecrets: [A]", "", "A is both in env and in secrets", ""),
        ("secrets: HF_TOKEN", "3:1", "secrets = 'HF_TOKEN'", "[HF_TOKEN]"),
        ("secrets: ['a b']", "", "'a b' cannot name an environment variable", ""),
        ("run: again", "3:1", "not valid YAML", "each key once"),
        ("limit: {time: 3h", "4:1", "not valid YAML", "quotes"),
    ],
)
def test_a_mistake_is_pointed_at(line: str, place: str, says: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(f"run: python train.py\ngpus: 4\n{line}\n", source="job.yaml")
    assert says in caught.value.message
    assert caught.value.message.startswith(f"job.yaml:{place}" if place else "job.yaml: ")
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a job is a mapping"),
        ("- run", "a job is a mapping"),
        ("gpus: 4", "the job has no run"),
        ("run: x", "the job has no gpus"),
        ("run:\ngpus: 4", "the job has no run"),
        ("run: '  '\ngpus: 4", "run is empty"),
        ("run: []\ngpus: 4", "run is empty"),
        ("run: [a, 3]\ngpus: 4", "run = ['a', 3]"),
        ("run: x\ngpus: many", "'many' is not a number of GPUs"),
        ("run: x\ngpus: -1", "'-1' is not a number of GPUs"),
        ("run: x\ngpus: [4]", "gpus cannot be [4]"),
        ("\x00", "not valid YAML"),
        ("run: x\ngpus: 1\nenv: &e {A: *e}", "env.A is not a text"),
        ("run: x\ngpus: 1\nenv: {A: 2026-01-01}", "env.A is not a text"),
        ("run: " + "[" * 100_000, "nested too deeply"),
        ("\n".join(" " * level + "a:" for level in range(100)), "nested too deeply"),
    ],
)
def test_what_is_no_job_is_refused(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text)
    assert says in caught.value.message


def test_a_tag_makes_no_object() -> None:
    assert parse_spec("run: !!python/object/apply:os.getcwd x\ngpus: 4").run == "x"


def test_an_anchor_may_be_merged() -> None:
    spec = parse_spec("run: x\ngpus: 1\nenv: &e {A: b}\ncheckpoint: {to: /c}\nmodel: {name: gpt2}\n")
    text = "run: x\ngpus: 1\ncheckpoint: &c {to: /c}\nmodel:\n  <<: {name: gpt2}\nenv: {A: b}\n"
    assert parse_spec(text) == spec


@given(st.text(max_size=80))
def test_no_text_does_anything_but_parse_or_be_refused(text: str) -> None:
    try:
        parse_spec(f"run: x\ngpus: 1\n{text}")
    except SpecError as error:
        assert error.message.startswith("<spec>")


def test_a_job_from_flags_is_the_job_from_yaml() -> None:
    from_flags = JobSpec.from_flags(
        run="torchrun train.py --seed 1", gpus="H100:64", name="llama-70b", launch="node", tier="preemptible",
        capacity="spot", queue="research/llm", priority=5, limit_time="3d12h", limit_cost="$9,000.50",
        limit_preemptions=3, retries="infrastructure=10, script=0, 17=2",
        estimate="6h", cpus=512, memory="4TiB", place_unit=8, place_within="block",
        elastic_sizes=[32, 48],
        checkpoint_to="s3://bucket/llama", checkpoint_every="10m", checkpoint_keep=3, grace="90s",
        on_preempt_then="stop", on_hang_report_after="2m", on_hang_restart_after="30m",
        model="llama-3-70b", model_seq=8192, model_global_batch=512,
        model_optimizer="adamw-8bit", model_layout="tp=8,pp=2", env={"WANDB_MODE": "offline", "WORKERS": "4"},
        secrets=["HF_TOKEN"],
    )  # fmt: skip
    assert from_flags == parse_spec(FULL)


def test_flags_that_were_not_given_leave_the_defaults() -> None:
    assert JobSpec.from_flags(run=["a"], gpus="1", tier=None, grace=None) == JobSpec(run=("a",), gpus=1)
    with pytest.raises(SpecError, match=r"^unknown key 'colour'"):
        JobSpec.from_flags(run="a", gpus="1", colour="red")
    with pytest.raises(SpecError, match=r"^on_preempt.grace: '30' is not a duration"):
        JobSpec.from_flags(run="a", gpus="1", grace="30")


def test_the_reference_names_every_key_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "job.md").read_text()
    told = re.findall(r"^[|] `([a-z_.]+)`", page, re.MULTILINE)
    keys = [
        f"{key}.{inner}" if inner else key
        for key in spec._keys(None)
        for inner in (spec._keys(key) if key in spec._SECTIONS else [""])
    ]
    at = keys.index("model.tune")
    keys[at : at + 1] = [f"model.tune.{field.name}" for field in fields(TuneSpec)]
    assert told == keys


@pytest.mark.parametrize(
    ("tune", "message", "hint"),
    [
        ("{train: lora, lora_droput: 0.1}", "unknown key 'lora_droput' in model.tune", "did you mean lora_dropout?"),
        ("lora", "model.tune must be a mapping, not 'lora'", "indented below tune:"),
        ("{train: lorra}", "unknown model.tune.train 'lorra'", "did you mean lora?"),
        ("{lora_dropout: 1.5}", "model.tune.lora_dropout = 1.5", None),
        ("{model_code: megatron}", "unknown model.tune.model_code 'megatron'", "use one of: hf, torchtitan"),
    ],
)
def test_what_is_tuned_is_refused_where_it_stands(tune: str, message: str, hint: str | None) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(f"run: x\ngpus: 1\nmodel:\n  name: llama-3-8b\n  tune: {tune}\n", source="job.yaml")
    assert refused.value.message.startswith("job.yaml:5:") and message in refused.value.message
    assert hint is None or hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("written", "sets", "wait"),
    [
        ("data: s3://bucket/set", ("s3://bucket/set",), 0.0),
        ("data: [s3://bucket/set, /shared/x]", ("s3://bucket/set", "/shared/x"), 0.0),
        ("data: {sets: gs://b/c, wait: 5m}", ("gs://b/c",), 300.0),
        ("data: {sets: [/a], wait: all}", ("/a",), "all"),
    ],
)
def test_datasets_are_written_in_short_or_in_full(written, sets, wait) -> None:
    spec = parse_spec(f"run: x\ngpus: 1\n{written}\n")
    assert (spec.data.sets, spec.data.wait_s) == (sets, wait)


@pytest.mark.parametrize(
    "written", ["data: bucket/set", "data: {sets: /a, wait: 5}", "data: {set: /a}", "data: {sets: ftp://a}"]
)
def test_datasets_that_cannot_be_read_are_refused(written) -> None:
    with pytest.raises(SpecError, match=r"data"):
        parse_spec(f"run: x\ngpus: 1\n{written}\n")
