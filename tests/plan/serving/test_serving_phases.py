"""Which GPU for which phase, and slices of a GPU."""

import pytest

from cordee.errors import CatalogueError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.levers.phases import PhaseCost, phase_costs, split_phases
from cordee.plan.serving.price.price import PhaseRates, TokenMix
from cordee.planning import plan, serve_plan
from cordee.units import GiB

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
            ("A100-40", "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb"),
            ("A100-80", "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb"),
            ("H100", "1g.10gb 1g.20gb 2g.20gb 3g.40gb 4g.40gb"),
            ("H200", "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb"),
            ("B200", "1g.23gb 1g.45gb 2g.45gb"),
            ("B300", ""),
        ],
    )
    def test_the_lever_knows_the_instances_whose_memory_and_sms_were_published(self, name: str, profiles: str) -> None:
        gpu = CATALOGUE.find_gpu(name)
        assert " ".join(part.name.removeprefix(f"{name} ") for part, _ in gpu.instances()) == profiles

    def test_an_instance_is_a_gpu(self) -> None:
        small = CATALOGUE.find_gpu("NVIDIA H100 80GB HBM3 1g.10gb")
        assert small == H100.instance("1g.10gb") and small.name == "H100 1g.10gb"
        assert small.memory_bytes == small.visible_bytes == round(9.75 * GiB), "what its processes can use"
        assert small.memory_bytes_per_s == pytest.approx(3.35e12 / 8)
        assert small.peak_flop_per_s("bf16") == pytest.approx(989.4e12 * 16 / 132), "by SMs, not by sevenths"
        assert small.efficiency.units == 16 and small.island_gpus == 1
        assert [number for _, number in H100.instances()] == [7, 4, 3, 2, 1]
        whole, part = CATALOGUE.price(H100, "on-demand"), CATALOGUE.price(small, "on-demand")
        assert whole is not None and part is not None and part.gpu == small.name
        assert part.usd_per_gpu_hour == pytest.approx(whole.usd_per_gpu_hour / 8), "as it is billed"

    def test_others_have_no_instances(self) -> None:
        l40s = CATALOGUE.find_gpu("L40S")
        assert l40s.instances() == ()
        for name, says in (
            ("L40S 1g.10gb", "no MIG profile of L40S"),
            ("H100 1g.5gb", r"H100 has no MIG profile '1g.5gb'\nhint: did you mean 1g.20gb\? it has 1g.10gb"),
            ("B300 3g.135gb", "published nowhere\nhint: ask a machine that has one: nvidia-smi mig -lgip"),
        ):
            with pytest.raises(CatalogueError, match=says):
                CATALOGUE.find_gpu(name)

    def test_an_instance_is_planned_with_its_own_memory(self) -> None:
        answers = {gpus: serve_plan("llama-3.1-8b", gpus) for gpus in ("1xH100", "H100:2g.20gb", "H100:1g.10gb")}
        fits = {
            gpus: any(each.memory.refusal == "" or each.memory.refusal is None for each in answer.candidates)
            for gpus, answer in answers.items()
        }
        assert fits == {"1xH100": True, "H100:2g.20gb": True, "H100:1g.10gb": False}
        assert answers["H100:2g.20gb"].request.gpu.name == "H100 2g.20gb"
        offered = [each.change for each in answers["H100:1g.10gb"].remedies]
        assert "--gpus H100:1g.20gb" in offered, "a larger instance"
        assert not any("x H100 " in each or "xH100 " in each for each in offered), "there are no gangs on instances"
        trained = plan("llama-3.1-8b", "H100:1g.10gb").remedies
        assert trained and all("g." not in each.change for each in trained if "--gpus" in each.change)
