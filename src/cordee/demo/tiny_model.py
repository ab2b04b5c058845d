"""A tiny real model: a LlamaForCausalLM with random weights and a byte-level BPE, as a Hugging Face folder and as GGUF.

It is made in a second without torch. Its greedy text does not repeat itself for hundreds of tokens, so that a token
that is lost, doubled or changed shows; tokens that are not printable text are never the most likely ones.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cordee.serve.engines.gguf_file import convert
from cordee.storage.safetensors import write_file

Weight = npt.NDArray[np.float32]

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, INTER, CONTEXT = 512, 64, 2, 4, 2, 128, 32_768
FLAGS: Mapping[str, str | int] = {
    "--flash-attn": "off",
    "--cache-type-k": "f32",
    "--cache-type-v": "f32",
    "--threads": 1,
    "--no-warmup": "",
}
"""Settings with which llama.cpp's logits are those of transformers up to 1e-4, so that its greedy text is the same.

Its flash attention on the CPU computes in 16 bits even where the cache has 32: logits then differ by 0.03.
"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(folder: Path, *, seed: int = 0, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Path:
    """Make the model in an empty folder, and return the path of its GGUF file, `tiny.gguf` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HIDDEN // heads,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    weights = _weights(folder, seed, HIDDEN // heads * kv_heads)
    entries = [(name, "float32", array.shape, array.nbytes) for name, array in weights.items()]
    write_file(folder / "model.safetensors", entries, (array.tobytes() for array in weights.values()))
    return convert(folder, folder / "tiny.gguf")


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([Path(argparse.__file__).read_text()], trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _weights(folder: Path, seed: int, kv: int) -> dict[str, Weight]:
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, scale: float) -> Weight:
        drawn: Weight = (rng.standard_normal((rows, columns)) * scale / columns**0.5).astype(np.float32)
        return drawn

    ones = np.ones(HIDDEN, np.float32)
    found = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, HIDDEN**0.5), "model.norm.weight": ones}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            at + "input_layernorm.weight": ones,
            at + "post_attention_layernorm.weight": ones,
            at + "self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN, 2),
            at + "self_attn.k_proj.weight": matrix(kv, HIDDEN, 2),
            at + "self_attn.v_proj.weight": matrix(kv, HIDDEN, 2),
            at + "self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN, 2),
            at + "mlp.gate_proj.weight": matrix(INTER, HIDDEN, 1),
            at + "mlp.up_proj.weight": matrix(INTER, HIDDEN, 1),
            at + "mlp.down_proj.weight": matrix(HIDDEN, INTER, 2),
        }
    found["lm_head.weight"] = last = matrix(VOCAB, HIDDEN, 4)
    tokens = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    silent = [index for token, index in tokens.items() if not _is_text(token)]
    last[[*range(len(SPECIAL)), *silent]] = 0  # Another token's logit is greater than 0.
    return found


def _is_text(token: str) -> bool:
    """Return whether a token is printable ASCII; byte-level BPE writes the space as Ġ."""
    return all(char == "Ġ" or "!" <= char <= "~" for char in token)
