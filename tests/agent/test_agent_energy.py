"""Every joule that the driver counts goes to one account: of a rank group, or of the node's idle GPUs."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.agent.energy import Drawn, EnergyMeter
from cordee.agent.gpus import Devices, GpuSample
from cordee.agent.samples import IDLE_REPORT_S, LOOKS, SAMPLE_S, Samples
from cordee.event_json import decode, encode
from cordee.events import GpusSampled, IdleGpusSampled, Lease


class Counters(Devices):
    """GPUs whose counters a test sets."""

    def __init__(self, gpus: int) -> None:
        super().__init__("H100", gpus, "counters")
        self.real = True
        self.energy_mj, self.power_mw = [10**6] * gpus, [0] * gpus
        self.lost: set[int] = set()
        self.busy = [0.5] * gpus

    def sample(self, gpus):
        return {
            gpu: GpuSample(self.busy[gpu], 2, self.power_mw[gpu], self.energy_mj[gpu])
            for gpu in gpus
            if gpu not in self.lost
        }


def order(tag, *gpus, milli=1000):
    job_id, epoch = tag.split(".")
    leases = (Lease(node="n", gpus=gpus, milli=milli),)
    return SimpleNamespace(tag=tag, job_id=job_id, epoch=int(epoch), gpus=gpus, leases=leases, node_rank=0)


def at_work(gpus=2):
    devices, told = Counters(gpus), []
    return devices, told, Samples("n", devices, told.append, SimpleNamespace(now_us=lambda: 7))


def of(told, job):
    return [event.energy_mj for event in told if isinstance(event, GpusSampled) and event.job_id == job]


def test_energy_goes_to_those_who_held_the_gpu_and_else_to_idle():
    devices, told, samples = at_work()
    samples.step(0.0, [])
    devices.energy_mj[0] += 100  # nobody holds it
    a, b = order("a.1", 0, milli=250), order("b.1", 0, milli=125)
    samples.begin(a, 1.0)
    devices.energy_mj[0] += 30
    samples.begin(b, 2.0)
    devices.energy_mj[0] += 100  # both, in proportion to their parts
    devices.energy_mj[1] += 7
    samples.end(b, 3.0)
    devices.energy_mj[0] += 11
    samples.end(a, 4.0)
    devices.energy_mj[0] += 5
    samples.step(IDLE_REPORT_S, [])
    assert (of(told, "a"), of(told, "b")) == ([30 + 67 + 11], [33])
    assert [event.energy_mj for event in told if isinstance(event, IdleGpusSampled)] == [100 + 7 + 5]


def test_gpus_of_others_are_not_counted_while_others_use_them():
    devices, told, samples = at_work(1)
    samples.step(0.0, [])
    devices.others = frozenset({0})
    samples.step(60.0, [])
    devices.energy_mj[0] += 1000
    devices.others = frozenset()
    samples.step(120.0, [])
    devices.energy_mj[0] += 3
    samples.step(IDLE_REPORT_S, [])
    assert [event.energy_mj for event in told] == [3]


def test_a_gpu_that_is_sick_still_draws_for_the_job_that_holds_it():
    devices, told, samples = at_work(1)
    a = order("a.1", 0)
    samples.begin(a, 0.0)
    devices.others = frozenset({0})
    devices.energy_mj[0] += 9
    devices.lost = {0}
    samples.step(SAMPLE_S, [a])
    devices.lost = set()
    devices.energy_mj[0] += 1
    samples.end(a, 9.0)
    assert of(told, "a") == [10], "what a lost look has missed, the next one counts"


def test_busy_time_and_memory_are_told_of_each_gpu_in_the_order_of_the_lease():
    devices, told, samples = at_work(3)
    devices.busy = [0.25, 0.5, 1.0]
    a = order("a.1", 2, 0, 1)
    samples.begin(a, 0.0)
    devices.lost = {1}
    samples.step(SAMPLE_S, [a])
    devices.busy[2] = 0.5
    for look in range(2, LOOKS + 2):
        samples.step(look * SAMPLE_S, [a])
    first, second = (event for event in told if isinstance(event, GpusSampled))
    assert (first.busy_each, first.memory_bytes_each) == ((1.0, 0.25, None), (2, 2, None))
    assert (second.busy_each, second.busy, second.gpus) == ((0.5, 0.25, None), 0.375, 2)
    assert decode(encode(second)) == second


@pytest.mark.parametrize(
    ("looks", "drawn"),
    [
        ([(0, 100, 500), (2, 400, 500)], Drawn(300)),
        ([(0, 0, 400), (2, 0, 600)], Drawn(1000, 1000)),  # no counter: 0.5 W for 2 s
        ([(0, 0, 0), (2, 0, 600)], Drawn(1200, 1200)),
        ([(0, 0, 0), (2, 0, 0)], Drawn()),  # neither
        ([(0, 10**9, 500), (2, 40, 500)], Drawn(1000, 1000)),  # the driver was reloaded
        ([(0, 0, 500), (2, 10**9, 500)], Drawn(1000, 1000)),  # the counter appeared
        ([(0, 100, 500), (2, 2**63, 500)], Drawn(1000, 1000)),  # it jumped
    ],
)
def test_where_the_counter_cannot_be_used_power_is_integrated_and_said_to_be(looks, drawn):
    meter, found = EnergyMeter(), {}
    for at_s, energy_mj, power_mw in looks:
        found = meter.look(float(at_s), {0: GpuSample(0.0, 0, power_mw, energy_mj)})
    assert found == {0: drawn}


happenings = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from([1000, 250, 125]), st.integers(0, 10**4)),
    max_size=30,
)


@given(happenings)
def test_what_the_driver_counts_is_reported_to_the_millijoule(happenings):
    devices, told, samples = at_work(3)
    samples.step(0.0, [])
    held, now_s = {}, 0.0
    for name, gpu, milli, energy_mj in happenings:
        now_s += 2
        devices.energy_mj[gpu] += energy_mj
        samples.step(now_s, list(held.values()))
        if name in held:
            samples.end(held.pop(name), now_s)
        else:
            held[name] = order(f"{name}.1", gpu, milli=milli)
            samples.begin(held[name], now_s)
    for each in held.values():
        samples.end(each, now_s)
    samples.step(now_s + IDLE_REPORT_S, [])
    assert sum(event.energy_mj for event in told) == sum(devices.energy_mj) - 3 * 10**6
