"""Which GPU for which phase, and slices of a GPU."""

import pytest

from cordee.errors import CatalogueError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.levers.mig import MIG_PROFILES, MIG_SLICE_GB, profile_name, slice_gpu, slices
from cordee.plan.serving.levers.phases import PhaseCost, phase_costs, split_phases
from cordee.plan.serving.price.price import PhaseRates, TokenMix

CATALOGUE = load_catalogue()
H100 = CATALOGUE.find_gpu("H100")


class TestPhases:
    COSTS = phase_costs(
        {"H100": PhaseRates(40_000, 4_000), "H200": PhaseRates(40_000, 6_000), "L40S": PhaseRates(9_000, 900)},
        {"H100": 1, "H200": 1, "L40S": 1},
        {"H100": 2.0, "H200": 2.5, "L40S": 0.8},
    )

    def test_dollars_of_each_phase(self) -> None:
        assert self.COSTS[0].prefill_usd == pytest.approx(2.0 / 3600 / 40_000 * 1e6)
        assert self.COSTS[0].decode_usd == pytest.approx(2.0 / 3600 / 4_000 * 1e6)

    def test_compute_for_prompts_and_bandwidth_for_answers(self) -> None:
        found = split_phases(self.COSTS, TokenMix(8000, 400))
        assert (found.prefill.gpu, found.decode.gpu, found.together.gpu) == ("H100", "H200", "H100")
        assert found.pays
        assert str(found) == "prefill on H100, decode on H200: 6% less than H100"

    def test_sending_the_cache_over_the_internet_eats_it_up(self) -> None:
        found = split_phases(self.COSTS, TokenMix(8000, 400), kv_bytes=1e9, usd_per_gb_sent=0.09)
        assert not found.pays
        assert str(found) == "both phases on H100"

    def test_two_kinds_are_compared_with_steps_that_compute_both_phases_together(self) -> None:
        """A prompt in the step of answers that wait for memory costs less than one alone."""
        mixed = {each.gpu: 0.9 * each.usd(TokenMix(8000, 400)) for each in self.COSTS}
        found = split_phases(self.COSTS, TokenMix(8000, 400), mixed_usd=mixed)
        assert not found.pays and found.usd == found.together_usd == pytest.approx(mixed["H100"])

    def test_one_gpu_is_no_split(self) -> None:
        only = PhaseCost("H100", 0.01, 0.1)
        found = split_phases([only], TokenMix(100, 100))
        assert found.split_usd == found.together_usd
        assert not found.pays
        with pytest.raises(SpecError, match="no GPU"):
            split_phases([], TokenMix(1, 1))


class TestMig:
    @pytest.mark.parametrize(
        ("name", "profiles"),
        [
            ("A100-40", "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb"),
            ("A100-80", "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
            ("H100", "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb 7g.80gb"),
            ("H200", "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb"),
            ("B200", "1g.23gb 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb"),
            ("B300", "1g.34gb 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb"),
        ],
    )
    def test_profiles_have_nvidias_names(self, name: str, profiles: str) -> None:
        gpu = CATALOGUE.find_gpu(name)
        assert " ".join(profile_name(gpu, each) for each in MIG_PROFILES) == profiles

    def test_no_profile_takes_more_than_the_gpu_has(self) -> None:
        for each in MIG_PROFILES:
            assert each.instances * each.compute_slices <= 7
            assert each.instances * each.memory_slices <= 8
            assert (each.instances + 1) * each.compute_slices > 7 or (each.instances + 1) * each.memory_slices > 8

    def test_a_slice_is_a_gpu(self) -> None:
        small = slice_gpu(H100, MIG_PROFILES[0])
        assert small.name == "H100 1g.10gb"
        assert small.memory_bytes == 10_000_000_000
        assert small.memory_bytes_per_s == pytest.approx(3.35e12 / 8)
        assert small.peak_flop_per_s("bf16") == pytest.approx(989.4e12 / 7)
        assert small.island_gpus == 1
        assert [number for _, number in slices(H100)] == [7, 4, 3, 2, 1]

    def test_others_have_no_slices(self) -> None:
        l40s = CATALOGUE.find_gpu("L40S")
        assert slices(l40s) == ()
        assert l40s.name not in MIG_SLICE_GB
        with pytest.raises(CatalogueError, match="cannot be cut"):
            slice_gpu(l40s, MIG_PROFILES[0])
