"""Trains the tiny model a few steps by the SDK: python train_tiny.py FOLDER DESTINATION.

It prints greedy tokens, as transformers makes them, of the model before and after the training and at its saves.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

import cordee

PROMPT, TOKENS, STEPS = [283, 428, 81], 40, 4


def greedy(model: torch.nn.Module) -> list[int]:
    model.eval()
    with torch.no_grad():
        made = model.generate(torch.tensor([PROMPT]), max_new_tokens=TOKENS, do_sample=False)[0, len(PROMPT) :]
    model.train()
    return made.tolist()


def main(folder: str, to: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokens = {0: greedy(model)}
    with cordee.job({"model": model, "optimizer": optimizer}, to=to, every=2, keep=3) as job:
        for step in job.steps(STEPS):
            batch = torch.randint(0, 512, (2, 16))
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tokens[step + 1] = greedy(model)
    print(json.dumps(tokens))


main(*sys.argv[1:])
