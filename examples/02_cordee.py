"""Stage 2: it survives. Two lines around the loop of stage 1, marked NEW.

    python examples/02_cordee.py          then `kill` it, and start it again: no step is lost or repeated

`job.log` is optional: for the progress line and the costs.
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn

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


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)

with cordee.job({"model": model, "optimizer": optimizer}, to="checkpoints/02", every="30s") as job:  # NEW
    for step in job.steps(STEPS):  # NEW
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1))
        batch = data[starts + torch.arange(CONTEXT + 1)].long().to(device)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.log(loss=loss, tokens=batch[:, 1:].numel())  # NEW
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
