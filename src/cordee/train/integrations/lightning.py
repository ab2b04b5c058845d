"""The Lightning integration: two lines make `trainer.fit()` a job.

    from cordee.train.integrations.lightning import Protect
    trainer = Trainer(..., callbacks=[Protect(to="checkpoints")])

The boundary between two steps is before a batch is fetched: the step before has been validated, and its scheduler
stepped, by then. Lightning has no hook there, so the callback wraps two methods of the epoch's loop. Cordee handles
signals while the model is fitted: Lightning's own handler broadcasts, and waits for ranks that got no signal.
"""

import logging
import math
from contextlib import ExitStack
from typing import Any

from cordee.errors import InputError, MissingExtraError
from cordee.train.checkpoint.state import is_stateful
from cordee.train.integrations import order
from cordee.train.job import Job
from cordee.train.settings import settings
from cordee.units import plural

try:
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.utilities import CombinedLoader
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
except ImportError as error:
    raise MissingExtraError(
        f"Lightning cannot be imported: {error}", hint='pip install "cordee[train,lightning]"'
    ) from None

log = logging.getLogger("cordee")


class Protect(Callback):  # type: ignore[misc]
    """A callback that makes `trainer.fit()` a job: it resumes, saves as it goes, and leaves on notice.

    The options are those of `cordee.job`. A step is an optimizer step, or a batch if the optimization is manual.
    """

    def __init__(self, **options: Any) -> None:
        self._settings = settings(**options)
        self._fitting: _Fitting | None = None

    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:
        if stage == "fit":
            self._fitting = _Fitting(trainer, Job({}, self._settings), protected=self._settings.to is not None)

    def on_fit_start(self, trainer: object, pl_module: object) -> None:
        """Load, since the model is wrapped and its optimizers exist."""
        if self._fitting is not None:
            self._fitting.start()

    def on_train_batch_end(
        self, trainer: object, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._fitting is not None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._fitting.job.log(loss=loss)

    def on_train_end(self, trainer: object, pl_module: object) -> None:
        if self._fitting is not None:
            self._fitting.job.finish()

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        self._end(exception)

    def teardown(self, trainer: object, pl_module: object, stage: str) -> None:
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        fitting, self._fitting = self._fitting, None
        if fitting is not None:
            fitting.end(error)


class _Fitting:
    """One `fit`: its job, and the loop around which it steps."""

    def __init__(self, trainer: Any, job: Job, *, protected: bool) -> None:
        _check(trainer)
        self.job = job
        self._trainer = trainer
        self._loop = trainer.fit_loop.epoch_loop
        self._progress = _LightningProgress(trainer)
        self._began = self._between = False
        self._cleanup = ExitStack()
        if protected:
            self._put(trainer._signal_connector, "register_signal_handlers", lambda: None)

    def start(self) -> None:
        job, trainer = self.job, self._trainer
        job.open()
        self._cleanup.push(job)
        job.state["model"] = trainer.strategy.model
        job.state |= {f"optimizer{i}": optimizer for i, optimizer in enumerate(trainer.optimizers)}
        job.state["lightning"] = self._progress
        job.load()
        if job.start_step:
            trainer._checkpoint_connector._loaded_checkpoint = {}  # fit(ckpt_path=...) is where a new job starts
        # The first epoch's data is shuffled next; its loaders are known if they were passed to fit().
        source = trainer.fit_loop._data_source
        loaders = [] if source.is_module() else CombinedLoader(source.instance).flattened
        if not job.start_step:
            self._progress.order = order.capture(loaders)
        elif trainer.current_epoch == 0:
            order.restore(loaders, self._progress.order)
        self._advance, self._run_start = self._loop.advance, self._loop.on_run_start
        self._put(self._loop, "advance", self._one_batch)
        self._put(self._loop, "on_run_start", self._before_epoch)

    def end(self, error: BaseException | None) -> None:
        """End the job, also of a fit that had nothing left to do; then its last checkpoint is there already."""
        if error is None and not self._began:
            self.job.finish()
        self._cleanup.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _put(self, owner: Any, name: str, replacement: Any) -> None:
        setattr(owner, name, replacement)
        self._cleanup.callback(delattr, owner, name)  # Then the class's method is found again.

    @property
    def _loaders(self) -> Any:
        return self._trainer.fit_loop._combined_loader

    def _before_epoch(self, fetcher: Any) -> None:
        """Restore the data's order and position; Lightning makes the iterator here, except the first epoch's."""
        if self._began or not self.job.start_step:
            if self._trainer.current_epoch > 0:
                self._progress.order = order.capture(self._loaders.flattened)
            self._run_start(fetcher)
            return
        self._run_start(fetcher)
        self._find_position(fetcher)

    def _find_position(self, fetcher: Any) -> None:
        """Go to the batch after the last one trained on, by the loader's state, or by reading the epoch again."""
        batches = self._loop.batch_progress.current.ready
        states = self._progress.loader_states
        fetcher.fetched -= batches  # Lightning has counted them already.
        if self._trainer.current_epoch > 0:
            # The iterator was made before the sampler knew its epoch, and with other generators.
            order.restore(self._loaders.flattened, self._progress.order)
            self._loaders._load_state_dicts(states)
            iter(fetcher)
        if states:
            fetcher.fetched += batches
            return
        if batches and self.job.rank == 0:
            log.info(
                "reading %s again to find the position in the epoch; a StatefulDataLoader would know it",
                plural(batches, "batch", "batches"),
            )
        for _ in range(batches):
            next(fetcher)

    def _one_batch(self, fetcher: Any) -> None:
        if not self._began:
            self._began = self._between = True
            if self.job.start_step:
                self._loop._restarting = False  # Else it validates the batch before again.
            self.job.begin(_steps_total(self._trainer))
        if self._between:
            self.job.boundary()
        self._between = False
        self._advance(fetcher)
        if not self._loop._should_accumulate():
            self.job.stepped()
            self._between = True


class _LightningProgress:
    """The counters of Lightning and its callbacks, as an object with a state; each rank has its own."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.order = order.capture([])
        self.loader_states: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        module: dict[str, Any] = {"state_dict": {}, "epoch": trainer.current_epoch, "global_step": trainer.global_step}
        trainer.lightning_module.on_save_checkpoint(module)
        del module["state_dict"]  # The weights are kept as weights.
        loops = trainer.fit_loop.state_dict()
        loaders = trainer.fit_loop._combined_loader
        if loaders is not None and not all(_knows_its_place(loader) for loader in loaders.flattened):
            loops["state_dict"].pop("combined_loader", None)  # If one must be read again, all are.
        return {
            "loops": loops,
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule else {},
            "module": module,
            "metrics": dict(trainer.callback_metrics),
            "order": self.order,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.lightning_module.on_load_checkpoint({"state_dict": {}, **saved["module"]})
        self.loader_states = saved["loops"]["state_dict"].get("combined_loader", [])
        trainer.fit_loop.load_state_dict(saved["loops"])
        for each in trainer.callbacks:
            if saved["callbacks"].get(each.state_key):
                each.load_state_dict(saved["callbacks"][each.state_key])
        for config, state in zip(trainer.lr_scheduler_configs, saved["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        trainer._logger_connector._callback_metrics.update(saved["metrics"])  # what schedulers and callbacks monitor
        if saved["precision"]:
            trainer.precision_plugin.load_state_dict(saved["precision"])
        if trainer.datamodule and saved["datamodule"]:
            trainer.datamodule.load_state_dict(saved["datamodule"])
        self.order = saved["order"]


def _knows_its_place(loader: Any) -> bool:
    """Return whether a loader has its position in its state; Lightning's wrapper around a sampler hides it."""
    samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
    return is_stateful(loader) and not any(isinstance(each, DistributedSamplerWrapper) for each in samplers)


def _steps_total(trainer: Any) -> int | None:
    """Return the optimizer steps of the whole fit; None if Lightning does not know them, or steps are batches."""
    if not trainer.lightning_module.automatic_optimization:
        return None
    try:
        total = trainer.estimated_stepping_batches
    except MisconfigurationException:  # epochs accumulate over different numbers of batches
        return None
    return int(total) if 0 < total < math.inf else None


def _check(trainer: Any) -> None:
    if not isinstance(trainer, Trainer):  # the same code under another name, with other classes
        raise InputError(
            f"this Trainer comes from {type(trainer).__module__.split('.')[0]}",
            hint="import it, the module and the callbacks from lightning.pytorch",
        )
    if "DeepSpeed" in type(trainer.strategy).__name__:
        raise InputError(
            "DeepSpeed keeps its own state, which Cordee cannot save",
            hint='use strategy="ddp" or ModelParallelStrategy (FSDP2)',
        )
    for each in trainer.callbacks:
        if type(each).on_save_checkpoint is not Callback.on_save_checkpoint:
            raise InputError(
                f"{type(each).__name__} keeps its state in Lightning's own checkpoint (on_save_checkpoint)",
                hint="keep it in state_dict() and load_state_dict()",
            )
        if isinstance(each, ModelCheckpoint) and each.monitor is None and trainer.is_global_zero:
            log.info("ModelCheckpoint saves all of it a second time; Trainer(enable_checkpointing=False) avoids that")
