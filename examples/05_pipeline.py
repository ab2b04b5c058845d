"""Stage 5: a pipeline. Each rank has one stage of the model, and torch's own schedule moves micro-batches through them.

    torchrun --nproc_per_node=2 examples/05_pipeline.py

Notices and checkpoints are as before: all ranks stop before the same step.
"""

import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader, Dataset

import cordee

DIM, CONTEXT, GLOBAL_BATCH, MICRO_BATCHES, STEPS = 64, 32, 24, 4, 100


class GPT(nn.Module):
    """One stage of it: a part that another rank has is not there, and the names of the rest stay those of the whole."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        self.first, self.last = stage == 0, stage == stages - 1
        if self.first:
            self.tokens, self.places = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, batch_first=True, norm_first=True)
                for i in range(stage, 4, stages)
            }
        )
        if self.last:
            self.head = nn.Linear(DIM, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first:
            x = self.tokens(x) + self.places(torch.arange(CONTEXT, device=x.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        for layer in self.layers.values():
            x = layer(x, mask, is_causal=True)
        return self.head(x) if self.last else x


class Windows(Dataset):
    """The text of the standard library, cut into pieces."""

    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.data[i * CONTEXT : (i + 1) * CONTEXT + 1].long()


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, stages = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(device)
torch.manual_seed(rank)
model = GPT(rank, stages).to(device)  # NEW: this rank's stage
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
stage = PipelineStage(model, rank, stages, device)  # NEW
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)  # NEW
sampler = cordee.ElasticBatchSampler(Windows(), GLOBAL_BATCH, dp=(0, 1))  # NEW: all stages read the same samples
loader = DataLoader(Windows(), batch_sampler=sampler)

state = {"model": model, "optimizer": optimizer, "data": sampler}
with cordee.job(state, to="checkpoints/05", every="30s") as job:
    batches = sampler.batches(loader)
    for step in job.steps(STEPS):
        batch = next(batches).to(device)
        losses: list[torch.Tensor] = []
        schedule.step(  # NEW: forward and backward of all micro-batches
            *([batch[:, :-1]] if model.first else []),
            **({"target": batch[:, 1:], "losses": losses} if model.last else {}),
        )
        optimizer.step()
        optimizer.zero_grad()
        if model.last and (step % 20 == 0 or step == STEPS - 1):
            print(f"step {step}: loss {torch.stack(losses).mean().item():.6f}", flush=True)

dist.destroy_process_group()
