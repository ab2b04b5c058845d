"""Stage 7: Lightning. The two lines are an import and a callback.

    python examples/07_lightning.py                      alone, or
    torchrun --nproc_per_node=2 examples/07_lightning.py

With a StatefulDataLoader the position in the epoch is restored; any other loader is read again up to there.
Needs: pip install "cordee[train,lightning,torchdata]"
"""

import os
import sysconfig
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cordee.train.integrations.lightning import Protect  # NEW

warnings.filterwarnings("ignore", module="lightning")  # hints about workers and loggers
DIM, CONTEXT, BATCH, STEPS = 64, 32, 12, 100


class GPT(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(DIM, 256)

    def training_step(self, batch: torch.Tensor, at: int) -> torch.Tensor:
        x = self.tokens(batch[:, :-1]) + self.places(torch.arange(CONTEXT, device=batch.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=batch.device)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        step = self.global_step
        if self.global_rank == 0 and (step % 20 == 0 or step == STEPS - 1):
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Windows(Dataset):
    """The text of the standard library, cut into pieces."""

    def __init__(self) -> None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in sources)), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.data) - 1) // CONTEXT

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.data[i * CONTEXT : (i + 1) * CONTEXT + 1].long()


pl.seed_everything(0, verbose=False)
trainer = pl.Trainer(
    max_steps=STEPS,
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=int(os.environ.get("WORLD_SIZE", "1")),
    enable_checkpointing=False,  # NEW: once is enough
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
    callbacks=[Protect(to="checkpoints/07", every="30s")],  # NEW: it goes on, saves and leaves
)
trainer.fit(GPT(), StatefulDataLoader(Windows(), batch_size=BATCH, shuffle=True))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
