"""Settings of torchtitan: a function of its Python configuration, which is how a run is described there.

Names were read in torchtitan/config/{parallelism,training,compile}.py, distributed/activation_checkpoint.py and
torchtitan_recipes; its section.option flags are frozen and leave.
"""

from cordee.plan.launch_parts import (
    Limit,
    Planned,
    Written,
    limited,
    noted,
    optimizer_note,
    scripts_notes,
    weights_type,
)
from cordee.plan.layout import Layout
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.split import stage_layers
from cordee.plan.training import Training

_RECOMPUTE = {"full": "FullActivationRematConfig", "selective": "SelectiveActivationRematConfig"}


def torchtitan(planned: Planned) -> Written:
    """Return the settings, what torchtitan does not do of the layout, and what else the recipe has to say."""
    layout, training = planned.layout, planned.training
    sharded = layout.zero >= 2
    replicate = layout.data_ranks // layout.shard_ranks if sharded else layout.dp
    whole = layout.dp % replicate == 0
    replicate, shard = (replicate, layout.dp // replicate) if whole else (1, layout.dp)
    tokens = layout.micro_batch * training.seq_tokens
    settings: dict[str, object] = {
        "training.max_context_length": training.seq_tokens,
        "training.num_tokens_per_microbatch_per_dp_rank": tokens,
        "training.num_tokens_per_train_step": training.tokens_per_step,
        "training.dtype": weights_type(training),
        "training.mixed_precision_param": "float32" if training.precision == "fp32" else "bfloat16",
        "parallelism.data_parallel_replicate_degree": replicate,
        "parallelism.data_parallel_shard_degree": shard if sharded else 1,
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.enable_sequence_parallel": layout.sp,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.expert_parallel_degree": layout.ep,
    }
    if sharded and layout.offload in ("optimizer", "both"):
        settings["training.enable_cpu_offload"] = True
    if sharded:
        settings["parallelism.fsdp_reshard_after_forward"] = "never" if layout.zero == 2 else "default"
    if layout.pp > 1:
        settings["parallelism.pipeline_parallel_schedule"] = find_schedule(layout.schedule).torch or "1F1B"
        settings["parallelism.num_pp_microbatches"] = layout.micro_batches(training.global_batch)
    return _module(planned, settings), _limits(planned, whole=whole), _notes(layout, training)


def _module(planned: Planned, settings: dict[str, object]) -> str:
    """Return the function, with the model's parts written out by stage where there is a pipeline."""
    layout, training = planned.layout, planned.training
    recompute, compiled = _RECOMPUTE.get(layout.recompute), _compiled(training)
    lines = ["from torchtitan.config.compile import CompileConfig"] if compiled else []
    lines += [f"from torchtitan.distributed.activation_checkpoint import {recompute}"] if recompute else []
    lines += ["", ""] if lines else []
    lines += ["def planned(config):", f'    """{layout}."""']
    lines += [f"    config.{name} = {_literal(value)}" for name, value in settings.items()]
    lines.append(f"    config.activation_checkpoint = {f'{recompute}()' if recompute else None}")
    lines.append(f"    config.compile = {f'CompileConfig(components={compiled})' if compiled else None}")
    if layout.pp > 1:
        split = layout.split or stage_layers(planned.shape.layers, layout.stages)
        lines += [
            f"    parts, layer = [], iter(range({planned.shape.layers}))",
            f"    for layers in {list(split)}:",
            '        parts.append([f"layers.{next(layer)}" for _ in range(layers)])',
            '    parts[0].insert(0, "tok_embeddings")',
            '    parts[-1] += ["norm", "lm_head"]',
            "    config.parallelism.pipeline_parallel_module_fqns_per_model_part = parts",
        ]
    return "\n".join([*lines, "    return config"])


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _compiled(training: Training) -> list[str]:
    """Return the components that go through torch.compile."""
    return ["model"] * (training.fused is True) + ["loss"] * (training.loss == "compiled")


def _limits(planned: Planned, *, whole: bool) -> list[Limit]:
    """Return the parts of a plan that torchtitan does not do."""
    layout, training, moe = planned.layout, planned.training, planned.shape.experts is not None
    found = limited(
        {
            "torchtitan shards weights with the optimizer's states, never the states alone: this replicates": (
                layout.zero == 1
            ),
            "gradients of a pipeline are reduced once: weights stay sharded over its micro-batches only with FSDP": (
                layout.zero == 2 and layout.pp > 1
            ),
            "HSDP replicates whole data ranks: the shard group cuts through context parallelism here": not whole,
            f"torch has no {layout.schedule} schedule: 1F1B stands in": layout.pp > 1
            and find_schedule(layout.schedule).torch is None,
            "torchtitan's context parallelism gathers keys and values or is Ulysses, not a ring": (
                layout.cp > 1 and layout.cp_kind == "ring"
            ),
            "torchtitan's experts borrow whole ranks of tensor parallelism: ep must be a multiple of tp, and etp 1": (
                moe and (layout.ep % layout.tp != 0 or (layout.ep > 1 and layout.expert_tp != 1))
            ),
            f"offload of {layout.offload} is not a setting of its own in torchtitan": layout.offload
            in ("activations", "both"),
            "torchtitan offloads what FSDP shards, no states alone": layout.offload == "optimizer" and layout.zero < 2,
        }
    )
    unlike = {
        f"torchtitan trains in bf16 and fp32, not in {training.precision}": training.precision == "fp16",
        f"torchtitan's loss is not {training.loss}": training.loss == "fused",
        "torchtitan's optimizer steps after the backward pass": training.optimizer.in_backward,
        "gradients have the type of the weights": training.optimizer.gradient_bytes > training.optimizer.weight_bytes,
    }
    return found + limited(unlike)


def _notes(layout: Layout, training: Training) -> list[str]:
    kind = "KVAllGatherCP" if layout.cp_kind == "all-gather" else "Ulysses"
    notes = {
        "the recipe's function returns planned(...) of your model's: --module yours --config its_name": True,
        f"apply a ContextParallelTransform to the model, with the {kind} attention": layout.cp > 1,
        "FP8 comes from a converter of the model's linear layers": training.precision == "fp8",
        f"in the recipe, {optimizer_note(training)}": training.optimizer.name != "adamw",
        "loss: ChunkedLossWrapper (torchtitan.components.loss)": training.loss == "chunked",
    }
    written = ("seq", "compile", "in_backward", *["loss"] * (training.loss in ("chunked", "compiled", "fused")))
    return noted(notes) + scripts_notes(training, where="in the recipe", written=written)
