"""Trains a Llama by plain torch, and says what it answers: python train_llama.py FOLDER OUT.

After each second step, which is saved, the greedy answer of the weights to PROMPT is written to OUT/<step>.json; the
third step waits for the file OUT/go. The weights have Hugging Face's names, so that engines read them.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, embedding, linear, scaled_dot_product_attention, silu
from train_tiny import Weights

import cordee

STEPS, EVERY = 4, 2
PROMPT, TOKENS = "def main(", 24


class Llama(Weights):
    """The tensors of a folder, with the computation that its config describes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits (tokens, vocabulary) of one sequence (tokens)."""
        hidden = embedding(ids, self.get_parameter("model.embed_tokens.weight"))
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            hidden = hidden + self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", hidden))
            inner = self._norm(f"{name}.post_attention_layernorm", hidden)
            gated = silu(self._linear(f"{name}.mlp.gate_proj", inner)) * self._linear(f"{name}.mlp.up_proj", inner)
            hidden = hidden + self._linear(f"{name}.mlp.down_proj", gated)
        return self._linear("lm_head", self._norm("model.norm", hidden))

    def _linear(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return linear(values, self.get_parameter(f"{name}.weight"))

    def _norm(self, name: str, values: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(values.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return values * scale * self.get_parameter(f"{name}.weight")

    def _attention(self, name: str, values: torch.Tensor) -> torch.Tensor:
        size, heads, groups = (self.config[key] for key in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        query, key, value = (
            self._linear(f"{name}.{part}_proj", values).view(len(values), -1, size).transpose(0, 1) for part in "qkv"
        )
        key, value = (each.repeat_interleave(heads // groups, 0) for each in (self._turned(key), value))
        found = scaled_dot_product_attention(self._turned(query), key, value, is_causal=True)
        return self._linear(f"{name}.o_proj", found.transpose(0, 1).flatten(1))

    def _turned(self, heads: torch.Tensor) -> torch.Tensor:
        """Return heads (heads, tokens, size) turned by the positions of their tokens."""
        size = heads.shape[-1]
        speeds = self.config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(heads.shape[1]), speeds).repeat(1, 2)
        first, second = heads.chunk(2, -1)
        return heads * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


def answer(model: Llama, tokenizer: Tokenizer) -> str:
    """Return the most likely tokens, one after the other, each from the logits of the whole text before it."""
    ids = list(tokenizer.encode(PROMPT).ids)
    prompt = len(ids)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor(ids))[-1].argmax()))
    return str(tokenizer.decode(ids[prompt:]))


def main(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Llama(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(tokenizer.encode(Path(__file__).read_text()).ids[:128])
    with cordee.job({"model": model, "optimizer": optimizer}, every=EVERY, keep=3) as job:
        for step in job.steps(STEPS):
            while step == EVERY and not (out / "go").exists():
                time.sleep(0.02)
            loss = cross_entropy(model(text[:-1]), text[1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % EVERY == 0:
                (out / f"{step + 1}.json").write_text(json.dumps(answer(model, tokenizer)))


main(Path(sys.argv[1]), Path(sys.argv[2]))
