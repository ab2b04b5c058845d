"""Stories of faults, drawn from seeds: no reader ever gets bytes that are not those of its pins."""

import logging

import fault_story
import pytest


@pytest.mark.parametrize("seed", [*range(8), 16, 22])
def test_no_reader_gets_other_bytes(tmp_path, seed, caplog) -> None:
    caplog.set_level(logging.CRITICAL, "cordee.data")
    fault_story.play(seed, tmp_path)
