"""What a launcher is given says the layout: read back, it is the same one, unless its limits were told."""

import json
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from asking import planned
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.errors import LayoutError
from cordee.hardware.load import load_catalogue
from cordee.plan import Layout, parse_layout
from cordee.plan.launch import LAUNCHERS, Launch, first_to_launch, launch_settings
from cordee.plan.launch_parts import FRAMEWORKS_OF
from cordee.plan.layout import CONTEXT_KINDS, OFFLOADS, SCHEDULES
from cordee.plan.pipeline import find_schedule
from cordee.plan.rules import first_misfit
from cordee.plan.split import splits, stage_layers
from cordee.plan.training import Training, find_optimizer
from cordee.workload.load import load_shape
from cordee.workload.spec import parse_spec

L70, L405, V3 = (load_shape(name) for name in ("llama-3-70b", "llama-3-405b", "deepseek-v3"))
TRAINING = Training(4096, 128)


def _training(launcher: str, training: Training = TRAINING) -> Training:
    """The same in the framework that the launcher runs."""
    return replace(training, framework=FRAMEWORKS_OF.get(launcher, "torch"))


def _flags(text: str) -> dict[str, str]:
    found = {}
    for line in text.replace(" \\\n", "\n").splitlines():
        name, _, value = line.partition(" ")
        assert name.startswith("--") and name not in found, line
        found[name.removeprefix("--")] = value.strip('"')
    return found


def _from_megatron(said: Launch, gpus: int) -> Layout:
    told = _flags(said.text)
    tp, pp, cp = (int(told[f"{axis}-parallel-size"]) for axis in ("tensor-model", "pipeline-model", "context"))
    strategy = {"optim_grads": 2, "optim_grads_params": 3}
    zero = strategy.get(told.get("data-parallel-sharding-strategy", ""), int("use-distributed-optimizer" in told))
    vpp, split = int(told.get("num-virtual-stages-per-pipeline-rank", 1)), None
    if "pipeline-model-parallel-layout" in told:
        stages = told["pipeline-model-parallel-layout"].removeprefix("E").removesuffix("L").split("|")
        split = tuple(int(stage.removeprefix("t*")) for stage in stages)
        vpp = len(split) // pp
    kinds = {"p2p": "ring", "all_gather": "all-gather", "a2a": "ulysses"}
    copies = int(told.get("num-distributed-optimizer-instances", 1))
    dp = gpus // (tp * pp * cp)
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, zero=zero, sp="sequence-parallel" in told, vpp=vpp, split=split,
        shard=dp * cp // copies, micro_batch=int(told["micro-batch-size"]),
        ep=int(told.get("expert-model-parallel-size", 1)),
        etp=int(told.get("expert-tensor-parallel-size", tp)), cp_kind=kinds[told.get("cp-comm-type", "p2p")],
        schedule="interleaved" if vpp > 1 else "1f1b", recompute=told.get("recompute-granularity", "none"),
        offload="optimizer" if "optimizer-cpu-offload" in told else "none",
    )  # fmt: skip


def _from_torchtitan(said: Launch, gpus: int) -> Layout:
    """Run the function on a configuration; the one module that it imports is stood in for by its two names."""
    module = ModuleType("torchtitan.distributed.activation_checkpoint")
    module.FullActivationRematConfig = lambda: "full"  # type: ignore[attr-defined]
    module.SelectiveActivationRematConfig = lambda: "selective"  # type: ignore[attr-defined]
    names = ("torchtitan", "torchtitan.distributed", "torchtitan.distributed.activation_checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        for name, each in zip(names, (ModuleType(names[0]), ModuleType(names[1]), module), strict=True):
            patch.setitem(sys.modules, name, each)
        scope: dict[str, object] = {}
        exec(said.text, scope)
    config = SimpleNamespace(training=SimpleNamespace(), parallelism=SimpleNamespace())
    mesh = scope["planned"](config).parallelism  # type: ignore[operator]
    pp, tp, cp = mesh.pipeline_parallel_degree, mesh.tensor_parallel_degree, mesh.context_parallel_degree
    shard, copies = mesh.data_parallel_shard_degree, mesh.data_parallel_replicate_degree
    dp = shard * copies
    size = config.training.num_tokens_per_microbatch_per_dp_rank // config.training.max_context_length
    reshard = getattr(mesh, "fsdp_reshard_after_forward", None)
    schedule, split, vpp = "1f1b", None, 1
    if pp > 1:
        schedule = {find_schedule(name).torch: name for name in SCHEDULES}[mesh.pipeline_parallel_schedule]
        parts = mesh.pipeline_parallel_module_fqns_per_model_part
        assert parts[0][0] == "tok_embeddings" and parts[-1][-2:] == ["norm", "lm_head"]
        layers = [name for part in parts for name in part if name.startswith("layers.")]
        assert layers == [f"layers.{index}" for index in range(len(layers))]
        split = tuple(sum(name.startswith("layers.") for name in part) for part in parts)
        vpp = len(parts) // pp if schedule == "interleaved" else 1
        assert mesh.num_pp_microbatches * size * dp * config.training.max_context_length == (
            config.training.num_tokens_per_train_step
        )
        split = None if split == stage_layers(sum(split), len(split)) and len(set(split)) == 1 else split
    kind = next((note for note in said.notes if "ContextParallelTransform" in note), "")
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, zero={None: 0, "never": 2, "default": 3}[reshard],
        shard=shard * cp if reshard else dp * cp, sp=mesh.enable_sequence_parallel, micro_batch=size, schedule=schedule,
        vpp=vpp, split=split, ep=mesh.expert_parallel_degree, recompute=config.activation_checkpoint or "none",
        cp_kind="all-gather" if "KVAllGather" in kind else "ulysses" if "Ulysses" in kind else "ring",
    )  # fmt: skip


def _from_deepspeed(said: Launch, gpus: int) -> Layout:
    told, notes = json.loads(said.text), " ".join(said.notes)

    def noted(pattern: str, otherwise: str) -> str:
        match = re.search(pattern, notes)
        return match[1] if match else otherwise

    tp = told.get("tensor_parallel", {}).get("autotp_size", 1)
    pp = told.get("pipeline", {}).get("stages", 1)
    cp = int(noted(r"sequence_parallel_size=(\d+)", "1"))
    size = told["train_micro_batch_size_per_gpu"]
    dp = told["train_batch_size"] // (size * told["gradient_accumulation_steps"])
    states = "offload_optimizer" in told["zero_optimization"]
    kept = told.get("activation_checkpointing", {}).get("cpu_checkpointing", False)
    offload = {(0, 0): "none", (1, 0): "optimizer", (0, 1): "activations", (1, 1): "both"}[int(states), int(kept)]
    return Layout(
        dp=dp, tp=tp, pp=pp, cp=cp, zero=told["zero_optimization"]["stage"], micro_batch=size, offload=offload,
        ep=int(noted(r"ep_size=(\d+)", "1")), recompute=noted(r"recompute=(\w+)", "none"),
        cp_kind="ulysses" if cp > 1 else "ring",
    )  # fmt: skip


def _from_cordee(said: Launch, gpus: int) -> Layout:
    spec = parse_spec(said.text)
    assert spec.gpus == gpus and spec.model is not None and spec.model.layout is not None
    found = parse_layout(spec.model.layout).plainest(gpus)
    return replace(found, micro_batch=spec.model.micro_batch or 1)


READERS = {
    "megatron": _from_megatron, "torchtitan": _from_torchtitan, "deepspeed": _from_deepspeed, "cordee": _from_cordee
}  # fmt: skip


def _plain(layout: Layout, *, experts: bool) -> Layout:
    """The same layout with all that goes without saying left out."""
    return replace(
        layout,
        shard=None if layout.zero == 0 or layout.shard_ranks == layout.data_ranks else layout.shard,
        etp=layout.expert_tp if experts and layout.ep > 1 else None,
        cp_kind=layout.cp_kind if layout.cp > 1 else "ring",
        zero=layout.zero if layout.data_ranks > 1 else 0,
    )


def _likely(layout: Layout) -> Layout:
    """With words that go together: most layouts drawn freely divide nothing."""
    schedule = layout.schedule if layout.pp > 1 else "1f1b"
    vpp = layout.vpp if schedule == "interleaved" else 1
    return replace(layout, schedule=schedule, vpp=vpp, sp=layout.sp and layout.tp > 1)


LAYOUTS = st.builds(
    Layout, dp=st.sampled_from([1, 2, 8]), tp=st.sampled_from([1, 2, 8]), pp=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3), sp=st.booleans(), micro_batch=st.sampled_from([1, 2]), cp=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]), vpp=st.sampled_from([2, 4]),
    schedule=st.sampled_from(["1f1b", "interleaved", *SCHEDULES]), cp_kind=st.sampled_from(CONTEXT_KINDS),
    offload=st.sampled_from(["none", "none", "none", *OFFLOADS]), shard=st.sampled_from([None, None, 2]),
).map(_likely)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(LAYOUTS, st.booleans(), st.sampled_from([L70, L405, V3]), st.sampled_from(sorted(READERS)))
def test_a_layout_survives_the_way_to_its_launcher_and_back(layout, uneven, shape, launcher) -> None:  # type: ignore[no-untyped-def]
    if uneven and layout.pp > 1:
        layout = replace(layout, split=splits(shape.layers, layout.stages)[-1])
    if shape is V3:
        layout = replace(layout, ep=8, etp=1)
    if first_misfit(layout, shape, layout.gpus, TRAINING) is not None:
        return
    said = launch_settings(launcher, shape, layout, _training(launcher))
    if said.cannot:
        return
    experts = shape.experts is not None
    found = READERS[launcher](said, layout.gpus)
    # DeepSpeed and torchtitan have no setting for it; a job's YAML says the mesh's axes, and sp goes with tp.
    silent = {"deepspeed": {"etp": None}, "torchtitan": {"etp": 1 if layout.ep > 1 else None}}.get(launcher, {})
    wanted = _plain(replace(layout, **silent), experts=experts)  # type: ignore[arg-type]
    found = replace(found, sp=layout.sp) if launcher == "cordee" else found
    assert _plain(replace(found, **silent), experts=experts) == wanted, said.text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(dp=4, tp=8, pp=16, zero=1, sp=True, split=(7, *[8] * 14, 7)), L405),
        (Layout(dp=2, tp=8, pp=8, cp=2, zero=1, sp=True, cp_kind="all-gather", schedule="interleaved", vpp=5,
                recompute="selective"), L70),
        (Layout(dp=32, tp=4, zero=3, shard=8, sp=True, ep=8, etp=1, recompute="full", offload="optimizer"), V3),
        (Layout(dp=8, tp=4, cp=2, zero=2, sp=True, cp_kind="ulysses", micro_batch=2), L70),
    ],
)  # fmt: skip
def test_megatron_runs_what_it_can_and_nothing_is_lost(layout: Layout, shape) -> None:  # type: ignore[no-untyped-def]
    said = launch_settings("megatron", shape, layout, _training("megatron"))
    assert said.cannot == ()
    assert _plain(_from_megatron(said, layout.gpus), experts=shape is V3) == _plain(layout, experts=shape is V3)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout(dp=8, tp=8, pp=8, zero=3, sp=True, schedule="zb-v", split=(7, *[8] * 14, 7)), L405),
        (Layout(dp=8, tp=8, pp=4, sp=True, schedule="interleaved", vpp=5, recompute="full"), L70),
        (Layout(dp=8, tp=4, cp=2, zero=3, shard=8, sp=True, cp_kind="all-gather", recompute="selective"), L70),
        (Layout(dp=16, zero=2, micro_batch=2, cp=2, cp_kind="ulysses"), L70),
        (Layout(dp=32, tp=4, zero=3, sp=True, ep=16, etp=1), V3),
    ],
)  # fmt: skip
def test_torchtitan_runs_what_it_can_and_nothing_is_lost(layout: Layout, shape) -> None:  # type: ignore[no-untyped-def]
    said = launch_settings("torchtitan", shape, layout, TRAINING)
    assert said.cannot == ()
    found = replace(_from_torchtitan(said, layout.gpus), etp=layout.etp)
    assert _plain(found, experts=shape is V3) == _plain(layout, experts=shape is V3)


def test_precision_and_optimizer_reach_megatrons_flags() -> None:
    layout = Layout(dp=8, tp=8, zero=1, sp=True, offload="optimizer")
    aware = ("use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype")
    for training, wanted in (
        (replace(TRAINING, precision="fp8"), {"bf16", "fp8-format"}),
        (replace(TRAINING, precision="fp16"), {"fp16"}),
        (replace(TRAINING, optimizer=find_optimizer("adamw-bf16-moments")), {"bf16", *aware}),
        (replace(TRAINING, optimizer=find_optimizer("muon")), {"bf16", "optimizer"}),
    ):
        said = launch_settings("megatron", L70, layout, _training("megatron", training))
        assert wanted <= set(_flags(said.text)) and not said.cannot
    assert launch_settings("megatron", L70, layout, replace(TRAINING, optimizer=find_optimizer("adamw-8bit"))).cannot


def test_the_fastest_that_a_launcher_can_run_is_launched() -> None:
    catalogue = load_catalogue()
    plan = planned(L70, catalogue.find_gpu("H100"), 64)
    layouts = [candidate.layout for candidate in plan.fitting]
    for launcher in LAUNCHERS:
        launch = first_to_launch(launcher, L70, layouts, _training(launcher, plan.training))
        assert launch.cannot == () and launch.layout in [str(layout) for layout in layouts]
    dual = Layout(dp=4, tp=2, pp=8, zero=1, sp=True, schedule="dualpipe")
    only = first_to_launch("megatron", L70, [dual], _training("megatron", plan.training))
    assert any("dualpipe" in each for each in only.cannot)
    with pytest.raises(LayoutError, match="unknown launcher 'nemo'"):
        launch_settings("nemo", L70, dual, plan.training)
