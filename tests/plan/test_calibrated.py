"""Plans of a device that was calibrated: its tables count, part by part, and what is missing falls back."""

from dataclasses import replace

import numpy as np
import pytest

from cordee.hardware.catalog import Gpu
from cordee.hardware.load import load_catalogue
from cordee.hardware.measured import Measured, Table
from cordee.plan.ask import ask
from cordee.plan.expect import DEFAULTS, node_storage_bytes_per_s
from cordee.plan.kernels import product_s, tile_rate_fraction
from cordee.plan.layer import head_passes, layer_passes
from cordee.plan.layout import Layout
from cordee.plan.measured import product_seconds
from cordee.plan.request import Request
from cordee.plan.settings import Settings
from cordee.plan.step import step_time
from cordee.workload.load import load_shape
from cordee.workload.model import ModelShape

SHAPE = load_shape("llama-3.2-1b")
TRAINING = Settings(seq_tokens=1024, global_batch=2, precision="fp32").training(SHAPE, 1)
BOTH = ("norm", "rotate", "gate", "loss", "embedding")
PLAIN = ("add", "turn")


def flat(rate: float, axes: int = 1) -> Table:
    return Table(((1.0,),) * axes, (rate,))


def cpu(**changed: Table | None) -> Gpu:
    """A device of round numbers: 1e11 FLOP/s, 1e9 elements a second of everything small."""
    tables: dict[str, Table | None] = {f"product fp32 {each}": flat(1e11, 3) for each in ("forward", "inner", "weight")}
    tables |= {f"attention fp32 {each}": flat(5e10, 2) for each in ("forward", "backward")}
    tables |= {f"{name} fp32 {each}": flat(1e9) for name in BOTH for each in ("forward", "backward")}
    tables |= {f"{name} fp32": flat(1e9) for name in PLAIN} | {"adamw-fused": flat(5e8)}
    kept = {name: table for name, table in (tables | changed).items() if table is not None}
    base = load_catalogue().find_gpu("A10")
    efficiency = replace(base.efficiency, portable_fraction=1.0, host_s=0.0)
    measured = Measured(kept, {}, {"device": "cpu"}, "2026-11-28")
    return replace(base, flop_per_s={"fp32": 1e11}, measured=measured, efficiency=efficiency)


def test_a_layer_is_the_sum_of_its_measured_parts() -> None:
    passes = layer_passes(SHAPE, cpu(), Layout(micro_batch=2), TRAINING)
    tokens, h, kv = 2048, SHAPE.hidden, SHAPE.kv_heads * SHAPE.head_dim
    weights = 2 * h * h + 2 * h * kv + 3 * h * SHAPE.ffn
    attention = 2 * SHAPE.heads * SHAPE.head_dim * 1024 * tokens / 5e10
    small = tokens * (2 * h + (h + kv) + SHAPE.ffn + 2 * h + h) / 1e9
    assert passes.forward_s == pytest.approx(2 * tokens * weights / 1e11 + attention + small)
    assert passes.weight_s == pytest.approx(2 * tokens * weights / 1e11)
    backward_small = tokens * (2 * h + (h + kv) + SHAPE.ffn + 5 * h + 4 * h) / 1e9
    assert passes.inner_s == pytest.approx(2 * tokens * weights / 1e11 + attention + backward_small)


def test_the_head_has_its_loss_and_the_embeddings_gradient() -> None:
    passes = head_passes(SHAPE, cpu(), Layout(micro_batch=2), TRAINING)
    tokens, logits = 2048, 2048 * SHAPE.vocab
    padded = -(-SHAPE.vocab // 128) * 128
    product = 2 * tokens * padded * SHAPE.hidden / 1e11
    table = SHAPE.vocab * SHAPE.hidden
    assert passes.forward_s == pytest.approx(product + (tokens * SHAPE.hidden + logits + table) / 1e9)
    assert passes.backward_s == pytest.approx(2 * product + (tokens * SHAPE.hidden + logits + 2 * table) / 1e9)


def test_large_tensors_of_a_cpu_are_mapped_anew_and_small_ones_are_not() -> None:
    pages = {"pages fresh": flat(2e9), "pages kept": flat(1e10)}
    each_s = 1 / 2e9 - 1 / 1e10  # of a byte, beyond its writing

    def added(shape: ModelShape) -> tuple[float, float]:
        with_pages, without = (head_passes(shape, gpu, Layout(), training) for gpu in (cpu(**pages), cpu()))
        return tuple(float(getattr(with_pages, part) - getattr(without, part)) for part in ("forward_s", "backward_s"))  # type: ignore[return-value]

    training = Settings(seq_tokens=256, global_batch=1, precision="fp32").training(SHAPE, 1)
    shape = replace(SHAPE, vocab=32_768, hidden=255, tied=False)  # logits of exactly 32 MiB; a gradient of just less
    logits = 4 * 256 * 32_768
    assert added(shape) == pytest.approx((2 * logits * each_s, 2 * logits * each_s))  # product and loss; loss twice
    assert added(replace(shape, vocab=32_640)) == (0.0, 0.0)
    both = 4 * 256 * 32_768  # with 256 wide rows the gradients of the head and of the embedding are as large
    assert added(replace(shape, hidden=256))[1] == pytest.approx((2 * logits + 2 * both) * each_s)


def test_a_layers_large_tensors_are_mapped_one_by_one() -> None:
    pages = {"pages fresh": flat(2e9), "pages kept": flat(1e10)}
    with_pages, without = (layer_passes(SHAPE, gpu, Layout(micro_batch=2), TRAINING) for gpu in (cpu(**pages), cpu()))
    inner, each_s = 4 * 2048 * SHAPE.ffn, 1 / 2e9 - 1 / 1e10
    assert inner == 64 << 20 and 4 * 2048 * SHAPE.hidden == 16 << 20
    # gate, up, and the two tensors of the gated activation; backward three of it and the input's gradient of `down`.
    assert with_pages.forward_s - without.forward_s == pytest.approx(4 * inner * each_s)
    assert with_pages.inner_s - without.inner_s == pytest.approx(4 * inner * each_s)
    weights = 3 * 4 * SHAPE.hidden * SHAPE.ffn
    assert with_pages.weight_s - without.weight_s == pytest.approx(weights * each_s)


def test_the_update_counts_parameters() -> None:
    step = step_time(SHAPE, cpu(), Layout(micro_batch=2), TRAINING)
    assert step.optimizer_s == pytest.approx(SHAPE.parameters / 5e8, rel=0.01)


@pytest.mark.parametrize(
    "missing", ["product fp32 weight", "attention fp32 backward", "norm fp32 forward", "adamw-fused"]
)
def test_what_was_not_measured_falls_back_alone(missing: str) -> None:
    whole, part = (step_time(SHAPE, gpu, Layout(micro_batch=2), TRAINING) for gpu in (cpu(), cpu(**{missing: None})))
    assert part.total_s != whole.total_s and np.isfinite(part.total_s)
    unchanged = "compute_s" if missing == "adamw-fused" else "optimizer_s"
    assert getattr(part, unchanged) == getattr(whole, unchanged)


def test_rows_that_are_no_whole_lines_lose_what_was_measured() -> None:
    gpu = cpu()
    assert gpu.measured is not None
    slow = replace(gpu, measured=replace(gpu.measured, numbers={"odd_fraction": 0.5}))
    odd = replace(SHAPE, ffn=SHAPE.ffn + 1)
    fast, lost = (layer_passes(odd, each, Layout(micro_batch=2), TRAINING) for each in (gpu, slow))
    mlp = 2 * 2048 * 3 * SHAPE.hidden * odd.ffn / 1e11
    assert lost.weight_s - fast.weight_s == pytest.approx(mlp, rel=0.01)


def test_a_base_of_few_bits_becomes_16_bit_again_in_the_time_that_was_measured() -> None:
    training = Settings(seq_tokens=1024, global_batch=2, train="qlora").training(SHAPE, 1)
    plain, half = (
        layer_passes(SHAPE, cpu(**{"dequantise nf4 bf16": table}), Layout(micro_batch=2), training)
        for table in (flat(1e9), flat(0.5e9))
    )
    h, kv = SHAPE.hidden, SHAPE.kv_heads * SHAPE.head_dim
    weights = 2 * h * h + 2 * h * kv + 3 * h * SHAPE.ffn
    assert half.forward_s - plain.forward_s == pytest.approx(weights / 1e9)
    assert half.inner_s - plain.inner_s == pytest.approx(weights / 1e9)


def test_a_tile_has_the_part_of_the_best_ones_rate_that_a_kernel_reached() -> None:
    tiles = Table(((64.0 * 64, 128.0 * 64, 128.0 * 128, 256.0 * 128),), (1e14, 2e14, 3e14, 4e14))
    gpu = cpu(**{"triton-tile bf16": tiles})
    found = [tile_rate_fraction(gpu, size, 0.9) for size in (64 * 64, 128 * 128, 256 * 128)]
    assert found == pytest.approx([0.25, 0.75, 1.0])
    assert tile_rate_fraction(cpu(), 64 * 64, 0.9) == 0.9
    # A product of 64 x 64 results has no other tile that is not mostly empty.
    slow, fast = (float(product_s(each, 64, 64, 1 << 20)) for each in (gpu, cpu()))
    assert slow > fast


def test_fp8_products_have_their_own_table_and_the_head_has_that_of_16_bits() -> None:
    eight = {f"product fp8 {each}": flat(4e11, 3) for each in ("forward", "inner", "weight")}
    wide = {f"product bf16 {each}": flat(1e11, 3) for each in ("forward", "inner", "weight")}
    gpu = replace(cpu(**eight, **wide), flop_per_s={"bf16": 1e11, "fp8": 4e11})
    training = Settings(seq_tokens=1024, global_batch=2, precision="fp8").training(SHAPE, 1)
    tokens = 2048
    head = head_passes(SHAPE, gpu, Layout(micro_batch=2), training)
    assert head.weight_s == pytest.approx(2 * tokens * -(-SHAPE.vocab // 128) * 128 * SHAPE.hidden / 1e11)
    h, kv = SHAPE.hidden, SHAPE.kv_heads * SHAPE.head_dim
    layer = layer_passes(SHAPE, gpu, Layout(micro_batch=2), training)
    assert layer.weight_s == pytest.approx(2 * tokens * (2 * h * h + 2 * h * kv + 3 * h * SHAPE.ffn) / 4e11)


def test_a_cpu_waits_for_its_own_host() -> None:
    gpu = cpu()
    slow = replace(gpu, efficiency=replace(gpu.efficiency, host_s=1e-3))
    one, two = (step_time(SHAPE, each, Layout(micro_batch=2), TRAINING) for each in (gpu, slow))
    assert two.host_s > 0.5 and two.total_s == pytest.approx(one.total_s + two.host_s)


def test_sizes_may_be_arrays() -> None:
    layout = Layout(micro_batch=np.array([1, 2]))  # type: ignore[arg-type]
    passes = layer_passes(SHAPE, cpu(), layout, TRAINING)
    for index, size in enumerate((1, 2)):
        alone = layer_passes(SHAPE, cpu(), Layout(micro_batch=size), TRAINING)
        assert np.asarray(passes.forward_s)[index] == pytest.approx(float(alone.forward_s))


def with_numbers(**numbers: float) -> Gpu:
    gpu = cpu()
    assert gpu.measured is not None
    return replace(gpu, measured=replace(gpu.measured, numbers=numbers))


def test_products_run_at_the_rate_that_a_device_keeps() -> None:
    short, long = (
        product_seconds(gpu, "fp32", 1024, 2048, 2048) for gpu in (cpu(), with_numbers(sustained_fraction=0.8))
    )
    assert short is not None and long is not None
    assert long.forward == pytest.approx(short.forward / 0.8) and long.weight == pytest.approx(short.weight / 0.8)


def test_a_plan_counts_the_context_that_was_measured() -> None:
    plain, less, more = (
        ask(Request(shape=SHAPE, gpu=gpu, gpus=1, settings=Settings(precision="fp32"))).nearest.memory.worst
        for gpu in (cpu(), with_numbers(context_bytes=0.5e9), with_numbers(context_bytes=1.5e9))
    )
    assert [each.context_bytes for each in (plain, less, more)] == [700_000_000, 500_000_000, 1_500_000_000]
    assert more.total_bytes - less.total_bytes == 1_000_000_000


def test_storage_is_the_slower_way_that_was_measured() -> None:
    both = with_numbers(write_bytes_per_s=1e9, read_bytes_per_s=3e9)
    assert [node_storage_bytes_per_s(gpu) for gpu in (cpu(), both)] == [DEFAULTS.storage_bytes_per_s, 1e9]
