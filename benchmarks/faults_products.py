"""The products that `faults.py` compares, each as its manual says: a rank's whole script.

`Context.begin` is called at each step, `Context.saving` when a save begins. DCP has no loop of its own: its script
does what torchtitan does (a folder for each step, the newest with `.metadata` is loaded).
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step imports it: once here, and not in each rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import cordee
import cordee.train.job
from cordee.train.checkpoint.checkpointer import Checkpointer
from faults_world import Context, digest_of


def network(wide: int = 64) -> nn.Sequential:
    """Dropout draws from the generator of its rank: a wrong stream after a resume shows in the weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, wide), nn.Dropout(0.2), nn.Linear(wide, 4))


def begin(ctx: Context) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer of one rank, sharded if there are several, with a generator of its own."""
    torch.set_num_threads(1)
    if ctx.world > 1:
        dist.init_process_group("gloo")
    model = network(ctx.options.get("wide", 64))
    if ctx.world > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + ctx.rank)
    return model, optimizer


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of its state, in order."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return [
        value
        for group in inner.param_groups
        for weight in group["params"]
        for _, value in sorted(inner.state.get(weight, {}).items())
        if isinstance(value, torch.Tensor) and value.ndim
    ]


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of weights and moments."""
    return digest_of([*model.parameters(), *moments(optimizer)])


def train(ctx: Context, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step on random data."""
    loss = model(torch.randn(8, 16) * ctx.options.get("scale", 1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def run_cordee(ctx: Context) -> None:
    """The loop of the README."""
    os.environ["FAULTS_FOLDER"] = str(ctx.folder)
    os.environ["CORDEE_TAKE_OVER"] = "1"  # A zombie is on a machine of its own, which this one stands for too.
    model, optimizer = begin(ctx)
    real_save = Checkpointer.save

    def save(self: Checkpointer, *args: Any, **named: Any) -> Any:
        ctx.saving(named["step"])
        return real_save(self, *args, **named)

    Checkpointer.save = save  # type: ignore[method-assign]
    state = {"model": model, "optimizer": optimizer}
    with cordee.job(state, to=ctx.to, every=ctx.every, keep=ctx.keep, grace=ctx.grace) as job:
        for step in job.steps(ctx.steps):
            ctx.begin(step, digest(model, optimizer))
            train(ctx, model, optimizer)


def run_dcp(ctx: Context) -> None:
    """A plain loop with `dcp.save`, or `dcp.async_save`; a folder for each step, or the same one."""
    model, optimizer = begin(ctx)
    if ctx.world == 1:
        os.environ.setdefault("MASTER_PORT", "0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # `async_save` needs one.
    root, same = Path(ctx.to), ctx.options.get("same_id", False)
    pending: Any = None

    def state(step: int) -> dict[str, Any]:
        weights, moments_ = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments_, "step": step, "rng": torch.get_rng_state()}

    def save(step: int) -> None:
        nonlocal pending
        if pending is not None:
            pending.result()
        at = root / ("latest" if same else f"step-{step:06d}")
        given = state(step)
        ctx.saving(step)
        if ctx.options.get("async"):
            pending = dcp.async_save(given, checkpoint_id=at)
        else:
            dcp.save(given, checkpoint_id=at)
        whole = sorted(path.parent for path in root.glob("step-*/.metadata"))
        if ctx.rank == 0 and len(whole) > ctx.keep:
            shutil.rmtree(whole[0], ignore_errors=True)

    start = 0
    if found := sorted(path.parent for path in root.glob("*/.metadata")):
        into = state(0)
        dcp.load(into, checkpoint_id=found[-1])
        set_state_dict(model, optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
        start = into["step"]
        torch.set_rng_state(into["rng"])
    for step in range(start, ctx.steps):
        if step % ctx.every == 0 and step != start:
            save(step)
        ctx.begin(step, digest(model, optimizer))
        train(ctx, model, optimizer)
    save(ctx.steps)
    if pending is not None:
        pending.result()


class Rows(torch.utils.data.Dataset):
    """The same rows for every product that wants a data set."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        made = torch.Generator().manual_seed(at)
        return {"x": torch.randn(16, generator=made), "labels": torch.zeros(4)}


def run_trainer(ctx: Context) -> None:
    """Hugging Face's Trainer, with its saving on SIGTERM switched on."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    torch.set_num_threads(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.net(x)
            return {"loss": (out - labels).square().mean(), "logits": out}

    class Diary(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            ctx.begin(state.global_step, digest(named["model"], named["optimizer"]))

    class Watched(Trainer):
        def _save_checkpoint(self, *args: Any, **named: Any) -> Any:
            ctx.saving(self.state.global_step)
            return super()._save_checkpoint(*args, **named)

    told = TrainingArguments(
        output_dir=ctx.to,
        max_steps=ctx.steps,
        save_strategy="steps",
        save_steps=ctx.every,
        save_total_limit=1 if ctx.options.get("keep_one") else ctx.keep,
        per_device_train_batch_size=8,
        use_cpu=True,
        ddp_backend="gloo" if ctx.world > 1 else None,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        enable_jit_checkpoint=True,
        seed=1,
    )
    trainer = Watched(model=Model(), args=told, train_dataset=Rows(), callbacks=[Diary()])
    last = get_last_checkpoint(ctx.to) if Path(ctx.to).is_dir() else None
    trainer.train(resume_from_checkpoint=last)


def run_lightning(ctx: Context) -> None:
    """Lightning's Trainer with its ModelCheckpoint."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    torch.set_num_threads(1)

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            ctx.begin(self.trainer.global_step, digest(self, self.trainer.optimizers[0]))

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return (self.net(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Watched(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            ctx.saving(trainer.global_step)
            super()._save_checkpoint(trainer, filepath)

    keep = 1 if ctx.options.get("keep_one") else ctx.keep
    newest: Any = {"monitor": "step", "mode": "max", "save_top_k": keep}
    saves = Watched(dirpath=ctx.to, filename="{step:06d}", every_n_train_steps=ctx.every, **newest)
    trainer = lightning.Trainer(
        max_steps=ctx.steps,
        accelerator="cpu",
        devices=ctx.world,
        strategy="ddp" if ctx.world > 1 else "auto",
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=ctx.folder,
    )
    found = sorted(Path(ctx.to).glob("*.ckpt"))
    trainer.fit(
        Model(),
        torch.utils.data.DataLoader(Rows(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)),
        ckpt_path=str(found[-1]) if found else None,
    )


def missing(product: str) -> str | None:
    """Why this product cannot be played here. What is imported now need not be in each rank."""
    try:
        if product == "Trainer":
            from transformers import Trainer  # noqa: F401
        elif product == "Lightning":
            from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: F401
    except ImportError as error:
        return f"{error.name} is not installed"
    return None


PRODUCTS = {"cordee": run_cordee, "DCP": run_dcp, "Trainer": run_trainer, "Lightning": run_lightning}
