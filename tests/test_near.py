"""Names that are nearly right: the hint says which was meant, before it lists all."""

import os
from pathlib import Path

import pytest

from cordee.errors import CatalogueError, CordeeError, LayoutError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.near import did_you_mean, nearest
from cordee.plan.launch import check_launcher
from cordee.planning import gpus_here
from cordee.simulate.policies import named_policies
from cordee.workload.gpus import parse_gpus


@pytest.mark.parametrize(
    ("written", "known", "meant"),
    [
        ("spott", ("on-demand", "spot"), "spot"),
        ("BF16", ("bf16", "fp16"), "bf16"),
        ("rms", ("copy", "rms norm"), "rms norm"),
        ("demand", ("on-demand", "spot"), "on-demand"),
        ("zzz", ("copy", "rms norm"), None),
    ],
)
def test_the_nearest_name_is_found_whatever_its_case(written: str, known: tuple[str, ...], meant: str | None) -> None:
    assert nearest(written, known) == meant
    hint = did_you_mean(written, known)
    assert hint.endswith("use one of: " + ", ".join(known)) and hint.startswith("did you mean") == (meant is not None)


@pytest.mark.parametrize("written", ["TrainingArguments", "transformers", "Trainer", "trainr"])
def test_a_launcher_is_found_by_the_name_of_its_settings(written: str) -> None:
    with pytest.raises(LayoutError) as caught:
        check_launcher(written)
    assert str(caught.value.hint).startswith("did you mean trainer?")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("H100:4g.40g", "H100:4g.40gb"),
        ("H100:1g10gb", "H100:1g.10gb"),
        ("RTX-PRO-6000 2G.48", "RTX-PRO-6000:2g.48gb"),
        ("3g-40gb", "H100:3g.40gb"),
    ],
)
def test_a_mig_instance_is_recognised_though_its_form_is_missed(written: str, meant: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_gpus(written)
    assert str(caught.value.hint).startswith(f"did you mean {meant}?")


def test_what_is_no_instance_is_still_a_number_of_gpus_that_cannot_be_read() -> None:
    with pytest.raises(SpecError, match="is not a number of GPUs"):
        parse_gpus("H100:many")


def test_a_profile_that_a_gpu_lacks_names_the_one_that_is_near() -> None:
    with pytest.raises(CatalogueError) as caught:
        load_catalogue().find_gpu("H100 4g.48gb")
    assert str(caught.value.hint).startswith("did you mean 4g.40gb? it has 1g.10gb")


def test_a_policy_with_a_patience_is_found_too() -> None:
    with pytest.raises(CordeeError) as caught:
        named_policies(["cordeee:2"])
    assert str(caught.value.hint).startswith("did you mean cordee?")


@pytest.mark.parametrize("there", [False, True])
def test_here_says_whether_there_is_a_gpu_and_what_can_be_calibrated(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is whether a driver shows its device; the file system is asked for it."""
    real = Path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: there if str(path).startswith("/dev/") else real(Path(path)))
    with pytest.raises(CatalogueError, match="cordee calibrate has measured of this machine") as caught:
        gpus_here("2xhere", load_catalogue())
    assert ("it has no GPU" in str(caught.value)) == (not there)
    assert ("measures the CPU" in str(caught.value.hint)) == (not there)
