"""`cordee render kubernetes`: the file that it writes."""

from pathlib import Path

import kubernetes_validate
import pytest
from ruamel.yaml import YAML
from verbs import code_of

JOB = "run: python train.py\ngpus: 16\nname: llama\ncheckpoint: {to: 's3://bucket/runs'}\n"


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def test_it_writes_objects_that_kubernetes_reads(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "k8s.yaml"
    words = ("render", "kubernetes", job, "--image", "registry/train:1", "--kueue-queue", "research")
    assert code_of(*words, "-o", str(out)) == 0
    objects = list(YAML(typ="safe", pure=True).load_all(out.read_text()))
    assert [each["kind"] for each in objects] == ["Service", "Job"]
    for each in objects:
        kubernetes_validate.validate(each, "1.34", strict=True)
    assert capsys.readouterr().out == ""
    assert code_of(*words) == 0
    assert capsys.readouterr().out == out.read_text()


def test_labels_are_given_as_key_and_value(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("render", "kubernetes", job, "--image", "i", "--node-selector")
    assert code_of(*words, "pool=a100") == 0
    assert "nodeSelector:\n        pool: a100" in capsys.readouterr().out
    assert code_of(*words, "pool") == 10
    assert "--node-selector pool is not KEY=VALUE" in capsys.readouterr().err


def test_a_job_that_torchrun_starts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("run: torchrun train.py\ngpus: 8\n")
    assert code_of("render", "kubernetes", str(path), "--image", "i") == 12
    assert "hint: write run: python train.py" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (("server",), ["Service", "PodDisruptionBudget", "StatefulSet"]),
        (("agents", "--devices", "claim", "--resource", "rdma/hca=1"), ["ResourceClaimTemplate", "DaemonSet"]),
        (("ray", "--ray-version", "2.60.0", "--workers", "2:8"), ["PersistentVolumeClaim", "RayCluster"]),
    ],
)
def test_cordee_itself_is_written_without_anchors(
    words: tuple[str, ...], kinds: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("render", f"kubernetes-{words[0]}", "--image", "i", *words[1:]) == 0
    text = capsys.readouterr().out
    assert [each["kind"] for each in YAML(typ="safe", pure=True).load_all(text)] == kinds
    assert "&id" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("agents", "--resource", "rdma/hca"), "--resource rdma/hca is not KEY=VALUE"),
        (("agents", "--resource", "rdma/hca=two"), "rdma/hca: 'two' is not a number"),
        (("agents", "--label", "zone=a"), "a node has no label 'zone'"),
        (("agents", "--label-from", "zone=topology.kubernetes.io/zone"), "a node has no label 'zone'"),
        (("ray", "--ray-version", "2.60.0", "--workers", "few"), "--workers: 'few' is not a number"),
    ],
)
def test_an_option_that_cannot_be_read_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("render", f"kubernetes-{words[0]}", "--image", "i", *words[1:]) == 10
    assert said in capsys.readouterr().err
