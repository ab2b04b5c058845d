"""A tiny Llama under Hugging Face's Trainer: dropout, gradient accumulation, evaluation, a callback with a state.

`--kill RANK:STEP` gives itself notice after that step. Each rank writes how it ended to `<out>/end<rank>.json`.
"""

import argparse
import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from torch.distributed.tensor import DTensor
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from cordee.train.integrations.huggingface import protect


class Kill(TrainerCallback):
    def __init__(self, where: str) -> None:
        self.rank, self.step = map(int, where.split(":"))
        self.steps_total = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        job = next(each._job for each in self.trainer.callback_handler.callbacks if hasattr(each, "_job"))
        self.steps_total = job._meter.steps_total
        if (args.process_index, state.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGTERM)
            while not job._agreement.is_leaving():  # a thread hears it; such short steps may end first
                threading.Event().wait(0.001)


class Rows(torch.utils.data.Dataset):
    def __init__(self, n: int) -> None:
        self.rows = torch.randint(64, (n, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i]}


class Stream(torch.utils.data.IterableDataset):
    """In an order that the global generator gives."""

    def __iter__(self) -> Any:
        rows = Rows(96)
        return (rows[int(i)] for i in torch.randperm(96))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--kill", default="0:-1")
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--fsdp", type=int, help="of version 1 or 2")
    parser.add_argument("--resume-from")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    args.out.mkdir(exist_ok=True)
    set_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, attention_dropout=0.2, tie_word_embeddings=True)
    )
    told = TrainingArguments(
        output_dir=str(args.out / "trainer"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        max_steps=args.max_steps,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=2,
        metric_for_best_model="eval_loss",
        seed=3,
        use_cpu=True,
        fsdp=True if args.fsdp else None,
        fsdp_config={"version": args.fsdp} if args.fsdp else None,
        report_to=[],
        disable_tqdm=True,
    )
    if args.fsdp:
        # accelerate shards only where its ranks have accelerators: told that they have, it does all the rest on CPUs.
        told.distributed_state.distributed_type = DistributedType.MULTI_GPU
    early, kill = EarlyStoppingCallback(early_stopping_patience=99), Kill(args.kill)
    trainer = Trainer(
        model=model,
        args=told,
        train_dataset=Stream() if args.stream else Rows(52),
        eval_dataset=Rows(8),
        callbacks=[early, kill],
    )
    kill.trainer = trainer
    protect(trainer, to=args.to)
    trainer.train(**({"resume_from_checkpoint": args.resume_from} if args.resume_from else {}))
    weights = b"".join(whole(each.detach()).numpy().tobytes() for each in trainer.model_wrapped.parameters())
    end = {
        "sharded": sum(
            isinstance(each, DTensor) and each.to_local().numel() < each.numel()
            for each in trainer.model_wrapped.parameters()
        ),
        "weights": hashlib.sha256(weights).hexdigest(),
        "step": trainer.state.global_step,
        "steps_total": kill.steps_total,
        "losses": [[each["step"], each["loss"]] for each in trainer.state.log_history if "loss" in each],
        "evaluated": [[each["step"], each["eval_loss"]] for each in trainer.state.log_history if "eval_loss" in each],
        "patience": early.early_stopping_patience_counter,
        "learning_rate": trainer.optimizer.param_groups[0]["lr"],
        "saved by the Trainer": [path.name for path in (args.out / "trainer").glob("checkpoint-*")],
    }
    (args.out / f"end{told.process_index}.json").write_text(json.dumps(end))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
