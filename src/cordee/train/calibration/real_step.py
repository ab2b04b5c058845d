"""Real training steps of a user's own config, a few layers of it, timed part by part: the truth that a plan is held to.

The model is Hugging Face's for that config, with random weights and tokens, eager, AdamW fused.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cordee.errors import InputError, MissingExtraError, first_line
from cordee.train.calibration.cases import DTYPES
from cordee.train.calibration.timing import Device

WARM = 2


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps to run: sequences in each, their tokens, layers of the model (0: all), and how many steps."""

    seq_tokens: int
    sequences: int
    layers: int
    steps: int
    dtype: str


def real_steps(config: Path, wanted: Steps, device: Device) -> Iterator[dict[str, Any]]:
    """Yield the seconds of forward, backward pass and update of each step, after two that warm up.

    Raises:
        MissingExtraError: transformers is not installed.
        InputError: it has no model for this config.
    """
    model = _model(json.loads(config.read_text()), wanted, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    size = (wanted.sequences, wanted.seq_tokens)
    tokens = torch.randint(model.config.vocab_size, size, generator=generator).to(device.torch)
    for step in range(WARM + wanted.steps):
        found: list[Any] = []
        forward_s = device.seconds(lambda: found.append(model(input_ids=tokens, labels=tokens).loss))  # noqa: B023
        backward_s = device.seconds(found[0].backward)
        update_s = device.seconds(optimizer.step)
        cleared_s = device.seconds(optimizer.zero_grad)
        if step >= WARM:
            yield {"forward_s": forward_s, "backward_s": backward_s, "update_s": update_s + cleared_s}


def _model(facts: dict[str, Any], wanted: Steps, device: Device) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        hint = "pip install 'cordee[huggingface]'"
        raise MissingExtraError("a config is checked with Hugging Face's model for it", hint=hint) from None
    kind = facts.pop("model_type", None)
    try:
        config = AutoConfig.for_model(kind, **facts)
        if wanted.layers:
            config.num_hidden_layers = min(wanted.layers, config.num_hidden_layers)
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: config.num_hidden_layers]
        config.use_cache = False
        with torch.device(device.torch):
            return AutoModelForCausalLM.from_config(config, dtype=DTYPES[wanted.dtype])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"transformers has no model for {kind!r}: {first_line(error)[:200]}", hint="give a Hugging Face config.json"
        ) from None
