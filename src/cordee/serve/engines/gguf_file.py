"""A Hugging Face folder as one GGUF file, which llama.cpp reads: weights, tokenizer and chat template; its shape.

Only for decoders whose tensors GGUF stores as they are (`ARCHITECTURES`) and byte-level BPE tokenizers; llama.cpp's own
script converts the others. Neither torch nor transformers is needed.
"""

import importlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cordee.errors import InputError, MissingExtraError
from cordee.storage.safetensors import FileTensor, open_file
from cordee.workload.families import shape_from_config
from cordee.workload.model import ModelShape

if TYPE_CHECKING:
    from gguf import GGUFWriter

SCRIPT_HINT = "convert it with llama.cpp's convert_hf_to_gguf.py, and serve the .gguf file"

ARCHITECTURES = {
    "LlamaForCausalLM": "LLAMA",
    "MistralForCausalLM": "LLAMA",
    "Qwen2ForCausalLM": "QWEN2",
    "Qwen3ForCausalLM": "QWEN3",
}
"""GGUF's name of an architecture, by that of config.json."""

_QUERY, _KEY = "self_attn.q_proj", "self_attn.k_proj"
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # of gguf.TokenType
# Parts of the regular expressions that split text before BPE, and llama.cpp's names for them; the first that fits.
_SPLITS = (
    (r"\p{N}{1,3}", "llama-bpe"),
    (r"\p{N}", "qwen2"),
)


def convert(folder: Path, out: Path) -> Path:
    """Write the model of a folder (config.json, *.safetensors, tokenizer.json) to `out`, whole or not at all.

    Tensors keep the precision that they have in the folder; vectors are stored in 32 bits, as llama.cpp wants them.

    Raises:
        InputError: a file is missing, or this does not know the architecture or the tokenizer.
    """
    gguf = _library(f"{folder} has to be converted to GGUF")
    config, tokenizer = _read_json(folder, "config.json"), _read_json(folder, "tokenizer.json")
    model = _Shape.of(folder, config)
    half = out.with_name(f".{out.name}.half")
    writer = gguf.GGUFWriter(half, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[model.architecture]])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model.architecture], model.layers)
    _write_shape(writer, model, config)
    _write_tokenizer(writer, folder, tokenizer, model.vocab)
    try:
        with ExitStack() as stack:
            for name, tensor in _tensors(folder, stack):
                theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if theirs is None:
                    raise InputError(f"{folder}: GGUF has no name for the tensor {name}", hint=SCRIPT_HINT)
                array, kind = _array(tensor, model.rotated_heads(name))
                writer.add_tensor(theirs, array, raw_dtype=gguf.GGMLQuantizationType[kind] if kind else None)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        writer.close()
        half.replace(out)
    finally:
        half.unlink(missing_ok=True)
    return out


def read_shape(path: Path) -> ModelShape:
    """Return the shape of the model in a GGUF file.

    Raises:
        ShapeError: its architecture is not known here, or the file lacks a field.
    """
    reader = _library(f"{path} is a GGUF file").GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    named = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "sliding_window": "attention.sliding_window",
        "max_position_embeddings": "context_length",
    }
    fields = {name: reader.get_field(f"{architecture}.{theirs}") for name, theirs in named.items()}
    config = {name: field.contents() for name, field in fields.items() if field is not None}
    tokens = reader.get_field("tokenizer.ggml.tokens")
    config |= {"model_type": architecture, "vocab_size": 0 if tokens is None else len(tokens.data)}
    return shape_from_config(config, name=path.stem)


@dataclass(frozen=True, slots=True)
class _Shape:
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @staticmethod
    def of(folder: Path, config: dict[str, Any]) -> "_Shape":
        """Return the counts of a config.json.

        Raises:
            InputError: another architecture, or a key is missing.
        """
        theirs = next(iter(config.get("architectures") or ["none"]))
        if theirs not in ARCHITECTURES or config.get("quantization_config"):
            what = f"the architecture {theirs}" if theirs not in ARCHITECTURES else "quantised weights"
            raise InputError(f"{folder} has {what}, which Cordee cannot write as GGUF", hint=SCRIPT_HINT)
        try:
            heads = config["num_attention_heads"]
            return _Shape(
                architecture=ARCHITECTURES[theirs],
                layers=config["num_hidden_layers"],
                heads=heads,
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or config["hidden_size"] // heads,
                vocab=config["vocab_size"],
            )
        except KeyError as error:
            raise InputError(f"{folder / 'config.json'} has no {error.args[0]}") from None

    def rotated_heads(self, name: str) -> int:
        """Return the number of heads of a tensor whose rows GGUF orders by pairs, or 0: only Llama's q and k."""
        if self.architecture != "LLAMA":
            return 0
        return self.heads if _QUERY in name else self.kv_heads if _KEY in name else 0


def _library(why: str) -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise MissingExtraError(f"{why}, and gguf is not installed", hint="pip install 'cordee[serve]'") from error


def _write_shape(writer: "GGUFWriter", model: _Shape, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if (kind := (rope or config.get("rope_scaling") or {}).get("rope_type", "default")) != "default":
        raise InputError(f"the model scales its positions by {kind}, which Cordee cannot write", hint=SCRIPT_HINT)
    writer.add_name(config.get("_name_or_path") or "model")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    writer.add_vocab_size(model.vocab)


def _write_tokenizer(writer: "GGUFWriter", folder: Path, tokenizer: dict[str, Any], vocab: int) -> None:
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise InputError(f"{folder / 'tokenizer.json'} is not a byte-level BPE", hint=SCRIPT_HINT)
    tokens = [f"[PAD{index}]" for index in range(vocab)]
    kinds = [_USER_DEFINED] * vocab
    for token, index in model["vocab"].items():
        tokens[index], kinds[index] = token, _NORMAL
    for added in tokenizer.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_split(folder, tokenizer.get("pre_tokenizer")))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in model["merges"]])
    given = _read_json(folder, "tokenizer_config.json", {})
    ids = {token: index for index, token in enumerate(tokens)}
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        token = given.get(name)
        text = token["content"] if isinstance(token, dict) else token
        if text in ids:
            add(ids[text])
    writer.add_add_bos_token(bool(given.get("add_bos_token", _adds_bos(tokenizer))))
    separate = folder / "chat_template.jinja"
    template = separate.read_text(encoding="utf-8") if separate.is_file() else given.get("chat_template")
    if isinstance(template, str):
        writer.add_chat_template(template)


def _adds_bos(tokenizer: dict[str, Any]) -> bool:
    return any("SpecialToken" in step for step in ((tokenizer.get("post_processor") or {}).get("single") or [])[:1])


def _split(folder: Path, pre_tokenizer: dict[str, Any] | None) -> str:
    """Return llama.cpp's name for the rule that splits text before BPE.

    Raises:
        InputError: it is another rule.
    """
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    patterns = [step["pattern"]["Regex"] for step in steps if "Regex" in (step.get("pattern") or {})]
    if not patterns and len(steps) == 1 and steps[0].get("type") == "ByteLevel" and steps[0].get("use_regex", True):
        return "gpt-2"
    for part, name in _SPLITS:
        if len(patterns) == 1 and part in patterns[0]:
            return name
    raise InputError(f"{folder / 'tokenizer.json'} splits text by a rule that Cordee does not know", hint=SCRIPT_HINT)


def _tensors(folder: Path, stack: ExitStack) -> Iterator[tuple[str, FileTensor]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InputError(f"{folder} has no *.safetensors", hint="a folder as save_pretrained writes it")
    for path in paths:
        yield from sorted(stack.enter_context(open_file(path)).items(), key=itemgetter(0))


def _array(tensor: FileTensor, heads: int) -> tuple[npt.NDArray[Any], str | None]:
    """Return a tensor as GGUF stores it, and its type if numpy does not have it."""
    kind = None
    if tensor.dtype == "bfloat16":
        array = np.frombuffer(tensor.data, np.uint16).reshape(tensor.shape)
        if len(tensor.shape) == 1:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        else:
            kind = "BF16"
    elif tensor.dtype in ("float32", "float16"):
        array = np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)
        array = array.astype(np.float32) if len(tensor.shape) == 1 else array
    else:
        raise InputError(f"a tensor has the type {tensor.dtype}, which Cordee cannot write as GGUF", hint=SCRIPT_HINT)
    if heads:
        rows = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
        array = rows.swapaxes(1, 2).reshape(array.shape)
    return (array.view(np.uint8) if kind else array), kind


def _read_json(folder: Path, name: str, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    path = folder / name
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise InputError(f"{folder} has no {name}", hint="a folder as save_pretrained writes it") from None
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    assert isinstance(read, dict), f"{path} is an object"
    return read
