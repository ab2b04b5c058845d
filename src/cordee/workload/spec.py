"""A job's specification: the YAML that people write, and the validated value in base units that the rest uses.

Quantities have units (`limit.time: 47h` becomes `limit.time_s`); a bare number is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from cordee.errors import InputError, SpecError
from cordee.units import US_PER_S, format_duration, parse_bytes, parse_duration_s, parse_micro_usd
from cordee.workload.dataset_section import DataSpec, in_full, parse_wait
from cordee.workload.gpus import parse_mig, parse_wanted
from cordee.workload.keep import parse_keep
from cordee.workload.notify import Notify
from cordee.workload.planned import PlannedJob
from cordee.workload.service import WRITTEN_AS as SERVICE_WRITTEN_AS
from cordee.workload.service import ServiceSpec, filled_in, read_service
from cordee.workload.sweep import SweepSpec, read_sweep
from cordee.workload.telemetry import OnSpike, Tracker
from cordee.workload.times import parse_time_us, parse_window
from cordee.workload.tuning import TuneSpec
from cordee.workload.written import Where, check_keys, explained, load_yaml, mapping, plain, quantity

Launch = Literal["auto", "rank", "node"]
PreflightWanted = Literal["quick", "full"]
Tier = Literal["production", "standard", "preemptible"]
CapacityWanted = Literal["any", "on-demand", "spot"]
Positive = Annotated[int, Field(ge=1)]
AfterText = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,80}(:(ok|any|failed))?$")]
GRACE_S = 30.0
SWEEP_NAME_CHARS_MAX = 34  # so that a trial's name has room for its number


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Limit(_Section):
    """Limits at which the job is stopped; None: no limit."""

    time_s: Annotated[float, Field(gt=0)] | None = None
    cost_micro_usd: Annotated[int, Field(gt=0)] | None = None
    preemptions: Annotated[int, Field(ge=0)] | None = None  # after this many it is not preempted any more


class Elastic(_Section):
    """Other numbers of GPUs that the job can run on: the halves of `gpus` down to `at_least`, or these sizes.

    A smaller gang grows `grow_after_s` after its start at the earliest; None: when that pays for a save and a restart.
    """

    at_least: Positive | None = None
    sizes: tuple[Positive, ...] = ()
    grow_after_s: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _says_it_once(self) -> "Elastic":
        if self.at_least is not None and self.sizes:
            raise ValueError("give either at_least (then the halves of gpus down to it) or sizes")
        return self

    def below(self, gpus: int) -> tuple[int, ...]:
        """Return the smaller sizes, largest first.

        >>> Elastic(at_least=10).below(64), Elastic(sizes=(16, 48)).below(64)
        ((32, 16), (48, 16))
        """
        if self.at_least is None:
            return tuple(sorted(set(self.sizes), reverse=True))
        halves = (gpus >> power for power in range(1, gpus.bit_length()) if gpus % (1 << power) == 0)
        return tuple(half for half in halves if half >= self.at_least)


class Place(_Section):
    """The placement of its GPUs: each `unit` in one NVLink island (else one node), all `within` one domain."""

    unit: Positive | None = None
    within: Literal["island", "node", "rack", "block"] | None = None


def _keep(text: str) -> str:
    try:
        return str(parse_keep(text))
    except InputError as error:
        raise ValueError(error.message) from None


class Checkpoint(_Section):
    """The destination of checkpoints (None: none), their interval (auto: the plan's), and which ones are kept.

    `ram_s`: the interval of captures in memory between them; auto: where they save time.
    """

    to: str | None = None
    every_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    keep: Annotated[int, Field(ge=2)] | Annotated[str, AfterValidator(_keep)] = 2
    ram_s: Annotated[float, Field(gt=0)] | Literal["auto", "off"] = "auto"
    base: str | None = None  # a destination whose pinned generation is not stored again


def _times(value: Any) -> Any:
    """Read a number of retries that is a word."""
    return _RETRIES.get(value, value) if isinstance(value, str) else value


_RETRIES = {"unlimited": 1_000_000_000, "retry": 1_000_000_000, "fail": 0}
Times = Annotated[int, BeforeValidator(_times), Field(ge=0)]


class Retries(_Section):
    """Further starts of the job by the cause of an attempt's end; None: three in a row without a checkpoint end it.

    A checkpoint lets the count begin again. `exit` has exit codes of the script, apart from `script`.
    """

    infrastructure: Times | None = None
    script: Times | None = None
    exit: dict[Annotated[int, Field(ge=1, le=255)], Times] = Field(default_factory=dict)


class OnPreempt(_Section):
    """The notice that a preempted job gets, and its state afterwards; auto: by the save that a rehearsal measured."""

    grace_s: Annotated[float, Field(ge=0)] | Literal["auto"] = "auto"
    then: Literal["requeue", "stop"] = "requeue"

    @property
    def notice_s(self) -> float:
        """Return the grace period in seconds, where no rehearsal is known."""
        return GRACE_S if self.grace_s == "auto" else self.grace_s


class OnHang(_Section):
    """Seconds without progress until a rank is reported (0: never) and until all ranks start again (None: never)."""

    report_after_s: Annotated[float, Field(ge=0)] = 60.0
    restart_after_s: Annotated[float, Field(gt=0)] | None = None


class ModelSpec(_Section):
    """The model that the job trains; admission checks that it fits. `global_batch` is in sequences."""

    name: str | None = None
    config: str | None = None
    seq: Positive | None = None
    micro_batch: Positive | None = None
    global_batch: Positive | None = None
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    optimizer: str = "adamw"
    recompute: Literal["none", "selective", "full"] | None = None
    layout: str | None = None
    framework: Literal["torch", "megatron", "deepspeed", "internevo"] | None = None  # None: torch's or Megatron-LM's
    loss: Literal["fused", "chunked", "parallel", "compiled", "eager"] | None = None  # None: the framework's own
    tune: TuneSpec = TuneSpec()

    @model_validator(mode="after")
    def _names_one_model(self) -> "ModelSpec":
        if (self.name is None) == (self.config is None):
            raise ValueError("give either name (a model in the catalogue) or config (a path to config.json)")
        return self


def _listed(value: Any) -> Any:
    """Accept one text in the place of a list of one."""
    return (value,) if isinstance(value, str) else value


def _window(text: str) -> str:
    try:
        parse_window(text)
    except InputError as error:
        raise ValueError(error.message) from None
    return text


class JobSpec(_Section):
    """One job; or a service or a sweep, then each of its replicas or trials is such a job.

    `gpus` is its total (0: CPU cores and host memory only), `gpu_milli` thousandths of each, `gpu` the kind it needs
    (None: any), `mig` the profile of a MIG instance of one GPU. `run` is empty where a service's engine is none of its
    own.
    """

    run: str | tuple[str, ...] = ()
    gpus: Annotated[int, Field(ge=0)]
    gpu: str | None = None
    gpu_milli: Annotated[int, Field(ge=1, le=1000)] = 1000
    mig: Annotated[str, Field(pattern=r"^\d+g\.\d+gb(\+[a-z.]+)?$")] | None = None
    version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "job"
    launch: Launch = "auto"
    tier: Tier = "standard"
    capacity: CapacityWanted = "any"
    queue: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$")] = "default"
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$")] | None = None  # in the chargeback
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    after: Annotated[tuple[AfterText, ...], BeforeValidator(_listed)] = ()  # jobs or sweeps: `prep`, `prep:any`
    not_before_us: Annotated[int, Field(ge=0)] | None = None
    window: Annotated[str, AfterValidator(_window)] | None = None  # times of day: `22:00-06:00 Europe/Berlin`
    stop_at_end: bool = False  # of the window: it gets notice, in time to have left
    estimate_s: Annotated[float, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_bytes: Annotated[int, Field(gt=0)] | None = None
    place: Place = Place()
    elastic: Elastic = Elastic()
    limit: Limit = Limit()
    checkpoint: Checkpoint = Checkpoint()
    data: DataSpec = DataSpec()
    retries: Retries = Retries()
    on_preempt: OnPreempt = OnPreempt()
    preflight: PreflightWanted = "quick"  # before each attempt: the driver's counters; full: work on the GPUs too
    on_hang: OnHang = OnHang()
    on_spike: OnSpike | None = None  # None: as the script says, or `warn`
    track: tuple[Tracker, ...] = ()
    notify: Notify = Notify()
    model: ModelSpec | None = None
    service: ServiceSpec | None = None
    sweep: SweepSpec | None = None
    plan: str | None = None  # the file of `cordee plan --json` that `gpus` and `model` were taken from
    env: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    cwd: str | None = None  # the folder to run in; None: the one that it is submitted from
    live: bool = False  # run in that folder itself, not in a copy of it as it was at the submission
    files: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None  # digest of the tree of submitted files
    artifacts: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = ()  # versions that its nodes fetch before

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if data.get("sweep") is not None and _saves(data.get("checkpoint")) and data.get("tier") is None:
            return {**data, "tier": "preemptible"}  # a trial goes on from its checkpoint
        return filled_in(data) if data.get("service") is not None else data

    @model_validator(mode="after")
    def _check(self) -> "JobSpec":
        is_empty = not self.run or (isinstance(self.run, str) and not self.run.strip())
        if self.service is not None:
            self._check_service(self.service, is_empty)
            if self.sweep is not None:
                raise ValueError("a service has no sweep: give either service or sweep")
        elif is_empty:
            raise ValueError("run is empty: give a command")
        names = [*self.env, *self.secrets]
        for variable in names:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
                raise ValueError(f"{variable!r} cannot name an environment variable")
        twice = sorted(set(self.env) & set(self.secrets))
        if twice:
            raise ValueError(f"{twice[0]} is both in env and in secrets: a secret's value never stands in the spec")
        self._check_shape()
        if self.stop_at_end:
            self._check_window()
        if self.sweep is not None:
            self._check_sweep(self.sweep)
        return self

    def _check_window(self) -> None:
        if self.window is None:
            raise ValueError("stop_at_end needs window: 22:00-06:00")
        begin_us, end_us, _ = parse_window(self.window)
        window_s, grace_s = (end_us - begin_us) / US_PER_S % 86_400, self.on_preempt.notice_s
        if grace_s >= window_s:
            long, grace = format_duration(window_s), format_duration(grace_s)
            raise ValueError(f"stop_at_end: the window of {long} leaves no time before the grace period of {grace}")

    def _check_sweep(self, sweep: SweepSpec) -> None:
        if sweep.rungs is not None and self.checkpoint.to is None:
            raise ValueError("rungs need checkpoint.to: a rung is a checkpoint, from which a trial goes on")
        if len(self.name) > SWEEP_NAME_CHARS_MAX:
            raise ValueError(f"the name of a sweep has {SWEEP_NAME_CHARS_MAX} characters at most: {self.name}")

    def _check_service(self, service: ServiceSpec, is_empty: bool) -> None:
        if is_empty and service.engine == "command":
            raise ValueError("the engine command needs run: a command that listens on $CORDEE_PORT")
        if is_empty and service.model is None:
            raise ValueError("a service needs service.model, or run: a command that listens on $CORDEE_PORT")
        if not is_empty and service.engine not in ("auto", "command"):
            raise ValueError(f"run is given, and service.engine = {service.engine} has a command of its own")
        if not is_empty and service.models:
            raise ValueError("service.models is for engines that load models: the command of run has none to swap")
        for section, has in (
            ("elastic", self.elastic != Elastic()),
            ("model", self.model is not None),
            ("checkpoint", self.checkpoint.to is not None),
            ("after", self.after != ()),
            ("window", self.window is not None),
        ):
            if has:
                raise ValueError(f"{section} is for a job that trains: a service has service.replicas, service.model")

    def _check_without_gpus(self) -> None:
        for section, has in (
            ("elastic", self.elastic != Elastic()),
            ("model", self.model is not None),
            ("service", self.service is not None),
            ("place", self.place != Place()),
            ("gpus: 0x" + (self.gpu or ""), self.gpu is not None),
        ):
            if has:
                raise ValueError(
                    f"{section} is for a job that has GPUs, and gpus is 0: it runs on CPU cores of one node"
                )

    def _check_shape(self) -> None:
        if not self.gpus:
            self._check_without_gpus()
            return
        for size in self.elastic.sizes:
            if size >= self.gpus:
                raise ValueError(f"elastic.sizes has {size}, which is not below gpus = {self.gpus}")
        if self.elastic.at_least is not None and self.elastic.at_least >= self.gpus:
            raise ValueError(f"elastic.at_least = {self.elastic.at_least} is not below gpus = {self.gpus}")
        unit = self.place.unit or 1
        for size in (self.gpus, *self.elastic.sizes):
            if size % unit:
                raise ValueError(f"{size} GPUs are not whole units of place.unit = {unit}")
        if self.gpu_milli < 1000 and self.gpus > 1:
            raise ValueError(f"a part of a GPU goes with one GPU, not with {self.gpus}")
        if self.mig is not None and (self.gpus > 1 or self.place != Place() or self.elastic != Elastic()):
            raise ValueError(f"a MIG instance ({self.mig}) goes with one rank: without place, elastic, and more GPUs")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the smaller numbers of GPUs that it can run on, in whole units, largest first."""
        return tuple(size for size in self.elastic.below(self.gpus) if size % (self.place.unit or 1) == 0)

    @classmethod
    def from_flags(
        cls,
        *,
        run: str | Sequence[str],
        gpus: str | None,
        service: Mapping[str, Any] | None = None,
        sweep: Mapping[str, Any] | None = None,
        plan: PlannedJob | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        **flags: str | float | None,
    ) -> "JobSpec":
        """Make a job from the command line's flags: `tier="standard"`, `checkpoint_to="..."`, `limit_time="47h"`.

        None means that the flag was not given; `service` and `sweep` are the sections as people write them.

        Raises:
            SpecError: an unknown flag or value.
        """
        document: dict[str, Any] = {"run": run if isinstance(run, str) else list(run), "gpus": gpus}
        document |= {} if service is None else {"service": dict(service)}
        document |= {} if sweep is None else {"sweep": dict(sweep)}
        document |= {"env": dict(env or {}), "secrets": list(secrets)}
        for flag, value in flags.items():
            if value is None:
                continue
            section, key = _flag_place(flag)
            (document.setdefault(section, {}) if section else document)[key] = value
        return _read(document if plan is None else plan.fill(document), Where("", {}))


def parse_spec(text: str, *, source: str = "<spec>", plan_of: Callable[[str], PlannedJob] | None = None) -> JobSpec:
    """Return the job that this YAML describes.

    Args:
        text: the YAML.
        source: its file, for messages.
        plan_of: reads the plan that `plan` names; None: a plan is refused.

    Raises:
        SpecError: a mistake, with file, line and column, and the probable correction.
    """
    document, positions = load_yaml(text, source)
    where = Where(source, positions)
    if isinstance(document, dict) and document.get("plan") is not None:
        if plan_of is None:
            raise where.error(("plan",), "a plan cannot be read here", "submit with `cordee run`")
        try:
            document = plan_of(str(plain(document["plan"], ("plan",), where))).fill(document)
        except SpecError as error:
            raise where.error(("plan",), error.message, error.hint) from None
    return _read(document, where)


def _saves(checkpoint: Any) -> bool:
    """Return whether the section of a job names a destination."""
    return bool(checkpoint.get("to") if isinstance(checkpoint, Mapping) else getattr(checkpoint, "to", None))


def _every(text: str) -> float | str:
    return "auto" if text == "auto" else parse_duration_s(text)


def _ram(text: str) -> float | str:
    return "off" if text == "off" else _every(text)


# Keys of the YAML whose value carries a unit: the field in base units, and its reader. The top is section None.
_UNITS: dict[tuple[str | None, str], tuple[str, Callable[[str], Any]]] = {
    (None, "not_before"): ("not_before_us", parse_time_us),
    (None, "estimate"): ("estimate_s", parse_duration_s),
    (None, "memory"): ("memory_bytes", parse_bytes),
    ("elastic", "grow_after"): ("grow_after_s", parse_duration_s),
    ("limit", "time"): ("time_s", parse_duration_s),
    ("limit", "cost"): ("cost_micro_usd", parse_micro_usd),
    ("checkpoint", "every"): ("every_s", _every),
    ("checkpoint", "ram"): ("ram_s", _ram),
    ("data", "wait"): ("wait_s", parse_wait),
    ("on_preempt", "grace"): ("grace_s", _every),
    ("on_hang", "report_after"): ("report_after_s", parse_duration_s),
    ("on_hang", "restart_after"): ("restart_after_s", parse_duration_s),
}
_SECTIONS: dict[str, type[BaseModel]] = {
    "place": Place,
    "elastic": Elastic,
    "limit": Limit,
    "checkpoint": Checkpoint,
    "data": DataSpec,
    "retries": Retries,
    "on_preempt": OnPreempt,
    "on_hang": OnHang,
    "notify": Notify,
    "model": ModelSpec,
    "service": ServiceSpec,
    "sweep": SweepSpec,
}
_WRITTEN_AS = {field: key for (_, key), (field, _) in _UNITS.items()} | SERVICE_WRITTEN_AS
# `gpus: 64xH100`, `gpus: 0.5` and `gpus: 1g.10gb` say the first three; the capture the fourth; the server the last.
_NOT_WRITTEN = ("gpu", "gpu_milli", "mig", "files", "artifacts")


def wanted_gpus(text: str | int | float) -> dict[str, Any]:
    """Return the fields of a job that its `gpus` says: number, thousandths of each, kind, and MIG profile.

    >>> wanted_gpus("H100:1g.10gb")
    {'gpus': 1, 'gpu_milli': 1000, 'gpu': 'H100', 'mig': '1g.10gb'}

    Raises:
        SpecError: not such a text.
    """
    instance = parse_mig(text)
    if instance is not None:
        return {"gpus": 1, "gpu_milli": 1000, "gpu": instance[1], "mig": instance[0]}
    gpus, gpu_milli, gpu = parse_wanted(text)
    return {"gpus": gpus, "gpu_milli": gpu_milli, "gpu": gpu, "mig": None}


def _keys(section: str | None) -> list[str]:
    """Return the keys that people may write in a section (None: at the top)."""
    fields = JobSpec.model_fields if section is None else _SECTIONS[section].model_fields
    return [_WRITTEN_AS.get(field, field) for field in fields if section is not None or field not in _NOT_WRITTEN]


def _flag_place(flag: str) -> tuple[str | None, str]:
    """Return the section and key of a flag of the command line."""
    flag = {"grace": "on_preempt_grace", "model": "model_name"}.get(flag, flag)
    for section in _SECTIONS:
        if flag.startswith(f"{section}_") and flag.removeprefix(f"{section}_") in _keys(section):
            return section, flag.removeprefix(f"{section}_")
    return None, flag


def _read(document: Any, where: Where) -> JobSpec:
    if not isinstance(document, dict):
        raise where.error((), "a job is a mapping of keys to values", "the shortest is: run: python train.py, gpus: 4")
    check_keys(document, _keys(None), (), where)
    for key in ("run", "gpus"):
        if document.get(key) is None and not (key == "run" and document.get("service") is not None):
            raise where.error(
                (), f"the job has no {key}", "only run and gpus are required: run: python train.py, gpus: 4"
            )
    if document.get("data") is not None:
        document = {**document, "data": in_full(document["data"])}
    if isinstance(document.get("retries"), str):
        document = {**document, "retries": _retries(document["retries"], where)}
    values = dict(document)
    try:
        values |= wanted_gpus(plain(document["gpus"], ("gpus",), where))
    except SpecError as error:
        raise where.error(("gpus",), error.message, error.hint) from None
    values |= _in_base_units({key: document[key] for key in document if (None, key) in _UNITS}, None, where)
    values["env"] = {str(name): _text(value, name, where) for name, value in mapping(document, "env", where).items()}
    for section in _SECTIONS:
        if section in document:
            values[section] = _read_section(section, mapping(document, section, where), where)
    values = {key: value for key, value in values.items() if value is not None and (None, key) not in _UNITS}
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:
        raise _said(error, where) from None


def _retries(text: str, where: Where) -> dict[str, Any]:
    """Read the short form: `infrastructure=10, script=0, 17=2`."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        cause, equals, most = (word.strip() for word in part.partition("="))
        if not (
            equals and (most.isdecimal() or most in _RETRIES) and (cause.isdecimal() or cause in Retries.model_fields)
        ):
            hint = "write retries: infrastructure=unlimited, script=0, 17=2 (the last one is an exit code)"
            raise where.error(("retries",), f"retries: {part.strip()!r} cannot be read", hint)
        if cause.isdecimal():
            found.setdefault("exit", {})[int(cause)] = most
        else:
            found[cause] = most
    return found


def _read_section(section: str, written: dict[str, Any], where: Where) -> dict[str, Any]:
    check_keys(written, _keys(section), (section,), where)
    if section == "model":
        tune = mapping(written, "tune", where, (section,))
        check_keys(tune, [field.name for field in fields(TuneSpec)], (section, "tune"), where)
    if section == "service":
        return read_service(written, where)
    if section == "sweep":
        return read_sweep(written, where)
    return _in_base_units(written, section, where)


def _in_base_units(written: dict[str, Any], section: str | None, where: Where) -> dict[str, Any]:
    values = {}
    for key, value in written.items():
        field, read = _UNITS.get((section, key), (key, None))
        path = (key,) if section is None else (section, key)
        if value is not None:
            values[field] = value if read is None else quantity(read, value, path, where)
    return values


def _text(value: Any, name: Any, where: Where) -> str:
    """Return an environment variable's value; YAML reads 1e3, yes and 1.10 as other types, so they need quotes."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise where.error(("env", name), f"env.{name} is not a text", f'put it in quotes: {name}: "..."')
    return str(value)


def _said(error: ValidationError, where: Where) -> SpecError:
    first = error.errors()[0]
    if first["loc"] == ("tier",) and first["input"] in ("spot", "on-demand"):
        hint = f"that is what the cloud sells: write capacity: {first['input']}; a tier is {', '.join(get_args(Tier))}"
        return where.error(("tier",), f"unknown tier {first['input']!r}", hint)
    return explained(error, (), where, written_as=_WRITTEN_AS, hints=_HINTS)


_HINTS = {
    "name": "use lower-case letters, digits and dashes, 40 at most",
    "project": "use letters, digits, dots, dashes and slashes",
    "queue": "use letters, digits, dots, dashes and slashes",
    "run": "write a command (run: python train.py) or a list of words (run: [python, train.py])",
    "secrets": "write a list of names: secrets: [HF_TOKEN]",
    "elastic.sizes": "write a list of sizes: sizes: [48, 32]",
    "after": "write jobs or sweeps, and how they have to end: after: [prep, data-x7f2qk:any, train:failed]",
    "retries.exit": "write exit codes and numbers: exit: {17: 2}",
    "checkpoint.keep": "two generations at least are kept, so that one may be damaged",
}
