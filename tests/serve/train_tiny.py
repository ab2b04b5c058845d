"""Trains the tiny model's weights a few steps by the SDK: python train_tiny.py FOLDER DESTINATION OUT.

After each step their own safetensors file is written to OUT/<step>/, beside which a served checkpoint is held. Only
the embedding and the head learn from text, the others decay: it needs no model code, and every tensor changes.
"""

import json
import sys
from pathlib import Path

import torch

import cordee
from cordee.storage.safetensors import open_file, write_file

STEPS = 4


class Weights(torch.nn.Module):
    """The tensors of a folder as parameters, by the names of its files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        with open_file(folder / "model.safetensors") as held:
            for name, each in held.items():
                *path, last = name.split(".")
                module: torch.nn.Module = self
                for part in path:
                    if part not in module._modules:
                        module.add_module(part, torch.nn.Module())
                    module = module.get_submodule(part)
                data = torch.frombuffer(bytearray(each.data), dtype=torch.float32).reshape(each.shape)
                module.register_parameter(last, torch.nn.Parameter(data.clone()))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.embedding(batch[:, :-1], self.get_parameter("model.embed_tokens.weight"))
        logits = hidden @ self.get_parameter("lm_head.weight").T
        learned = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        return learned + 1e-2 * sum(each.square().sum() for each in self.parameters())

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        rows = [(name, "float32", tuple(each.shape), each.nbytes) for name, each in self.named_parameters()]
        data = (each.detach().numpy().tobytes() for each in self.parameters())
        write_file(folder / "model.safetensors", rows, data)


def main(folder: str, to: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Weights(Path(folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    losses = []
    with cordee.job({"model": model, "optimizer": optimizer}, to=to, every=2, keep=3) as job:
        for step in job.steps(STEPS):
            loss = model.loss(torch.randint(0, 512, (2, 16)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            model.write(Path(out) / str(step + 1))
    print(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
