"""The submitter's environment: what goes with a job, and what is left out and named."""

import pytest

from cordee.workload.environment import TOTAL_BYTES_MAX, VALUE_BYTES_MAX, submitters_environment


@pytest.mark.parametrize(
    "name", ["HF_HOME", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "WANDB_PROJECT", "CONDA_PREFIX", "http_proxy", "LC_ALL"]
)
def test_what_programs_read_goes_with_the_job(name: str) -> None:
    assert submitters_environment({name: "x"}).env == {name: "x"}


@pytest.mark.parametrize(
    "name",
    ["HOME", "PWD", "SSH_AUTH_SOCK", "RANK", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "CORDEE_TOKEN", "F%%"],
)
def test_what_is_the_shells_own_stays_there_without_a_word(name: str) -> None:
    found = submitters_environment({name: "x"})
    assert not found.env and not found.notes()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("WANDB_API_KEY", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("PGPASSWORD", "x"),
        ("github_token_2", "x"),
        ("DATABASE_URL", "postgres://ann:secret@db/runs"),
    ],
)
def test_what_looks_like_a_secret_is_left_out_and_named(name: str, value: str) -> None:
    found = submitters_environment({name: value})
    assert not found.env and found.secrets == (name,)
    assert found.notes() == [f"{name} looks like a secret and is not in the job; to pass it: --secret {name}"]
    assert not submitters_environment({name: value}, named=[name]).notes(), "the job has it already"


def test_the_size_is_bounded() -> None:
    large = {f"V{number}": "x" * VALUE_BYTES_MAX for number in range(5)} | {"HUGE": "x" * (VALUE_BYTES_MAX + 1)}
    found = submitters_environment(large | {"SMALL": "x"})
    assert "SMALL" in found.env and "HUGE" in found.large
    assert sum(len(name) + len(value) for name, value in found.env.items()) < TOTAL_BYTES_MAX + 100
    assert submitters_environment({"BYTES": b"\xff".decode("utf-8", "surrogateescape")}).large == ("BYTES",)


def test_a_server_on_another_machine_gets_no_paths_of_this_one() -> None:
    environ = {"PATH": "/opt/bin", "HF_HOME": "/data/hf", "VIRTUAL_ENV": "/home/ann/env", "WANDB_PROJECT": "llama"}
    found = submitters_environment(environ, remote=True)
    assert found.env == {"PATH": "/opt/bin", "WANDB_PROJECT": "llama"}
    assert found.notes() == [
        "HF_HOME, VIRTUAL_ENV have paths of this machine and are not in the job; to pass one: --env HF_HOME=..."
    ]
