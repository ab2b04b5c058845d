"""What electricity costs and emits: the shipped facts, a user's own, and sums by hand."""

from pathlib import Path

import pytest

from cordee.errors import CatalogueError
from cordee.hardware.catalog import PowerDraw
from cordee.hardware.load import load_catalogue, load_electricity
from cordee.hardware.power import POWER, EnergyUse, draw_of
from cordee.hardware.several import joined

H100 = load_catalogue().find_gpu("H100")


def _own(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(f"[electricity]\n{text}\n")
    return path


def test_without_a_file_the_worlds_grid_counts_with_its_source() -> None:
    at = load_electricity()
    assert at.grid is not None and at.grid.name == "world" and at.grid.g_co2e_per_kwh == 481
    assert "Ember" in str(at.grid.source) and "2024" in at.grid.source.as_of and len(at.sources) == 2


def test_energy_is_watts_times_time_times_the_building() -> None:
    draw = draw_of(H100)
    assert draw is not None and (draw.watts, draw.host.watts) == (700, 575)
    use = EnergyUse(8, 3600.0, draw, load_electricity())
    assert use.kwh == pytest.approx(8 * 1.275 * 1.56)
    assert len(use.sources) == 4 and "700 W a board" in use.sources[0] and "575 W of its host" in use.sources[1]
    assert use.kg_co2e == pytest.approx(use.kwh * 0.481) and use.usd == pytest.approx(use.kwh * 0.10)


def test_an_instance_draws_the_part_of_its_sms_and_says_so() -> None:
    catalogue = load_catalogue()
    one, double, two = (draw_of(catalogue.find_gpu(f"H100 {name}")) for name in ("1g.10gb", "1g.20gb", "2g.20gb"))
    assert one is not None and double is not None and two is not None
    assert (one.watts, one.host.watts) == (round(700 * 16 / 132, 1), round(575 * 16 / 132, 1))
    assert one.watts < double.watts < two.watts  # 16, 26 and 32 SMs; the memory of the last two is the same
    assert all("SMs, 16 of 132" in each for each in one.sources)


def test_a_superchip_has_its_host_within_its_board() -> None:
    draw = draw_of(load_catalogue().find_gpu("GH200"))
    assert draw is not None and (draw.watts, draw.host.watts) == (1000, 0)


def test_a_mixed_gang_draws_the_mean_of_its_kinds() -> None:
    catalogue = load_catalogue()
    draw = draw_of(joined({catalogue.find_gpu("H100"): 6, catalogue.find_gpu("A100"): 2}))
    assert draw is not None and draw.watts == (6 * 700 + 2 * 400) / 8
    assert draw.host.watts == round((6 * 575 + 2 * 412.5) / 8, 1)
    assert "H100 700 W" in draw.sources[0] and "A100-80 412.5 W" in draw.sources[1]


OWN = """[{name}]
like = "{like}"
memory = "24GB"
memory_bandwidth = "936GB/s"
dense_tflops = {{ bf16 = 71, fp16 = 71, fp32 = 35.6 }}
source = "us"
as_of = "2026-11"
{more}
"""
LIMIT = '[{name}.fingerprint]\ndevice = "cuda"\npower-limit = "{watts} W"\n'


def _drawn(tmp_path: Path, name: str, more: str = "", like: str = "H100") -> PowerDraw | None:
    path = tmp_path / "gpus.toml"
    path.write_text(OWN.format(name=name, like=like, more=more))
    return draw_of(load_catalogue(gpu_files=[path]).find_gpu(name))


def test_a_users_gpu_has_the_watts_of_its_file_and_the_host_of_what_it_is_like(tmp_path: Path) -> None:
    assert _drawn(tmp_path, "mine") is None
    for more, like, watts, host in (
        ("watts = 300", "H100", 300, 575),
        ("watts = 300", "RTX-3090", 300, 150),
        ("watts = 300\nhost_watts = 80", "H100", 300, 80),
    ):
        draw = _drawn(tmp_path, "mine", more, like)
        assert draw is not None and (draw.watts, draw.host.watts) == (watts, host)
        assert "us (2026-11)" in draw.sources[0]
    known = _drawn(tmp_path, "RTX-3090", "host_watts = 60")
    assert known is not None and (known.watts, known.host.watts) == (350, 60)


@pytest.mark.parametrize("more", ["watts = -1", "watts = true", "host_watts = 80", 'watts = "300W"'])
def test_watts_that_are_none_are_refused(tmp_path: Path, more: str) -> None:
    with pytest.raises(CatalogueError, match="watts"):
        _drawn(tmp_path, "mine", more)


@pytest.mark.parametrize(("name", "host"), [("RTX-3090", 150), ("mine", 150)])
def test_the_limit_that_the_driver_enforced_counts(tmp_path: Path, name: str, host: float) -> None:
    draw = _drawn(tmp_path, name, LIMIT.format(name=name, watts=250))
    assert draw is not None and (draw.watts, draw.host.watts) == (250, host)
    assert "driver enforced" in draw.sources[0] and "2026-11" in draw.sources[0]
    same = _drawn(tmp_path, "RTX-3090", LIMIT.format(name="RTX-3090", watts=350))
    assert same == POWER["RTX-3090"]


def test_a_calibration_keeps_the_watts_of_an_earlier_file(tmp_path: Path) -> None:
    first, second = tmp_path / "gpus.toml", tmp_path / "mine.toml"
    first.write_text(OWN.format(name="mine", like="L40S", more="watts = 90\nhost_watts = 10"))
    second.write_text(OWN.format(name="mine", like="L40S", more='[mine.fingerprint]\ndevice = "cpu"'))
    draw = draw_of(load_catalogue(gpu_files=[first, second]).find_gpu("mine"))
    assert draw is not None and (draw.watts, draw.host.watts) == (90, 10)


def test_every_board_is_a_gpu_of_the_catalogue() -> None:
    assert set(POWER) <= {gpu.name for gpu in load_catalogue().gpus}


def test_a_users_grid_price_and_building_replace_the_shipped_ones(tmp_path: Path) -> None:
    named = load_electricity(_own(tmp_path, 'grid = "France"'))
    assert named.grid is not None and named.grid.g_co2e_per_kwh == 56 and named.building_factor == 1.56
    told = 'source = "our supplier", as_of = "2026-03"'.replace(", ", "\n")
    own = load_electricity(_own(tmp_path, f"g_co2e_per_kwh = 21.7\nbuilding_factor = 1.1\nusd_per_kwh = 0.12\n{told}"))
    assert own.grid is not None and (own.grid.g_co2e_per_kwh, own.building_factor, own.usd_per_kwh) == (21.7, 1.1, 0.12)
    assert own.grid.source.title == own.building_source.title == "our supplier"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('grid = "Frence"', "unknown grid 'Frence'"),
        ("g_co2e_per_kwh = 20", "lacks the source"),
        ('building_factor = 0.9\nsource = "x"\nas_of = "2026"', "building_factor = 0.9"),
        ('g_co2e_per_kwh = true\nsource = "x"\nas_of = "2026"', "g_co2e_per_kwh = True"),
        ("watts = 3", "unknown watts"),
    ],
)
def test_what_cannot_be_read_is_refused_by_plans_and_servers_alike(tmp_path: Path, text: str, says: str) -> None:
    path = _own(tmp_path, text)
    for read in (load_electricity, load_catalogue):
        with pytest.raises(CatalogueError, match=says):
            read(path)
