"""Stage 4: it resumes on another number of ranks, with the same samples in the same order.

    torchrun --nproc_per_node=2 examples/04_elastic.py      `kill` it, then
    torchrun --nproc_per_node=1 examples/04_elastic.py      or 3, 4, 6: any number that divides the global batch

Dropout is off: another number of ranks draws other random numbers. Losses then agree to the rounding of a sum.
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import cordee

DIM, CONTEXT, GLOBAL_BATCH, STEPS = 64, 32, 24, 100


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(DIM, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(CONTEXT, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x).flatten(0, 1)


class Windows(Dataset):
    """The text of the standard library, cut into pieces."""

    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.data[i * CONTEXT : (i + 1) * CONTEXT + 1].long()


several = int(os.environ.get("WORLD_SIZE", "1")) > 1
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
if torch.cuda.is_available():
    torch.cuda.set_device(device)
if several:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(0)
model = GPT().to(device)
if several:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = cordee.ElasticBatchSampler(Windows(), GLOBAL_BATCH, micro_batch_max=12)  # NEW: the order, for any ranks
loader = DataLoader(Windows(), batch_sampler=sampler)  # NEW

state = {"model": model, "optimizer": optimizer, "data": sampler}  # NEW: the place in it
with cordee.job(state, to="checkpoints/04", every="30s") as job:
    batches = sampler.batches(loader)  # NEW: what is given is counted
    for step in job.steps(STEPS):
        total = torch.zeros((), device=device)
        for _ in range(sampler.micro_batches):  # NEW: as many as this number of ranks needs
            batch = next(batches).to(device)
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten()) / sampler.micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == STEPS - 1:
            if several:
                dist.all_reduce(total, dist.ReduceOp.SUM)
            mean = total.item() / job.world_size
            if job.rank == 0:
                print(f"step {step}: loss {mean:.6f}  ({sampler.micro_batches} micro-batches a rank)", flush=True)

if several:
    dist.destroy_process_group()
