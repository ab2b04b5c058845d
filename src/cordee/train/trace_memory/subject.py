"""The model of a question, built on fake tensors: its repeated layers, its ends, and one micro-batch's loss."""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cordee.errors import MissingExtraError, ScriptError, ShapeError
from cordee.near import meant
from cordee.train.trace_memory import titan
from cordee.train.trace_memory.question import Question

# Keys of config.json that hold a number of layers, and those that list something for each.
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "num_decoder_layers",
    "decoder_layers",
    "encoder_layers",
)
_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model: `layers` are its repeated ones in order, `tail` comes after them, `embedding` before.

    `wide` is the number of classes that the loss is over: a tensor with so many columns is one of logits.
    `reads_tokens`: the model takes sequences of tokens.
    """

    module: nn.Module
    layers: tuple[nn.Module, ...]
    embedding: nn.Module | None
    tail: tuple[nn.Module, ...]
    loss: Callable[[], torch.Tensor]
    wide: int
    reads_tokens: bool = True


def build(question: Question) -> Subject:
    """Return the model, on the fake CPU that is active.

    Raises:
        ShapeError: a config that the code has no model for.
        MissingExtraError: transformers is not installed.
    """
    if question.function is not None:
        return _given(question, question.function)
    if question.code == "torchtitan":
        return _titan(question)
    return _hugging_face(question)


def depth(config: dict[str, Any]) -> int | None:
    """Return how many layers a config asks for; None where it does not say, or says it twice."""
    found = {key: config[key] for key in _DEPTHS if isinstance(config.get(key), int)}
    return next(iter(found.values())) if len(found) == 1 else None


def with_depth(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return a config with another number of layers."""
    found = dict(config)
    for key in _DEPTHS:
        if isinstance(found.get(key), int):
            found[key] = layers
    for key in _BY_LAYER:
        if isinstance(found.get(key), list):
            found[key] = found[key][:layers]
    return found


def uniform(question: Question) -> bool:
    """Return whether a config's layers are of one kind, as far as what it lists for each of them says."""
    layers = depth(question.config)
    given: Mapping[str, Any] = question.config
    if question.code == "hf":
        given = vars(_config(question).get_text_config())
    by_layer = [value for value in given.values() if isinstance(value, list) and len(value) == layers]
    return all(len(set(map(str, value))) == 1 for value in by_layer)


def _titan(question: Question) -> Subject:
    model = titan.build(question.config, question.seq_tokens)
    size = (question.micro_batch, question.seq_tokens)
    tokens, labels = (torch.zeros(size, dtype=torch.long) for _ in range(2))

    criterion = titan.cross_entropy
    if question.compiled:
        from cordee.train.trace_memory.compiled import compiled  # a second of imports

        criterion = compiled(criterion)

    def loss() -> torch.Tensor:
        return criterion(model(tokens), labels)

    tail, embedding = _ends((model.norm, model.output), model.output, model.tok_embeddings)
    return Subject(model, tuple(model.layers), embedding, tail, loss, question.config["vocab_size"])


def _config(question: Question) -> Any:
    """Return transformers' own config, with its defaults.

    Raises:
        MissingExtraError: transformers is not installed.
        ShapeError: it knows no such model.
    """
    try:
        import transformers
    except ImportError:
        hint = "pip install 'cordee[huggingface]', or --model-code torchtitan"
        raise MissingExtraError("transformers is not installed", hint=hint) from None
    transformers.logging.set_verbosity_error()
    given = _without(question.config, {"source", "as_of", "model_type"})
    family, known = question.config.get("model_type"), transformers.CONFIG_MAPPING
    if family not in known:
        near = "" if family is None else meant(str(family), known)
        hint = near + "a newer transformers may: pip install -U transformers"
        raise ShapeError(f"transformers {transformers.__version__} knows no model_type {family!r}", hint=hint)
    try:
        return transformers.AutoConfig.for_model(family, **given)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ShapeError(f"transformers knows no model of {family!r}: {error}", hint="see its config.json") from None


def _without(config: Mapping[str, Any], names: AbstractSet[str]) -> dict[str, Any]:
    """Return a config without keys of these names, and at every depth without the type that a checkpoint is stored in.

    Weights have the type that is trained in.
    """
    kept = {key: value for key, value in config.items() if key not in names | {"dtype", "torch_dtype"}}
    return {key: _without(value, set()) if isinstance(value, dict) else value for key, value in kept.items()}


def _hugging_face(question: Question) -> Subject:
    config = _config(question)
    import transformers
    from transformers.initialization import no_init_weights

    try:
        code = _auto_class(transformers, config)
        config._attn_implementation = question.attention if getattr(code, "_supports_sdpa", True) else "eager"
        with no_init_weights():  # some of it reads values, and no value matters
            model = code._from_config(config)
        model.tie_weights()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ShapeError(f"transformers builds no {config.model_type}: {error}", hint="see its config.json") from None
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    model.train()
    if question.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = _inputs(config, model, question)

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(**inputs, **({"use_cache": False} if hasattr(config, "use_cache") else {})).loss
        return found

    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    layers = _layers(model)
    tail = tuple(each for each in (_final_norm(model, layers), head) if each is not None)
    tail, embedding = _ends(tail, head, embedding)
    wide = getattr(config.get_text_config(), "vocab_size", 0) if head is not None else config.num_labels
    return Subject(model, layers, embedding, tail, loss, wide, reads_tokens="input_ids" in inputs)


def _ends(
    tail: tuple[nn.Module, ...], head: nn.Module | None, embedding: nn.Module | None
) -> tuple[tuple[nn.Module, ...], nn.Module | None]:
    """Return what comes after the layers and before them; an embedding that is the head's as well comes after them."""
    if head is not None and embedding is not None and head.weight is embedding.weight:
        return (*tail, embedding), None
    return tail, embedding


def _auto_class(transformers: Any, config: Any) -> Any:
    """Return the class that trains a model of this config: the one that it names, or the first task that has one."""
    for name in getattr(config, "architectures", None) or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    first = ("Seq2SeqLM",) if config.is_encoder_decoder else ()
    for task in (*first, "CausalLM", "MaskedLM", "ImageClassification", "SequenceClassification"):
        mapping = getattr(transformers, f"AutoModelFor{task}")._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (tuple, list)) else found
    raise ValueError("it has no class with a loss")


def _inputs(config: Any, model: nn.Module, question: Question) -> dict[str, torch.Tensor]:
    batch, tokens = question.micro_batch, question.seq_tokens
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        side = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        pixels = torch.zeros(batch, config.num_channels, *side)
        return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.long)}
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    return {"input_ids": ids, "labels": torch.zeros(batch, tokens, dtype=torch.long)}


def _layers(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the longest list of modules of one class; a model with two of them (encoder and decoder) has both."""
    lists = [
        each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) > 1
        and len({type(layer) for layer in each}) == 1 and any(True for _ in each[0].parameters())
    ]  # fmt: skip
    if not lists:
        return ()
    most = max(len(each) for each in lists)
    inside = {id(inner) for each in lists for layer in each for inner in layer.modules()}
    outer = [each for each in lists if id(each) not in inside and len(each) == most]
    return tuple(layer for each in outer for layer in each)


def _final_norm(model: nn.Module, layers: tuple[nn.Module, ...]) -> nn.Module | None:
    """Return the norm beside the last list of layers, if there is one."""
    for parent in model.modules():
        lists = [each for each in parent.children() if isinstance(each, nn.ModuleList)]
        if layers and any(layers[-1] is layer for each in lists for layer in each):
            norms = [each for name, each in parent.named_children() if "norm" in name.lower() or name == "ln_f"]
            return norms[-1] if norms else None
    return None


def _given(question: Question, name: str) -> Subject:
    """Return what a function of the user makes: a model, and a function that returns a micro-batch's loss."""
    module, _, attribute = name.partition(":")
    path = Path(module)
    sys.path.insert(0, str(path.parent) if path.suffix == ".py" else "")
    try:
        function = getattr(importlib.import_module(path.stem if path.suffix == ".py" else module), attribute)
    except (ImportError, AttributeError) as error:
        hint = "name a function that can be imported from here: module:function, or folder/file.py:function"
        raise ScriptError(f"{name} cannot be loaded: {error}", hint=hint) from None
    offered = {"seq_tokens": question.seq_tokens, "micro_batch": question.micro_batch}
    known = inspect.signature(function).parameters
    model, loss = function(**{key: value for key, value in offered.items() if key in known})
    layers = _layers(model)
    return Subject(model, layers, None, (), loss, 0, reads_tokens="seq_tokens" in known)


@contextmanager
def one_document_a_sequence() -> Iterator[None]:
    """Tell transformers that sequences are not packed, which it reads from values that fake tensors do not have.

    Otherwise it makes a mask of sequence x sequence and, for it, copies of keys and values for all heads.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    original = masks.find_packed_sequence_indices

    def found(position_ids: torch.Tensor) -> None:
        original(position_ids)  # it allocates all the same

    masks.find_packed_sequence_indices = found
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = original
