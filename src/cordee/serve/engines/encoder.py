"""A transformers model of a folder as an embedder: the mean of its last hidden states over the tokens of a text."""

from collections.abc import Sequence

import torch
from transformers import AutoModel, AutoTokenizer

TEXTS, TOKENS = 64, 512
"""Texts at once, and tokens of one; what is longer is cut."""


class Encoder:
    """A model on the CPU."""

    def __init__(self, folder: str) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()
        if self._tokenizer.pad_token is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token

    def encode(self, texts: Sequence[str]) -> list[list[float]]:
        """Return a vector for each text."""
        found: list[list[float]] = []
        for at in range(0, len(texts), TEXTS):
            part = self._tokenizer(
                list(texts[at : at + TEXTS]), padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
            )
            ids, mask = part["input_ids"], part["attention_mask"]
            with torch.inference_mode():
                hidden = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask[:, :, None]
            found += ((hidden * weights).sum(1) / weights.sum(1)).float().tolist()
        return found
