"""Quantities at the edge that are easily misread."""

import pytest

from cordee.errors import UnitError
from cordee.units import parse_bytes, parse_bytes_per_s


@pytest.mark.parametrize("text", ["80Gb", "80 Gb", "1.5Tb", "8Kb", "2Gib"])
def test_bits_are_not_read_as_bytes(text: str) -> None:
    with pytest.raises(UnitError, match="is a number of bits") as caught:
        parse_bytes(text)
    assert caught.value.hint is not None and caught.value.hint.endswith("B")


def test_bits_a_second_are_written_bps() -> None:
    assert parse_bytes_per_s("400Gbps") == 50e9
    with pytest.raises(UnitError, match="is a number of bits"):
        parse_bytes_per_s("400Gb/s")


@pytest.mark.parametrize(("text", "n_bytes"), [("80GB", 80e9), ("80gb", 80e9), ("80GiB", 80 * 2**30), ("512B", 512)])
def test_bytes_are_read_in_either_case(text: str, n_bytes: float) -> None:
    assert parse_bytes(text) == n_bytes
