"""The loop of `01_plain_loop.py` with Cordee: it survives, and goes on bit by bit.

    python examples/02_cordee.py                          then `kill` it, and start it again
    torchrun --nproc_per_node=4 examples/02_cordee.py
    cordee run --gpus 4 --tier preemptible --checkpoint-to checkpoints -- python examples/02_cordee.py

The two lines are `with cordee.job(...)` and `for step in job.steps(...)`. `job.log` is optional.
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import cordee

DIM, CONTEXT, BATCH, STEPS = 128, 128, 8, 200


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        block = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(CONTEXT, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        return self.head(self.blocks(x, mask, is_causal=True).flatten(0, 1))


several = int(os.environ.get("WORLD_SIZE", "1")) > 1
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
if several:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
model = GPT().to(device)
if several:
    for layer in model.blocks.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + (dist.get_rank() if several else 0))  # other batches on every rank
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)

with cordee.job({"model": model, "optimizer": optimizer}, to="checkpoints", every="30s") as job:
    for step in job.steps(STEPS):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1))
        batch = data[starts + torch.arange(CONTEXT + 1)].long().to(device)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.log(loss=loss, tokens=batch[:, 1:].numel() * (dist.get_world_size() if several else 1))
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

if several:
    dist.destroy_process_group()
