"""Measured tables, what is made of samples, and the file that keeps them."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from cordee.errors import CatalogueError
from cordee.hardware.calibration import (
    DOUBT_MAX,
    bus_bytes_per_s,
    document,
    entry,
    memory_bytes_per_s,
    peak_flop_per_s,
    quality,
)
from cordee.hardware.load import load_catalogue, load_home
from cordee.hardware.measured import Sample, Table, left_out, stale, tables_of

SIZES = (64.0, 256.0, 1024.0)


def sample(table: str, at: tuple[float, ...], work: float, seconds: float, *, noise: float = 0.01) -> Sample:
    """A sample whose quiet runs take so long."""
    return Sample(table, at, work, seconds * (1 + noise / 2), seconds, seconds * (1 + noise), 9)


def products(rate: float, precision: str = "fp32", noise: float = 0.01, latency_s: float = 1e-6) -> list[Sample]:
    """Samples of a device whose products take a latency each, and their FLOP at a rate."""
    points = [(m, n, k) for m in SIZES for n in SIZES for k in SIZES]
    return [
        sample(f"product {precision} {each}", point, flop, latency_s + flop / rate, noise=noise)
        for point in points
        for each in ("forward", "inner", "weight")
        for flop in [2 * math.prod(point)]
    ]


def test_a_table_meets_its_points_and_lies_between_them() -> None:
    table = tables_of(products(1e11))["product fp32 forward"]
    for at in ((64.0, 64.0, 64.0), (256.0, 1024.0, 64.0)):
        flop = 2 * math.prod(at)
        assert float(table.seconds(flop, *at)) == pytest.approx(1e-6 + flop / 1e11)
    between, low, high = (float(table.rate(m, 256, 256)) for m in (128, 64, 256))
    assert low < between < high


def test_a_table_takes_arrays_and_answers_each_as_alone() -> None:
    table = tables_of(products(1e11))["product fp32 forward"]
    tokens = np.array([1, 64, 100, 5000])
    together = table.seconds(2.0 * tokens * 300 * 300, tokens, 300, 300)
    alone = [float(table.seconds(2.0 * each * 300 * 300, float(each), 300, 300)) for each in tokens]
    assert np.allclose(together, alone)


def test_seconds_never_fall_as_work_grows_and_latency_rules_below_the_first_point() -> None:
    table = Table(((10.0, 1000.0),), (1e6, 1e8))
    seconds = [float(table.seconds(n, n)) for n in (1, 5, 10, 50, 100, 1000, 5000)]
    assert seconds[:3] == pytest.approx([1e-5] * 3) and all(one <= two * 1.0001 for one, two in pairwise(seconds))


def test_a_grid_with_a_hole_is_no_table() -> None:
    assert "product fp32 weight" not in tables_of(products(1e11)[:-1])


def test_points_left_out_show_how_straight_a_curve_is() -> None:
    straight = Table(((1.0, 2.0, 4.0),), (1.0, 2.0, 4.0))
    bent = Table(((1.0, 2.0, 4.0),), (1.0, 4.0, 4.0))
    assert left_out(straight) == pytest.approx([1.0]) and left_out(bent) == pytest.approx([0.5])


def test_others_lengthen_runs_and_the_quiet_ones_count() -> None:
    (table,) = tables_of([sample("copy fp32", (8.0,), 8.0, 2.0, noise=0.5)]).values()
    assert table.rates == (4.0,)


def test_noise_is_the_doubt_of_medians_not_the_spread_of_runs() -> None:
    assert not quality(products(1e11, noise=0.1)).is_noisy
    loud = quality(products(1e11, noise=0.4))
    assert loud.is_noisy and loud.doubt > DOUBT_MAX and loud.points == 81


def test_narrow_formats_and_triton_kernels_become_fractions_and_numbers() -> None:
    gpu = load_catalogue().find_gpu("H100")
    large = (2.0**27,)
    rates = {
        "product bf16 forward": 7e14, "softmax bf16 forward": 4e11, "triton-norm bf16": 7e11, "triton-copy bf16": 8e11,
    }  # fmt: skip
    samples = [sample(name, large, large[0], large[0] / rate) for name, rate in rates.items()]
    samples += [sample("triton-strided bf16", (2.0**25,), 2.0**25, 2.0**25 / 2e11)]
    samples += [sample("product fp8 forward", (8192.0,) * 3, 1e12, 1e12 / 1.4e15)]
    for rows, four, sixteen in ((1.0, 3e-5, 9e-5), (64.0, 8e-5, 9e-5), (256.0, 3e-4, 1e-4)):
        samples += [sample("triton-int4 bf16", (rows,), rows, four)]
        samples += [sample("triton-int4-beside bf16", (rows,), rows, sixteen)]
    fractions, numbers, _ = entry(samples, "bf16", gpu, {})
    assert fractions["product8_fraction"] == pytest.approx(1.4e15 / gpu.flop_per_s["fp8"], abs=1e-4)
    # Rows in one kernel, not PyTorch's softmax: read once and written once, two bytes each.
    assert fractions["memory_fraction"] == pytest.approx(4 * 7e11 / gpu.memory_bytes_per_s, abs=1e-4)
    assert numbers["strided_fraction"] == 0.25 and numbers["int4_rows"] == 64


def test_an_entry_has_fractions_of_the_nameplate() -> None:
    gpu = load_catalogue().find_gpu("L40S")
    samples = [
        *products(0.8 * gpu.peak16_flop_per_s, "bf16", latency_s=0.0),
        sample("copy bf16", (1e6,), 1e6, 1e6 * 4 / gpu.memory_bytes_per_s / 0.9),
        sample("edge bf16", (1.0,), 100.0, 1.0), sample("edge bf16", (2.0,), 100.0, 2.0),
        sample("edge bf16", (9.0,), 100.0, 1.25), sample("issue recorded", (1.0,), 64.0, 64 * 7e-6),
        sample("all-reduce", (4.0, 8192.0), 8192.0, 60e-6, noise=0.0),
        sample("all-reduce", (4.0, 1e9), 1e9, 1.5e9 / (gpu.link_bytes_per_s / 2), noise=0.0),
        sample("to-device pinned", (1e9,), 1e9, 0.05), sample("to-host pinned", (1e9,), 1e9, 0.04),
    ]  # fmt: skip
    fractions, numbers, tables = entry(samples, "bf16", gpu, {"memory_bytes": 1.0})
    assert fractions["product_fraction"] == pytest.approx(0.8, rel=0.01)
    assert fractions["stream_fraction"] == pytest.approx(0.9, rel=0.01)
    assert fractions["island_fraction"] == pytest.approx(0.5) and fractions["island_alpha_s"] == pytest.approx(1e-5)
    assert fractions["host_s"] == pytest.approx(7e-6) and fractions["portable_fraction"] == 1.0
    assert numbers["odd_fraction"] == 0.5 and numbers["unaligned_fraction"] == 0.8
    assert numbers["host_bytes_per_s"] == pytest.approx(2e10) and numbers["memory_bytes"] == 1.0
    assert bus_bytes_per_s(samples) == pytest.approx(gpu.link_bytes_per_s / 2)
    assert peak_flop_per_s(tables, "bf16") == pytest.approx(0.8 * gpu.peak16_flop_per_s, rel=0.01)
    assert memory_bytes_per_s(tables, "bf16") == pytest.approx(0.9 * gpu.memory_bytes_per_s)


def test_measured_products_are_those_of_the_board_that_they_were_measured_on(tmp_path: Path) -> None:
    """The catalogue's ratio of boards goes with the catalogue's fraction; a fraction of one's own needs none."""
    shipped = load_catalogue().find_gpu("GB300")
    assert shipped.board_ratio > 1
    (tmp_path / "hardware").mkdir()
    facts = {
        "like": "GB300", "memory": "279GB", "memory_bandwidth": "8TB/s", "dense_tflops": {"bf16": 2500},
        "source": "cordee calibrate on node7", "as_of": "2026-11-29",
    }  # fmt: skip
    for efficiency, ratio in (({"product_fraction": 0.7}, 1.0), ({"host_s": 3e-5}, shipped.board_ratio)):
        parts = {"fingerprint": {"device": "cuda"}, "efficiency": efficiency}
        (tmp_path / "hardware" / "gb300.toml").write_text(document("GB300", facts, parts))
        assert load_home(tmp_path).find_gpu("GB300").board_ratio == ratio


def test_a_calibrated_gpu_lies_over_the_catalogues_field_by_field(tmp_path: Path) -> None:
    plain = load_catalogue().find_gpu("H100")
    tables = tables_of(products(5e14, "bf16"))
    (tmp_path / "hardware").mkdir()
    facts = {
        "like": "H100", "memory": "84.9GB", "memory_bandwidth": "3350GB/s", "dense_tflops": {"bf16": 989.4},
        "source": "cordee calibrate on node7", "as_of": "2026-11-28",
    }  # fmt: skip
    parts = {
        "fingerprint": {"device": "cuda", "host": "node7", "driver": "580.1"},
        "efficiency": {"product_fraction": 0.75, "spread": 0.07},
        "numbers": {"host_bytes_per_s": 5.1e10},
        "tables": {name: {"axes": each.axes, "rates": each.rates} for name, each in tables.items()},
    }
    (tmp_path / "hardware" / "h100.toml").write_text(document("H100", facts, parts))
    found = load_home(tmp_path).find_gpu("NVIDIA H100 80GB HBM3")
    assert found.name == "H100" and found.memory_bytes == 84_900_000_000
    assert (found.efficiency.product_fraction, found.efficiency.spread) == (0.75, 0.07)
    assert found.efficiency.attention_fraction == plain.efficiency.attention_fraction
    assert found.kernels.grids == plain.kernels.grids and load_home(tmp_path).price(found, "on-demand") is not None
    assert found.measured is not None and found.measured.numbers == {"host_bytes_per_s": 5.1e10}
    kept = found.measured.find("product", "bf16", "inner")
    assert kept is not None and kept.rates == pytest.approx(tables["product bf16 inner"].rates, rel=1e-4)
    assert load_catalogue().find_gpu("H100") == plain


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("[X.efficiency]\nproduct_share = 0.7\n", "X cannot be read"),
        ('[X.fingerprint]\nhost = "a"\n[X.tables."copy fp32"]\naxes = [[1.0]]\nrates = "fast"\n', "X cannot be read"),
        ("[X.measured]\nrates = 1\n", "X has unknown measured"),
    ],
)
def test_a_file_that_says_what_nobody_knows_is_refused(tmp_path: Path, more: str, says: str) -> None:
    facts = (
        '[X]\nlike = "L40S"\nmemory = "24GB"\nmemory_bandwidth = "300GB/s"\ndense_tflops = { bf16 = 121 }\n'
        'source = "s"\nas_of = "2026-11"\n'
    )
    (tmp_path / "gpus.toml").write_text(facts + more)
    with pytest.raises(CatalogueError, match=says):
        load_home(tmp_path)


def test_a_fingerprint_is_stale_by_what_both_sides_know() -> None:
    kept = {"torch": "2.12.0", "driver": "570", "host": "a"}
    assert stale(kept, {"torch": "2.12.0", "host": "a"}) == ()
    assert stale(kept, {"torch": "2.13.0", "driver": "580", "host": "a"}) == (
        "torch 2.12.0 -> 2.13.0", "driver 570 -> 580",
    )  # fmt: skip
