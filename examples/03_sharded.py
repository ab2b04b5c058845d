"""Stage 3: several ranks share the weights (FSDP2). The NEW lines are PyTorch's; Cordee's stay the same.

    torchrun --nproc_per_node=2 examples/03_sharded.py
    cordee run --gpus 2 --tier preemptible --checkpoint-to checkpoints -- python examples/03_sharded.py

A notice at one rank stops all of them before one step; each writes its own shard; any number of ranks can load them.
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import cordee

DIM, CONTEXT, BATCH, STEPS = 64, 32, 12, 100


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(DIM, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(CONTEXT, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x).flatten(0, 1)


several = int(os.environ.get("WORLD_SIZE", "1")) > 1
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
if torch.cuda.is_available():
    torch.cuda.set_device(device)  # NEW: FSDP2 shards on the current one
if several:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # NEW: before the job
torch.manual_seed(0)
model = GPT().to(device)
if several:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)  # NEW: the state gets the model as it is wrapped
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + (dist.get_rank() if several else 0))  # NEW: other batches on every rank
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)

with cordee.job({"model": model, "optimizer": optimizer}, to="checkpoints/03", every="30s") as job:
    for step in job.steps(STEPS):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1))
        batch = data[starts + torch.arange(CONTEXT + 1)].long().to(device)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.log(loss=loss, tokens=batch[:, 1:].numel() * job.world_size)  # NEW: of all ranks
        if job.rank == 0 and (step % 20 == 0 or step == STEPS - 1):
            print(f"step {step}: loss {loss.item():.6f}", flush=True)

if several:
    dist.destroy_process_group()
