"""Stage 1: a small GPT learns Python's own standard library, byte by byte, in a plain loop. Killed, it loses all.

python examples/01_plain_loop.py
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn

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

for step in range(STEPS):
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1))
    batch = data[starts + torch.arange(CONTEXT + 1)].long().to(device)
    loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step}: loss {loss.item():.6f}", flush=True)
