"""A job as a batch script of Slurm: what stands in it, that bash reads it, and what Slurm cannot express."""

import subprocess

import pytest

from cordee.errors import SpecError
from cordee.workload.slurm import SlurmCluster, sbatch_script
from cordee.workload.spec import parse_spec

JOB = """
name: llama
run: python train.py --date "$(date)"
gpus: 16
limit: {time: 47h}
checkpoint: {to: "checkpoints, s3://bucket/my runs every 10", every: 10m}
on_preempt: {grace: 100s}
cpus: 96
memory: 1TiB
place: {within: rack}
env: {GREETING: "it's $HOME", OMP_NUM_THREADS: 4}
secrets: [HF_TOKEN]
"""


def rendered(text: str, **names: str) -> str:
    return sbatch_script(parse_spec(text), SlurmCluster(**names))  # type: ignore[arg-type]


def test_the_job_file_becomes_options_of_sbatch_and_the_environment_of_ranks() -> None:
    lines = rendered(JOB, partition="gpu", account="nlp").splitlines()
    for line in (
        "#SBATCH --job-name=llama --requeue --open-mode=append --output=%x-%j.out",
        "#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8",
        "#SBATCH --signal=B:TERM@120",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=nlp",
        "#SBATCH --time=1-23:00:00",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --mem=524288M",
        "#SBATCH --switches=1",
        "export CORDEE_GRACE_S=100",
        "export CORDEE_CHECKPOINT_EVERY=600",
        "export OMP_NUM_THREADS=4",
        "export GREETING='it'\"'\"'s $HOME'",
        'python train.py --date "$(date)"',
    ):
        assert line in lines, line


def test_bash_reads_it_and_finds_the_checkpoints_below_the_folder_of_the_job() -> None:
    script = rendered(JOB)
    exports = "\n".join(line for line in script.splitlines() if line.startswith("export CORDEE_CHECKPOINT_TO"))
    done = subprocess.run(["bash", "-c", f"{exports}\necho $CORDEE_CHECKPOINT_TO"], capture_output=True, text=True,
                          cwd="/usr", check=True)  # fmt: skip
    assert done.stdout == "/usr/checkpoints/llama,s3://bucket/my runs/llama every 10\n"
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_torchrun_gets_one_task_a_node_and_its_own_variables() -> None:
    script = rendered("run: torchrun train.py\ngpus: 16\non_preempt: {grace: 90s}\n")
    assert "--ntasks-per-node=1 --gpus-per-node=8" in script
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=90" in script, "the ranks may save for longer than 30 s"
    assert "PET_NPROC_PER_NODE=8" in script and "RANK=$SLURM_PROCID" not in script


def test_a_job_that_stops_at_a_preemption_is_not_requeued() -> None:
    script = rendered("run: python train.py\ngpus: 1\non_preempt: {then: stop}\n")
    assert "--no-requeue" in script and "scontrol requeue" not in script


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("gpus: 0.5", "not 0.5 of one"),
        ("gpus: 12", "12 GPUs are not whole nodes of 8"),
        ("gpus: 8xH100", "names a kind of GPU"),
        ("gpus: 8\nelastic: {at_least: 4}", "cannot run on 8 GPUs and on 4"),
        ("gpus: 8\ntier: production", "tier: production"),
        ("gpus: 8\ncapacity: spot", "capacity: spot has no name in Slurm"),
        ("gpus: 8\nlimit: {cost: $5}", "limit.cost cannot be kept"),
        ("gpus: 8\nlimit: {preemptions: 2}", "limit.preemptions: 2 cannot be kept"),
        ("gpus: 16\nplace: {within: node}", "cannot hold 16 GPUs on nodes of 8"),
        ("gpus: 6\nplace: {unit: 3}\nmodel: {name: llama-3-8b}", ""),
    ],
)
def test_what_slurm_cannot_express_is_refused_with_a_hint(more: str, message: str) -> None:
    if not message:
        assert rendered(f"run: python train.py\n{more}\n")
        return
    with pytest.raises(SpecError, match=message) as refused:
        rendered(f"run: python train.py\n{more}\n")
    assert refused.value.hint
