"""A small LightningModule: dropout, two schedulers, validation inside the epoch, data that draws random numbers.

`--kill RANK:BATCH` gives itself notice after that batch. Each rank writes how it ended to `<out>/end<rank>.json`.
"""

import argparse
import hashlib
import json
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from cordee.train.integrations.lightning import Protect

ROWS = 104


class Noisy(Dataset):
    """Each sample draws from the generator of the process that makes it."""

    def __init__(self, noise: float) -> None:
        self.rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
        self.noise = noise

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i] + self.noise * torch.randn(8) if self.noise else self.rows[i]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        rows = Noisy(0.1)
        return (rows[int(i)] for i in torch.randperm(ROWS))


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
        self.losses: dict[int, float] = {}
        self.batches = 0

    def training_step(self, rows: torch.Tensor, _: int) -> torch.Tensor:
        loss = ((self.net(rows) - rows.sum(1, keepdim=True)) ** 2).mean()
        self.batches += 1
        self.losses[self.batches] = loss.item()
        return loss

    def validation_step(self, rows: torch.Tensor, _: int) -> None:
        self.log("val", self.net(rows).mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        by_value = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return [optimizer], [
            {"scheduler": by_step, "interval": "step"},
            {"scheduler": by_value, "interval": "step", "frequency": 5, "monitor": "val", "strict": False},
        ]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches"] = self.batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches = checkpoint["batches"]


class Sharded(Small):
    """Its weights and the optimizer's state are in parts on the ranks (FSDP2)."""

    def configure_model(self) -> None:
        fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Kill(pl.Callback):
    def __init__(self, where: str) -> None:
        self.rank, self.batch = map(int, where.split(":"))
        self.steps_total = None

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        job = next(each._fitting.job for each in trainer.callbacks if isinstance(each, Protect))
        self.steps_total = job._meter.steps_total
        if (trainer.global_rank, module.batches) == (self.rank, self.batch):
            os.kill(os.getpid(), signal.SIGTERM)
            while not job._agreement.is_leaving():  # a thread hears it; such short steps may end first
                threading.Event().wait(0.001)


def loader_of(kind: str, workers: int) -> Any:
    if kind == "stateful":
        return StatefulDataLoader(Noisy(0), batch_size=4, shuffle=True, num_workers=workers)
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4, num_workers=workers)
    return DataLoader(Noisy(0.1), batch_size=4, shuffle=True, num_workers=workers)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--kill", default="0:-1")
    parser.add_argument("--data", default="plain")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--validate", type=int, default=0)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--average", action="store_true")
    parser.add_argument("--other-package", action="store_true")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    args.out.mkdir(exist_ok=True)
    pl.seed_everything(3, workers=True, verbose=False)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    module = Sharded() if args.fsdp else Small()
    sharded = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo")
    if args.other_package:
        import pytorch_lightning

        Protect(to=args.to).setup(pytorch_lightning.Trainer(accelerator="cpu", logger=False), module, "fit")
    kill = Kill(args.kill)
    trainer = pl.Trainer(
        max_epochs=2,
        max_steps=args.max_steps,
        accelerator="cpu",
        devices=world,
        strategy=sharded if args.fsdp else "ddp" if world > 1 else "auto",
        accumulate_grad_batches=args.accumulate,
        val_check_interval=args.validate or None,
        use_distributed_sampler=args.data != "stream",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[
            pl.callbacks.EarlyStopping("val", patience=99, strict=False),
            kill,
            Protect(to=args.to),
            *([pl.callbacks.EMAWeightAveraging()] if args.average else []),
        ],
    )
    trainer.fit(module, loader_of(args.data, args.workers), DataLoader(Noisy(0), 4) if args.validate else None)
    early = trainer.early_stopping_callback
    weights = b"".join(whole(each.detach()).numpy().tobytes() for each in module.parameters())
    end = {
        "sharded": sum(
            isinstance(each, DTensor) and each.to_local().numel() < each.numel() for each in module.parameters()
        ),
        "weights": hashlib.sha256(weights).hexdigest(),
        "step": trainer.global_step,
        "steps_total": kill.steps_total,
        "epoch": trainer.current_epoch,
        "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        "logged_steps": trainer.fit_loop.epoch_loop._batches_that_stepped,
        "waited": early.wait_count,
        "best": float(early.best_score),
        "losses": module.losses,
    }
    (args.out / f"end{trainer.global_rank}.json").write_text(json.dumps(end))
    if world > 1:
        torch.distributed.destroy_process_group()
