"""The Hugging Face integration: two lines make `trainer.train()` a job.

    from cordee.train.integrations.huggingface import protect
    protect(trainer, to="checkpoints")

The boundary between two steps is `on_step_begin` of an optimizer step: the step before has been logged and evaluated,
and its scheduler stepped, by then. The Trainer itself finds the position in the data, by skipping what it has seen; the
generators are restored twice, as they were when the epoch's data was shuffled, and at the step itself.
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
        f"Hugging Face's Trainer cannot be imported: {error}", hint='pip install "cordee[train,huggingface]"'
    ) from None

log = logging.getLogger("cordee")

VERSION_MIN = (5, 3)  # the first one whose loss since the last log line can be read
# The results of training in TrainerState. The rest follows from the arguments, which may have changed.
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
    """Make `trainer.train()` a job: it resumes, saves as it goes, and leaves on notice.

    The options are those of `cordee.job`; a step is an optimizer step. The Trainer's own checkpoints are switched
    off, unless it needs them to load the best model at the end.

    Raises:
        InputError: an argument cannot be read, or the Trainer is set up in a way that cannot be resumed exactly.
    """
    _check(trainer)
    found = settings(**options)
    if found.to is not None and not trainer.args.load_best_model_at_end:
        trainer.args.save_strategy = SaveStrategy.NO
    trainer.train = wraps(trainer.train)(partial(_train, trainer, trainer.train, found))


def _check(trainer: Any) -> None:
    if tuple(int(part) for part in transformers_version.split(".")[:2]) < VERSION_MIN:
        raise InputError(
            f"transformers is {transformers_version}",
            hint=f"its Trainer is supported from {VERSION_MIN[0]}.{VERSION_MIN[1]} on: pip install -U transformers",
        )
    if trainer.is_deepspeed_enabled:
        raise InputError(
            "DeepSpeed keeps its own state, which Cordee cannot save",
            hint="use DistributedDataParallel or FSDP2 with the Trainer",
        )
    if trainer.args.enable_jit_checkpoint:
        raise InputError(
            "enable_jit_checkpoint and Cordee would both handle SIGTERM", hint="remove enable_jit_checkpoint"
        )


def _train(
    trainer: Any, train: Callable[..., Any], settings: Settings, resume_from_checkpoint: Any = None, **others: Any
) -> Any:
    if resume_from_checkpoint:
        raise InputError(
            f"resume_from_checkpoint={resume_from_checkpoint!r}, but the job resumes from its own checkpoints",
            hint="remove it; a new job starts from the weights of the model that the Trainer was given",
        )
    job = Job({}, settings)
    callback = _Steps(trainer, job)
    with ExitStack() as cleanup:
        job.open()
        cleanup.push(job)
        job.find()
        trainer.add_callback(callback)
        cleanup.callback(trainer.remove_callback, callback)
        if job.start_step:
            others["resume_from_checkpoint"] = cleanup.enter_context(tempfile.TemporaryDirectory())
            _write_trainer_state(trainer, job.start_step, Path(others["resume_from_checkpoint"]))
            load, trainer._load_from_checkpoint = trainer._load_from_checkpoint, lambda *_: None  # The job loads them.
            cleanup.callback(setattr, trainer, "_load_from_checkpoint", load)
        return train(**others)


def _write_trainer_state(trainer: Any, step: int, folder: Path) -> None:
    """Write the step for the Trainer, which skips the data up to there; the folder has nothing else."""
    args = trainer.args
    same = {name: getattr(args, name) for name in ("logging_steps", "eval_steps", "save_steps", "train_batch_size")}
    TrainerState(global_step=step, **same).save_to_json(str(folder / "trainer_state.json"))


class _TrainerProgress:
    """The counters of the Trainer and its callbacks, as an object with a state; each rank has its own."""

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
        # Losses summed before belong to the earlier attempt; the average at the end is over the steps of this one.
        trainer._total_loss_scalar = -saved["loss"]
        trainer._globalstep_last_logged = saved["last_logged"]
        trainer._initial_num_input_tokens_seen = trainer.state.num_input_tokens_seen
        trainer.current_flos = saved["flos"]
        self.order = saved["order"]
        if saved["samples"] != self._samples and trainer.args.process_index == 0:
            log.warning(
                "a step had %d samples and has %d now: the Trainer counts steps, so the position in the data changes",
                saved["samples"],
                self._samples,
            )

    def _stateful(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Drives the job by the Trainer's events."""

    def __init__(self, trainer: Any, job: Job) -> None:
        self._trainer, self._job = trainer, job
        self._began_epoch = self._began_step = False

    def on_train_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """Load, since the model is wrapped and its optimizer exists."""
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

    def on_epoch_begin(self, args: object, state: object, control: object, **_: object) -> None:
        """Capture or restore the generators before the epoch's data is shuffled."""
        loaders = [self._trainer.callback_handler.train_dataloader]
        if self._began_epoch or not self._job.start_step:
            self._progress.order = order.capture(loaders)
        else:
            order.restore(loaders, self._progress.order)
        self._began_epoch = True

    def on_step_begin(self, args: object, state: Any, control: object, **_: object) -> None:
        if not self._began_step:
            self._began_step = True
            self._job.begin(state.max_steps if state.max_steps > 0 else None)
        self._job.boundary()

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        self._job.stepped()

    def on_log(
        self, args: object, state: object, control: object, logs: dict[str, object] | None = None, **_: object
    ) -> None:
        self._job.log(loss=(logs or {}).get("loss"))

    def on_train_end(self, args: object, state: object, control: object, **_: object) -> None:
        self._job.finish()
