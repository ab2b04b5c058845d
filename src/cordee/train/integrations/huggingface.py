"""Hugging Face's Trainer: two lines, and it survives.

    from cordee.train.integrations.huggingface import protect
    protect(trainer, to="checkpoints")

The boundary between two steps is `on_step_begin` of an optimizer step: the one before has logged, evaluated and
scheduled by then. Where to go on in the data is left to the Trainer, which skips what it has seen; the generators are
put back twice, to what they were when the epoch's data was shuffled, and at the step itself.
"""

import logging
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any

from cordee.errors import InputError, MissingExtraError
from cordee.train.integrations import order
from cordee.train.job import Job
from cordee.train.settings import Settings, settings

try:
    from transformers import TrainerCallback, TrainerState
    from transformers import __version__ as transformers_version
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import SaveStrategy
except ImportError as error:
    raise MissingExtraError(
        f"Hugging Face's Trainer is not there: {error}", hint='pip install "cordee[train,huggingface]"'
    ) from None

log = logging.getLogger("cordee")

VERSION_MIN = (5, 3)  # the first that keeps the loss since its last line of the log where it can be read
# Of TrainerState: what training has produced. The rest follows from the arguments, which may have changed.
_HISTORY = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)


def protect(trainer: Any, **options: Any) -> None:
    """Make `trainer.train()` a job: it goes on from the newest checkpoint, saves as it goes, and leaves on notice.

    The options are those of `cordee.job`; a step is an optimizer step. The Trainer's own checkpoints are switched
    off, unless it needs them to load the best model at the end.

    Raises:
        InputError: an argument cannot be read, or the Trainer is set up in a way that cannot be resumed exactly.
    """
    _check(trainer)
    told = settings(**options)
    if told.to is not None and not trainer.args.load_best_model_at_end:
        trainer.args.save_strategy = SaveStrategy.NO
    trainer.train = wraps(trainer.train)(partial(_train, trainer, trainer.train, told))


def _check(trainer: Any) -> None:
    if tuple(int(part) for part in transformers_version.split(".")[:2]) < VERSION_MIN:
        raise InputError(
            f"transformers is {transformers_version}",
            hint=f"its Trainer is supported from {VERSION_MIN[0]}.{VERSION_MIN[1]} on: pip install -U transformers",
        )
    if trainer.is_deepspeed_enabled:
        raise InputError("DeepSpeed keeps its own state", hint="use DistributedDataParallel or FSDP2 with the Trainer")
    if trainer.args.enable_jit_checkpoint:
        raise InputError(
            "enable_jit_checkpoint and Cordee would both answer SIGTERM", hint="leave enable_jit_checkpoint away"
        )


def _train(
    trainer: Any, train: Callable[..., Any], told: Settings, resume_from_checkpoint: Any = None, **others: Any
) -> Any:
    if resume_from_checkpoint:
        raise InputError(
            f"resume_from_checkpoint={resume_from_checkpoint!r}, and the job goes on from its own checkpoints",
            hint="leave it away; a new job starts from the weights that the Trainer was given",
        )
    job = Job({}, told)
    callback = _Steps(trainer, job)
    with ExitStack() as cleanup:
        job.open()
        cleanup.push(job)
        job.find()
        trainer.add_callback(callback)
        cleanup.callback(trainer.remove_callback, callback)
        if job.start_step:
            others["resume_from_checkpoint"] = cleanup.enter_context(tempfile.TemporaryDirectory())
            _say_where_to_start(trainer, job.start_step, Path(others["resume_from_checkpoint"]))
            load, trainer._load_from_checkpoint = trainer._load_from_checkpoint, lambda *_: None  # The job loads them.
            cleanup.callback(setattr, trainer, "_load_from_checkpoint", load)
        return train(**others)


def _say_where_to_start(trainer: Any, step: int, folder: Path) -> None:
    """The Trainer reads from a folder how far it was, and skips that in the data; it finds nothing else there."""
    args = trainer.args
    same = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps", "train_batch_size")}
    TrainerState(global_step=step, **same).save_to_json(str(folder / "trainer_state.json"))


class _TrainerProgress:
    """What the Trainer and its callbacks count, as an object with a state: each rank's own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._samples = trainer.get_total_train_batch_size(trainer.args)
        self.order = order.capture([])

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "history": {name: getattr(trainer.state, name) for name in _HISTORY},
            "callbacks": [[type(each).__name__, each.state()["attributes"]] for each in self._stateful()],
            "loss": float(trainer._tr_loss),
            "last_logged": trainer._globalstep_last_logged,
            "flos": float(trainer.current_flos),
            "samples": self._samples,
            "order": self.order,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in saved["history"].items():
            setattr(trainer.state, name, value)
        trainer.state.compute_steps(trainer.args, trainer.state.max_steps)
        for callback, (name, attributes) in zip(self._stateful(), saved["callbacks"], strict=False):
            if type(callback).__name__ == name:
                vars(callback).update(attributes)
        trainer._tr_loss.fill_(saved["loss"])
        # What was summed before belongs to the attempt before; the average at the end is over the steps of this one.
        trainer._total_loss_scalar = -saved["loss"]
        trainer._globalstep_last_logged = saved["last_logged"]
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer.current_flos = saved["flos"]
        self.order = saved["order"]
        if saved["samples"] != self._samples and trainer.args.process_index == 0:
            log.warning(
                "a step had %d samples and has %d now: the Trainer counts steps, so the position in the data moves",
                saved["samples"],
                self._samples,
            )

    def _stateful(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


class _Steps(TrainerCallback):  # type: ignore[misc]
    """The job's steps, as the Trainer's events tell them."""

    def __init__(self, trainer: Any, job: Job) -> None:
        self._trainer, self._job = trainer, job
        self._began_epoch = self._began_step = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The model is wrapped and its optimizer made: load them."""
        trainer = self._trainer
        self._progress = _TrainerProgress(trainer)
        parts = {
            "model": trainer.model_wrapped,
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),  # not accelerate's wrapper
            "scheduler": trainer.lr_scheduler,
            "scaler": trainer.accelerator.scaler,
            "trainer": self._progress,
        }
        self._job.state.update({name: part for name, part in parts.items() if part is not None})
        self._job.load()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Before the epoch's data is shuffled."""
        loaders = [self._trainer.callback_handler.train_dataloader]
        if self._began_epoch or not self._job.start_step:
            self._progress.order = order.capture(loaders)
        else:
            order.restore(loaders, self._progress.order)
        self._began_epoch = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not self._began_step:
            self._began_step = True
            self._job.begin()
        self._job.boundary()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._job.stepped()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        self._job.log(loss=(logs or {}).get("loss"))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._job.finish()
