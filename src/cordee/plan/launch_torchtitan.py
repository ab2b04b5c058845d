"""Settings of torchtitan: a function of its Python configuration, which is how a run is described there.

Names were read in torchtitan/config/{parallelism,training}.py, distributed/activation_checkpoint.py and
torchtitan_recipes; its section.option flags are frozen and leave.
"""

from cordee.plan.layout import Layout
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.split import stage_layers
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

_RECOMPUTE = {"full": "FullActivationRematConfig", "selective": "SelectiveActivationRematConfig"}


def torchtitan(shape: ModelShape, layout: Layout, training: Training) -> tuple[str, list[str], list[str]]:
    """Return the settings, what torchtitan does not do of the layout, and what else the recipe has to say."""
    sharded = layout.zero >= 2
    replicate = layout.data_ranks // layout.shard_ranks if sharded else layout.dp
    whole = layout.dp % replicate == 0
    replicate, shard = (replicate, layout.dp // replicate) if whole else (1, layout.dp)
    tokens = layout.micro_batch * training.seq_tokens
    settings: dict[str, object] = {
        "training.max_context_length": training.seq_tokens,
        "training.num_tokens_per_microbatch_per_dp_rank": tokens,
        "training.num_tokens_per_train_step": training.tokens_per_step,
        "parallelism.data_parallel_replicate_degree": replicate,
        "parallelism.data_parallel_shard_degree": shard if sharded else 1,
        "parallelism.tensor_parallel_degree": layout.tp,
        "parallelism.enable_sequence_parallel": layout.sp,
        "parallelism.context_parallel_degree": layout.cp,
        "parallelism.pipeline_parallel_degree": layout.pp,
        "parallelism.expert_parallel_degree": layout.ep,
    }
    if sharded:
        settings["parallelism.fsdp_reshard_after_forward"] = "never" if layout.zero == 2 else "default"
    if layout.pp > 1:
        settings["parallelism.pipeline_parallel_schedule"] = find_schedule(layout.schedule).torch or "1F1B"
        settings["parallelism.num_pp_microbatches"] = layout.micro_batches(training.global_batch)
    cannot = [limit for limit, applies in _limits(shape, layout, whole=whole).items() if applies]
    return _module(shape, layout, settings), cannot, _notes(layout, training)


def _module(shape: ModelShape, layout: Layout, settings: dict[str, object]) -> str:
    """Return the function, with the model's parts written out by stage where there is a pipeline."""
    recompute = _RECOMPUTE.get(layout.recompute)
    lines = [f"from torchtitan.distributed.activation_checkpoint import {recompute}", "", ""] if recompute else []
    lines += ["def planned(config):", f'    """{layout}."""']
    lines += [f"    config.{name} = {_literal(value)}" for name, value in settings.items()]
    lines.append(f"    config.activation_checkpoint = {f'{recompute}()' if recompute else None}")
    if layout.pp > 1:
        split = layout.split or stage_layers(shape.layers, layout.stages)
        lines += [
            f"    parts, layer = [], iter(range({shape.layers}))",
            f"    for layers in {list(split)}:",
            '        parts.append([f"layers.{next(layer)}" for _ in range(layers)])',
            '    parts[0].insert(0, "tok_embeddings")',
            '    parts[-1] += ["norm", "lm_head"]',
            "    config.parallelism.pipeline_parallel_module_fqns_per_model_part = parts",
        ]
    return "\n".join([*lines, "    return config"])


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _limits(shape: ModelShape, layout: Layout, *, whole: bool) -> dict[str, bool]:
    moe = shape.experts is not None
    return {
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
        f"offload of {layout.offload} is not a setting of its own in torchtitan": layout.offload != "none",
    }


def _notes(layout: Layout, training: Training) -> list[str]:
    kind = "KVAllGatherCP" if layout.cp_kind == "all-gather" else "Ulysses"
    notes = {
        "the recipe's function returns planned(...) of your model's: --module yours --config its_name": True,
        f"apply a ContextParallelTransform to the model, with the {kind} attention": layout.cp > 1,
        "FP8 comes from a converter of the model's linear layers": training.precision == "fp8",
        f"optimizer {training.optimizer.name}: name it in the recipe": training.optimizer.name != "adamw",
    }
    return [note for note, applies in notes.items() if applies]
