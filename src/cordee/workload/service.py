"""The section `service` of a job file, which makes a job listen, and the settings of each of its replicas.

A number that people write has its unit: `slo: {ttft: 500ms}` becomes `slo.ttft_s`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordee.errors import UnitError
from cordee.units import parse_duration_s, parse_latency_s, parse_micro_usd_per_hour
from cordee.workload.written import Where, check_keys, mapping, plain, quantity

EngineKind = Literal["llama.cpp", "vllm", "transformers", "command"]
EngineName = Literal["auto", "llama.cpp", "vllm", "transformers", "command"]
REPLICAS_MAX = 10_000
WHOLE_MILLI = 1000
"""Thousandths of a whole GPU."""

CONFIG_CHARS_MAX = 1 << 18
"""The longest config.json that is kept with a service."""

FROM_JOB = "job:"
"""The prefix of a model that is a training job's newest verified checkpoint."""

FROM_ARTIFACT = "artifact:"
"""The prefix of a model that is a version of an artifact."""

SETTINGS_ENV = "CORDEE_REPLICA"
"""The environment variable in which a replica finds its `ReplicaSettings` as JSON."""

Flag = bool | int | float | str


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Replicas(_Part):
    """The fewest and the most replicas; `min` 0: none while there are no requests."""

    min: Annotated[int, Field(ge=0, le=REPLICAS_MAX)] = 1
    max: Annotated[int, Field(ge=1, le=REPLICAS_MAX)] = 1

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"replicas: the fewest, {self.min}, are more than the most, {self.max}")
        return self

    def __str__(self) -> str:
        return str(self.min) if self.min == self.max else f"{self.min}..{self.max}"


class Slo(_Part):
    """The latencies that 99 of 100 requests must meet; None: any."""

    ttft_s: Annotated[float, Field(gt=0)] | None = None
    tpot_s: Annotated[float, Field(gt=0)] | None = None


class ArtifactVersion(_Part):
    """The version of an artifact that the replicas of a revision serve.

    Attributes:
        ref: NAME:VERSION.
        digest: of its manifest.
        config: its config.json, by which it is planned; "": it has none.
        file: its file, if it has only one.
    """

    ref: Annotated[str, Field(min_length=1, max_length=400)]
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    config: Annotated[str, Field(max_length=CONFIG_CHARS_MAX)] = ""
    file: Annotated[str, Field(max_length=1000)] = ""


class ServiceSpec(_Part):
    """A service: its model, its engine and its replicas.

    Attributes:
        model: a folder, a name of the catalogue or a registry, `job:NAME`, `artifact:REF`, or a .gguf file; None: the
            command knows.
        like: a folder with config and tokenizer for the weights of `job:NAME`; None: they are with the job or its
            checkpoint.
        engine: the server inside a replica; auto: `command` where the job has `run`, llama.cpp for a .gguf file and on
            CPU slots, else vLLM.
        replicas: the fewest and the most.
        standby: ready replicas beyond those wanted, which take over at once.
        slo: the latencies to meet.
        window_s: fewer replicas only when no moment of this time wanted more.
        idle_s: time without a request after which a service whose fewest are 0 has none.
        max_micro_usd_per_hour: price of all replicas at which the service adds no more; None: any.
        context: tokens of the longest prompt with its answer; None: the engine's own.
        drain_s: seconds that a replica has for its open requests before it leaves.
        health: the path that the engine `command` answers with 200 when it is ready.
        flags: settings of the engine, over those of the plan.
        models: further models that the replicas may hold, one at a time.
        steps: by model that is `job:NAME`, its newest checkpoint when the service was declared, which all replicas of
            a revision serve; without one there was none yet.
        versions: by model that is `artifact:REF`, the version that REF named when the service was declared.
    """

    model: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    like: Annotated[str, Field(min_length=1, max_length=1000)] | None = None
    engine: EngineName = "auto"
    replicas: Replicas = Replicas()
    standby: Annotated[int, Field(ge=0, le=100)] = 0
    slo: Slo = Slo()
    window_s: Annotated[float, Field(gt=0)] = 300.0
    idle_s: Annotated[float, Field(gt=0)] = 300.0
    max_micro_usd_per_hour: Annotated[int, Field(gt=0)] | None = None
    context: Annotated[int, Field(ge=1)] | None = None
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    health: Annotated[str, Field(pattern=r"^/[!-~]*$")] = "/health"
    flags: dict[str, Flag] = Field(default_factory=dict)
    models: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = ()
    steps: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    versions: dict[str, ArtifactVersion] = Field(default_factory=dict)

    @property
    def all_models(self) -> tuple[str, ...]:
        """Return the models among which replicas swap, the first one first; of a service of one model none."""
        return (self.model, *self.models) if self.model is not None and self.models else ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model is None and self.engine not in ("auto", "command"):
            raise ValueError(f"the engine {self.engine} needs a model: a folder, a name, a .gguf file or job:NAME")
        if self.models and (self.model is None or self.engine == "command"):
            raise ValueError("service.models are models beside service.model, which a command does not have")
        twice = next((each for each in self.models if (self.model, *self.models).count(each) > 1), None)
        if twice is not None:
            raise ValueError(f"service.models names {twice} twice, or it is service.model")
        if self.like is not None and not self.trained_by:
            raise ValueError(f"service.like goes with a model that a job trains, job:NAME, not with {self.model}")
        if unknown := self.steps.keys() - self.trained_by:
            raise ValueError(f"service.steps names {min(unknown)}, which is no job:NAME among its models")
        if unknown := self.versions.keys() - self.artifacts:
            raise ValueError(f"service.versions names {min(unknown)}, which is no artifact:REF among its models")
        return self

    @property
    def trained_by(self) -> dict[str, str]:
        """Return by model the training job whose checkpoint it is; without the models that are something else."""
        return self._named_by(FROM_JOB)

    @property
    def artifacts(self) -> dict[str, str]:
        """Return by model the reference of the artifact that it is; without the models that are something else."""
        return self._named_by(FROM_ARTIFACT)

    def _named_by(self, prefix: str) -> dict[str, str]:
        named = filter(None, (self.model, *self.models))
        return {each: each.removeprefix(prefix) for each in named if each.startswith(prefix)}


class TrainedModel(_Part):
    """The weights that a training job writes.

    Attributes:
        checkpoint: the job's destination.
        step: of the checkpoint to serve; None: the newest.
        like: a folder with config and tokenizer; None: the checkpoint or the replica's folder has them.
    """

    checkpoint: str
    step: int | None = None
    like: str | None = None


class ArtifactModel(ArtifactVersion):
    """A version of an artifact as a replica reads it.

    Attributes:
        store: the destination of its chunks, where the node has not fetched them (`launcher.ARTIFACTS_ENV`).
    """

    store: str


class ReplicaSettings(_Part):
    """The settings with which a replica starts its engine, from its environment.

    Attributes:
        service: the service's name, by which requests name its model as well.
        revision: that of the declaration.
        engine: never `auto`.
        models: further models; the replica then holds the one that it is ordered to hold.
        trained: where the weights of those are that are `job:NAME`.
        artifacts: the versions of those that are `artifact:REF`.
        run: the command of the engine `command`, which listens on $CORDEE_PORT.
        port: the port of the engine; 0: a free one.
        others: as in `ServiceSpec`.
    """

    service: str
    revision: int
    engine: EngineKind
    model: str | None = None
    models: tuple[str, ...] = ()
    trained: dict[str, TrainedModel] = Field(default_factory=dict)
    artifacts: dict[str, ArtifactModel] = Field(default_factory=dict)
    run: str | tuple[str, ...] = ()
    port: int = 0
    context: int | None = None
    slo: Slo = Slo()
    drain_s: float = 30.0
    health: str = "/health"
    flags: dict[str, Flag] = Field(default_factory=dict)

    def holding(self, model: str) -> "ReplicaSettings":
        """Return the settings with which one of the models is served."""
        return self.model_copy(update={"model": model})


def flag_name(name: str) -> str:
    """Return the name of an engine's setting as its command has it, however a job file writes it.

    >>> flag_name("max_num_seqs"), flag_name("--parallel"), flag_name("-np")
    ('--max-num-seqs', '--parallel', '-np')
    """
    return name if name.startswith("-") else f"--{name.replace('_', '-')}"


def parse_replicas(text: str | int) -> Replicas:
    """Return the replicas of `2` or `1..4`.

    >>> str(parse_replicas("1..4")), parse_replicas(2)
    ('1..4', Replicas(min=2, max=2))

    Raises:
        UnitError: not such a text, or the fewest are more than the most.
    """
    found = re.fullmatch(r"(\d{1,6})(?:\s*\.\.\s*(\d{1,6}))?", str(text).strip())
    if found is None:
        raise UnitError(f"{text!r} is not a number of replicas", hint="write 2, or the fewest and the most: 1..4")
    fewest, most = int(found[1]), int(found[2] or found[1])
    if fewest > most:
        raise UnitError(f"{text!r}: the fewest are more than the most", hint=f"write {most}..{fewest}")
    if not 1 <= most <= REPLICAS_MAX:
        hint = "scale to zero with 0..1, or end it: cordee serve stop NAME" if most == 0 else f"write {REPLICAS_MAX:,}"
        raise UnitError(f"{text!r}: the most must be 1 to {REPLICAS_MAX:,}", hint=hint)
    return Replicas(min=fewest, max=most)


def filled_in(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a job with the defaults of a service: production, one process a node, grace = drain."""
    service = data["service"]
    drain_s = service.drain_s if isinstance(service, ServiceSpec) else service.get("drain_s", 30.0)
    filled = {"tier": "production", "launch": "node"} | {
        name: value for name, value in data.items() if value is not None
    }
    filled["on_hang"] = {"report_after_s": 5.0, "restart_after_s": 60.0} | _plain_section(data.get("on_hang"))
    filled["on_preempt"] = {"grace_s": drain_s} | _plain_section(data.get("on_preempt"))
    return filled


def _plain_section(section: Any) -> dict[str, Any]:
    if isinstance(section, BaseModel):
        return section.model_dump()
    return dict(section) if isinstance(section, Mapping) else {}


_UNITS: dict[str, tuple[str, Callable[[str], float]]] = {
    **{key: (f"{key}_s", parse_duration_s) for key in ("drain", "window", "idle")},
    "max_price": ("max_micro_usd_per_hour", parse_micro_usd_per_hour),
}
"""Keys with a unit: the field of each, and how its text is read."""

_LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s"}
WRITTEN_AS = {field: key for key, (field, _) in _UNITS.items()} | {field: key for key, field in _LATENCIES.items()}
"""The key that people write for each field with a unit."""


def read_service(written: dict[str, Any], where: Where) -> dict[str, Any]:
    """Return the fields of the section that people wrote, whose keys are known.

    Raises:
        SpecError: a quantity without its unit, or an unknown key below one of its keys.
    """
    values = {name: value for name, value in written.items() if name not in _UNITS and value is not None}
    for key, (field, read) in _UNITS.items():
        if written.get(key) is not None:
            values[field] = quantity(read, written[key], ("service", key), where)
    if "replicas" in values:
        values["replicas"] = quantity(parse_replicas, values["replicas"], ("service", "replicas"), where)
    slo = mapping(written, "slo", where)
    check_keys(slo, tuple(_LATENCIES), ("service", "slo"), where)
    if slo:
        values["slo"] = {
            _LATENCIES[key]: quantity(parse_latency_s, value, ("service", "slo", key), where)
            for key, value in slo.items()
        }
    flags = mapping(written, "flags", where)
    for name, value in flags.items():
        if not isinstance(value, bool):
            plain(value, ("service", "flags", name), where)
    return values | {"flags": {str(name): value for name, value in flags.items()}}
