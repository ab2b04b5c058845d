"""Trains a Llama of transformers, and says what it answers: python train_llama.py FOLDER OUT.

After each second step, which is saved, the greedy answer of the weights to PROMPT is written to OUT/<step>.json; the
third step waits for the file OUT/go.
"""

import json
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

import cordee

STEPS, EVERY = 4, 2
PROMPT, TOKENS = "def main(", 24


def answer(model: LlamaForCausalLM, tokenizer: Tokenizer) -> str:
    """Return the most likely tokens, one after the other, each from the logits of the whole text before it."""
    ids = list(tokenizer.encode(PROMPT).ids)
    prompt = len(ids)
    with torch.no_grad():
        for _ in range(TOKENS):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return str(tokenizer.decode(ids[prompt:]))


def main(folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = torch.tensor([tokenizer.encode(Path(__file__).read_text()).ids[:128]])
    with cordee.job({"model": model, "optimizer": optimizer}, every=EVERY, keep=3) as job:
        for step in job.steps(STEPS):
            while step == EVERY and not (out / "go").exists():
                time.sleep(0.02)
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % EVERY == 0:
                (out / f"{step + 1}.json").write_text(json.dumps(answer(model, tokenizer)))


main(Path(sys.argv[1]), Path(sys.argv[2]))
