"""The shipped facts, how names find them, and a user's own prices."""

from pathlib import Path

import pytest

from cordee.errors import CatalogueError, CordeeError
from cordee.hardware.load import find_chip, load_catalogue, load_home
from cordee.hardware.several import joined
from cordee.units import GB, GiB

CATALOGUE = load_catalogue()


def test_every_fact_has_a_source_and_a_date() -> None:
    for gpu in CATALOGUE.gpus:
        for source in (gpu.source, gpu.matmul_source, gpu.node_source):
            assert source.title and source.as_of[:2] == "20", gpu.name
    for price in CATALOGUE.prices:
        assert price.source.title and price.source.as_of[:2] == "20", price


def test_the_catalogue_has_the_gpus_people_rent_and_a_price_for_each() -> None:
    wanted = {"A100-40", "A100-80", "H100", "H200", "B200", "GB200", "L40S", "A10", "RTX-4090", "MI300X"}
    assert wanted <= {gpu.name for gpu in CATALOGUE.gpus}
    for name in wanted:
        assert CATALOGUE.price(CATALOGUE.find_gpu(name), "on-demand") is not None, name


@pytest.mark.parametrize("gpu", CATALOGUE.gpus, ids=lambda gpu: gpu.name)
def test_facts_are_of_the_right_size(gpu) -> None:  # A wrong power of ten is the likely mistake in a data file.
    assert 10 * GB <= gpu.memory_bytes <= 300 * GB
    # A program sees the vendor's number in GiB, less what ECC and the driver keep.
    assert 0.9 < gpu.visible_bytes / (gpu.memory_bytes / GB * GiB) < 1, gpu.name
    assert 0.25e12 <= gpu.memory_bytes_per_s <= 10e12
    assert 25e12 <= gpu.peak16_flop_per_s <= 3e15
    assert gpu.flop_per_s["fp32"] < gpu.peak16_flop_per_s and gpu.peak32_flop_per_s >= gpu.flop_per_s["fp32"]
    assert gpu.network_bytes_per_s < gpu.link_bytes_per_s <= 1e12
    assert 0.4 < gpu.matmul_fraction < 1.2  # above 1: boards that run faster than the clock of their nameplate
    spot, on_demand = CATALOGUE.price(gpu, "spot"), CATALOGUE.price(gpu, "on-demand")
    assert spot is None or on_demand is None or spot.usd_per_gpu_hour < on_demand.usd_per_gpu_hour


def test_boards_of_one_chip_multiply_by_what_was_measured() -> None:
    """Nameplates would have A10 (150 W, 125 TFLOP/s) before RTX 3090 (350 W, 71), whose products take less time."""

    def rate(name: str) -> float:
        gpu = CATALOGUE.find_gpu(name)
        return gpu.peak16_flop_per_s * gpu.uncalibrated.product_fraction

    assert rate("RTX-3080") < rate("A10") < rate("RTX-3090") < rate("A40") < rate("RTX-A6000")
    assert rate("L4") < rate("RTX-3090") and rate("RTX-4090") < rate("RTX-5090") < rate("L40S")


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "H100"),
        ("h100-80gb", "H100"),
        ("H100-SXM", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("a100", "A100-80"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 3090", "RTX-3090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("5090", "RTX-5090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("Tesla V100-SXM2-32GB", "V100-32"),
        ("Tesla T4", "T4"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4080", "RTX-4080"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX-PRO-6000"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA GeForce RTX 3060", "RTX-3060"),
        ("3080", "RTX-3080"),
        ("NVIDIA GeForce RTX 5080", "RTX-5080"),
        ("RTX 4060 Ti 16GB", "RTX-4060-Ti-16"),
        ("AMD Instinct MI355X", "MI355X"),
        ("AMD Instinct MI250X", "MI250X"),
        ("NVIDIA RTX A5000", "RTX-A5000"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-Super"),
    ],
)
def test_a_name_as_people_and_drivers_write_it_finds_its_gpu(written: str, name: str) -> None:
    assert CATALOGUE.find_gpu(written).name == name


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("H10", "H100"),
        ("H100-PCI", "H100-PCIe"),
        ("A100-PCIE-90GB", "A100-PCIe-40"),
        ("RTX6000", "RTX-6000-Ada"),
        ("MI300", "MI300X"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX-4060-Ti-16"),
        ("V10", "V100-32"),
        ("H101", "H100"),
        ("L41S", "L40S"),
        # Another number is another card, however alike the letters are.
        ("3070", None),
        ("1080", None),
        ("RTX 4070 Ti", "RTX-4070-Ti-Super"),
        ("RTX 3070", None),
        ("A6", None),
        ("MI250", "MI250X"),
    ],
)
def test_an_unknown_gpu_has_a_hint_by_its_number_and_the_way_to_describe_it(written: str, near: str | None) -> None:
    with pytest.raises(CatalogueError, match=f"unknown GPU '{written}'") as caught:
        CATALOGUE.find_gpu(written)
    hint = str(caught.value.hint)
    assert hint.startswith(f"did you mean {near}? " if near else "`cordee plan --kinds` lists ")
    assert hint.endswith("or describe it in gpus.toml, in Cordee's home")


def test_a_geforce_multiplies_8_bits_with_fp32_accumulation_at_twice_the_rate_of_16() -> None:
    """As torch does; L40S and the RTX 6000 Ada of one chip with RTX 4090 are twice as fast in both."""
    for gpu in CATALOGUE.gpus:
        if "fp8" in gpu.flop_per_s:
            assert gpu.flop_per_s["fp8"] / gpu.flop_per_s["bf16"] == pytest.approx(2, rel=0.02), gpu.name


def test_rates_of_geforce_boards_are_those_of_their_multiprocessors_and_clock() -> None:
    """What the whitepapers have of RTX 3090, 4090 and 5090: 512 FLOP a clock and multiprocessor in 16 bits."""
    ghz = {"RTX-3090": 1.695, "RTX-4090": 2.52, "RTX-5090": 2.407}  # their boost clocks, and those of others
    ghz |= {"RTX-3060": 1.777, "RTX-3080": 1.71, "RTX-4060-Ti-16": 2.535, "RTX-5080": 2.617}
    for name, clock in ghz.items():
        gpu = CATALOGUE.find_gpu(name)
        assert gpu.peak_flop_per_s("bf16") == pytest.approx(512 * gpu.efficiency.units * clock * 1e9, rel=0.005), name


def test_an_unknown_chip_has_a_hint_with_the_likely_name() -> None:
    with pytest.raises(CatalogueError, match="unknown chip 'GH10'\nhint: did you mean GH100"):
        find_chip("GH10", {"GA100": {}, "GH100": {}})


def test_a_dtype_without_units_is_refused() -> None:
    with pytest.raises(CatalogueError, match=r"A100-80 has no fp8 units\nhint: it computes in .*: --precision bf16"):
        CATALOGUE.find_gpu("A100").peak_flop_per_s("fp8")


def test_own_prices_lie_over_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('[h100-80gb.spot]\nusd_per_gpu_hour = 1.11\nsource = "our contract"\nas_of = 2026-11-01\n')
    own = load_catalogue(path)
    h100 = own.find_gpu("H100")
    spot, on_demand = own.price(h100, "spot"), own.price(h100, "on-demand")
    assert spot is not None and spot.usd_per_gpu_hour == 1.11
    assert str(spot.source) == "our contract (2026-11-01)"
    assert on_demand == CATALOGUE.price(CATALOGUE.find_gpu("H100"), "on-demand")
    assert len(own.prices) == len(CATALOGUE.prices)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[H100.spot", "cannot be read"),
        ('[H9.spot]\nusd_per_gpu_hour = 1\nsource = "x"\nas_of = "2026"\n', "unknown GPU 'H9'"),
        ('[H100.preemptible]\nusd_per_gpu_hour = 1\nsource = "x"\nas_of = "2026"\n', "unknown capacity"),
        ('[H100.spot]\nusd_per_gpu_hour = 1\nas_of = "2026"\n', "lacks 'source'"),
        ('[H100.spot]\nusd_per_gpu_hour = "much"\nsource = "x"\nas_of = "2026"\n', "costs 'much' dollars"),
        ('[H100.spot]\nusd_per_gpu_hour = -1\nsource = "x"\nas_of = "2026"\n', "costs -1 dollars"),
        ("[H100]\nspot_usd = 1.2\n", "unknown capacity 'spot_usd'"),
        ("H100 = 2.99\n", "H100 is 2.99"),
    ],
)
def test_a_price_file_that_is_wrong_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(CatalogueError) as caught:
        load_catalogue(path)
    assert says in caught.value.message
    assert caught.value.hint


def test_a_price_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="does not exist"):
        load_catalogue(tmp_path / "none.toml")


def test_a_card_has_the_multiprocessors_that_are_enabled_on_it() -> None:
    """AD102: 142 on an L40S (18,176 cores), 128 on an RTX 4090 (16,384), each of 128 cores."""
    catalogue = load_catalogue()
    l40s, rtx = (catalogue.find_gpu(name).efficiency for name in ("L40S", "RTX-4090"))
    assert (l40s.units, rtx.units) == (18_176 // 128, 16_384 // 128)
    assert "L40S" in str(l40s.source) and "Ada" in str(rtx.source)


OWN_GPU = """
[L4]
like = "L40S"
memory = "24GB"
memory_bandwidth = "300GB/s"
dense_tflops = { bf16 = 121, fp16 = 121, fp32 = 30.3 }
source = "the vendor's datasheet"
as_of = "2023-03"
units = { enabled = 58, source = "7,424 cores", as_of = "2023-03" }
"""


def test_a_home_may_have_gpus_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "gpus.toml").write_text(OWN_GPU)
    (tmp_path / "prices.toml").write_text('[L4.spot]\nusd_per_gpu_hour = 0.2\nsource = "a bill"\nas_of = "2026-11"\n')
    own, like = load_home(tmp_path).find_gpu("NVIDIA L4"), CATALOGUE.find_gpu("L40S")
    assert (own.memory_bytes, own.memory_bytes_per_s, own.efficiency.units) == (24 * GB, 300 * GB, 58)
    assert own.peak_flop_per_s("bf16") == 121e12 and own.link == like.link and not own.kernels.grids
    assert load_home(tmp_path).price(own, "spot") is not None
    assert load_home(tmp_path / "empty") == CATALOGUE


def test_a_card_of_ones_own_is_found_without_its_rtx(tmp_path: Path) -> None:
    (tmp_path / "gpus.toml").write_text(OWN_GPU.replace("[L4]", "[RTX-3070]").replace("L40S", "RTX-3080"))
    assert load_home(tmp_path).find_gpu("3070").name == load_home(tmp_path).find_gpu("rtx 3070").name == "RTX-3070"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (OWN_GPU.replace('like = "L40S"', ""), "L4 lacks like"),
        (OWN_GPU.replace("L40S", "L41S"), "unknown GPU 'L41S'"),
        (OWN_GPU.replace("24GB", "24"), "24"),
        (OWN_GPU.replace("as_of", "asof", 1), "L4 lacks as_of"),
        (OWN_GPU + 'memry = "1GB"', "L4 has unknown memry"),
        ("L4 = 3", "L4 is 3, not a table"),
        ("[L4", "cannot be read"),
    ],
)
def test_a_gpu_of_ones_own_that_is_not_whole_is_refused(tmp_path: Path, written: str, says: str) -> None:
    (tmp_path / "gpus.toml").write_text(written)
    with pytest.raises(CordeeError, match=says):
        load_home(tmp_path)


@pytest.mark.parametrize(
    ("gpu", "profile", "memory_gib", "units", "starts", "part"),
    [
        ("A30", "1g.6gb", 5.81, 14, (0, 1, 2, 3), 1 / 4),
        ("A30", "2g.12gb", 11.69, 28, (0, 2), 1 / 2),
        ("GH200", "3g.48gb", 46.5, 60, (0, 4), 1 / 2),
        ("NVIDIA H100 NVL", "1g.24gb", 21.5, 26, (0, 2, 4, 6), 1 / 4),
        ("RTX-PRO-6000", "1g.24gb", 23.12, 46, (0, 3, 6, 9), 1 / 4),
        ("RTX-PRO-6000", "2g.48gb", 46.5, 94, (0, 6), 1 / 2),
        ("H200", "7g.141gb", 139.75, 132, (0,), 1),
        ("NVIDIA H100 PCIe", "2g.20gb", 19.5, 30, (0, 2, 4), 1 / 4),
        ("NVIDIA A100-PCIE-40GB", "1g.5gb", 4.75, 14, (0, 1, 2, 3, 4, 5, 6), 1 / 8),
    ],
)
def test_an_instance_is_as_the_driver_lists_it(
    gpu: str, profile: str, memory_gib: float, units: int, starts: tuple[int, ...], part: float
) -> None:
    whole = CATALOGUE.find_gpu(gpu)
    assert whole.mig is not None
    facts, instance = whole.mig.find(profile), whole.instance(profile)
    assert facts.placed.starts == starts and instance.efficiency.units == units
    assert instance.memory_bytes == pytest.approx(memory_gib * 2**30, abs=1)
    assert instance.memory_bytes_per_s == pytest.approx(part * whole.memory_bytes_per_s)


@pytest.mark.parametrize("gpu", [gpu for gpu in CATALOGUE.gpus if gpu.mig], ids=lambda gpu: gpu.name)
def test_a_gpu_holds_as_many_instances_of_a_profile_as_its_list_says(gpu) -> None:
    for facts in gpu.mig.profiles:
        profile = facts.placed
        starts = [start for start in profile.starts if start % profile.size == 0 or profile.size == 1]
        assert max(profile.starts) + profile.size <= gpu.mig.slices
        assert profile.instances <= min(len(starts), gpu.mig.compute // profile.compute)
        assert (
            facts.memory_bytes is None or facts.memory_bytes <= gpu.memory_bytes * profile.size / gpu.mig.slices * 1.08
        )


def test_an_instance_whose_memory_nobody_published_is_refused_with_the_question_to_ask() -> None:
    with pytest.raises(CatalogueError, match="published nowhere") as caught:
        CATALOGUE.find_gpu("GB300").instance("3g.139gb")
    assert "nvidia-smi mig -lgip" in str(caught.value.hint)


def test_the_wall_of_a_part_of_several_kinds_and_of_a_measured_gpu(tmp_path: Path) -> None:
    h100, small = CATALOGUE.find_gpu("H100"), CATALOGUE.find_gpu("A100-40")
    assert h100.visible_bytes == round(79.18 * GiB)
    assert h100.instance("1g.10gb").visible_bytes == h100.instance("1g.10gb").memory_bytes
    assert joined({h100: 8, small: 8}).visible_bytes == small.visible_bytes
    own = """[mine]
like = "H100"
memory = "64GB"
memory_bandwidth = "2TB/s"
dense_tflops = { bf16 = 500, fp16 = 500, fp32 = 60 }
source = "its owner"
as_of = "2026-11"
"""
    (tmp_path / "gpus.toml").write_text(own)
    assert load_home(tmp_path).find_gpu("mine").visible_bytes == pytest.approx(64 * GiB * 0.985)
    (tmp_path / "gpus.toml").write_text(own + 'visible = "60GiB"\n')
    assert load_home(tmp_path).find_gpu("mine").visible_bytes == 60 * GiB
