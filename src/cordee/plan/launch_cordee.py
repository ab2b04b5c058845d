"""A job's YAML, whose model section admission evaluates by the same plan, and the mesh of its script."""

from cordee.plan.launch_parts import Limit, Planned, Written, frozen_text, is_mixed, limited
from cordee.plan.training import BASES, Adapters, Training


def cordee(planned: Planned) -> Written:
    """Return the YAML with the mesh, what a YAML cannot say, and what to know beside it."""
    shape, layout, training = planned.shape, planned.layout, planned.training
    notes = [
        "the script makes the mesh; Cordee starts, stops and restores it",
        "`cordee plan ... --json > plan.json` and `cordee run --plan plan.json` do the same without a YAML",
    ]
    lines = [
        "run: [python, train.py]",
        f"gpus: {layout.gpus}",
        "model:",
        f"  name: {shape.name}",
        f"  seq: {training.seq_tokens}",
        f"  global_batch: {training.global_batch}",
        f"  micro_batch: {layout.micro_batch}",
        f"  precision: {training.precision}",
        f"  optimizer: {training.optimizer.name}",
        f"  framework: {training.framework}",
        *([] if training.loss is None else [f"  loss: {training.loss}"]),
        f"  recompute: {layout.recompute}",
        f"  layout: {layout}{' sp0' if layout.tp > 1 and not layout.sp else ''}",
    ]
    tuned = _tuned(training)
    lines += ["  tune:", *(f"    {name}: {value}" for name, value in tuned.items())] if tuned else []
    lines += [
        "",
        "# in train.py",
        f"# mesh = job.mesh(): {', '.join(f'{name} of {size}' for name, size in layout.axes)}",
    ]
    if layout.zero == 3 and layout.shard_ranks > 1:
        dtype = {"fp16": "float16"}.get(training.precision, "bfloat16")
        policy = (
            f", mp_policy=MixedPrecisionPolicy(param_dtype=torch.{dtype}, reduce_dtype=torch.float32)"
            if is_mixed(training)
            else ""
        )
        lines.append(f'# fully_shard(layer, mesh=mesh["dp"]{policy}) for each layer, then for the model')
    return "\n".join(lines), _limits(planned), notes


def _tuned(training: Training) -> dict[str, object]:
    """Return the section `tune` by the names of `Tuned`, without what goes without saying."""
    tuning, adapters = training.tuning, training.adapters
    found: dict[str, object] = {} if adapters is None else _adapted(adapters)
    if tuning.flat:
        found["fsdp_version"] = 1
    if tuning.frozen is not None:
        found["freeze"] = frozen_text(tuning.frozen)
    if tuning.packed_tokens is not None:
        found["packed_tokens"] = tuning.packed_tokens
    if training.optimizer.in_backward:
        found["optimizer_in_backward"] = "true"
    if _is_huggingfaces(training):
        found["model_code"] = "hf"
    elif adapters is not None and not tuning.loss_within:
        found["model_code"] = "torchtitan"
    if training.fused:
        found["compiled"] = "true"
    return found


def _is_huggingfaces(training: Training) -> bool:
    """Return whether something of Hugging Face's code is planned: its norms, GELU, dropout or loss, or peft's fp32.

    Adapters have its loss anyway.
    """
    tuning, adapters = training.tuning, training.adapters
    widened = adapters is not None and adapters.widened
    own_loss = tuning.loss_within and adapters is None
    return tuning.composite_norms or tuning.composite_gelu or training.dropout or widened or own_loss


def _adapted(adapters: Adapters) -> dict[str, object]:
    base = adapters.base
    train = "dora" if adapters.magnitudes else "lora" if base.bits == 16 else "qlora"
    found: dict[str, object] = {"train": train, "rank": adapters.rank, "targets": ",".join(adapters.targets)}
    found["base_bits"] = base.name
    if adapters.dropout:
        found["lora_dropout"] = adapters.dropout
    if adapters.joined:
        found["fused_qkv"] = "true"
    if base.head:
        found["quantize_head"] = "true"
    if base.copies != BASES[base.name].copies:
        found["dequantized"] = base.copies
    return found


def _limits(planned: Planned) -> list[Limit]:
    """Return what a job's YAML does not say, so that admission would plan with less or more."""
    training = planned.training
    drops = _is_huggingfaces(training) and planned.shape.drops
    return limited(
        {
            f"a job's YAML does not say {what}: admission plans the usual": applies
            for what, applies in {
                "that scores of attention are kept": not training.flash,
                "that there is dropout": training.dropout and not drops,
                "that there is no dropout": drops and not training.dropout,
                "how experts are loaded": training.imbalance != 1 or bool(training.imbalance_by_ep),
                "which kernels attention has": training.attention is not None,
                "that gathered inputs are gathered anew": training.tuning.regathers,
            }.items()
        }
    )
