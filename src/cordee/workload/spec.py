"""A job's specification: the YAML that people write, and the validated value in base units that the rest uses.

Quantities are read with their units (`limit.time: 47h` becomes `limit.time_s`); a bare number is refused.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cordee.errors import SpecError, UnitError
from cordee.units import parse_bytes, parse_duration_s, parse_micro_usd
from cordee.workload.gpus import parse_wanted

Launch = Literal["auto", "rank", "node"]
Tier = Literal["production", "standard", "preemptible"]
CapacityWanted = Literal["any", "on-demand", "spot"]
Positive = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Limit(_Section):
    """When to stop the job whatever it does; None is no limit."""

    time_s: Annotated[float, Field(gt=0)] | None = None
    cost_micro_usd: Annotated[int, Field(gt=0)] | None = None
    preemptions: Annotated[int, Field(ge=0)] | None = None  # it is not pushed any more after so many


class Elastic(_Section):
    """On how few GPUs it can run as well: the halves of `gpus` down to `at_least`, or just these sizes."""

    at_least: Positive | None = None
    sizes: tuple[Positive, ...] = ()

    @model_validator(mode="after")
    def _says_it_once(self) -> "Elastic":
        if self.at_least is not None and self.sizes:
            raise ValueError("give either at_least (then the halves of gpus down to it) or sizes")
        return self

    def below(self, gpus: int) -> tuple[int, ...]:
        """The smaller sizes, largest first.

        >>> Elastic(at_least=10).below(64), Elastic(sizes=(16, 48)).below(64)
        ((32, 16), (48, 16))
        """
        if self.at_least is None:
            return tuple(sorted(set(self.sizes), reverse=True))
        halves = (gpus >> power for power in range(1, gpus.bit_length()) if gpus % (1 << power) == 0)
        return tuple(half for half in halves if half >= self.at_least)


class Place(_Section):
    """The shape of its GPUs: `unit` of them in one NVLink island (else one node); all of them `within` one domain."""

    unit: Positive | None = None
    within: Literal["island", "node", "rack", "block"] | None = None


class Checkpoint(_Section):
    """Where checkpoints go (None: nowhere), how often (auto: the plan's period), and how many are kept."""

    to: str | None = None
    every_s: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"
    keep: Annotated[int, Field(ge=2)] = 2


class OnPreempt(_Section):
    """The notice that the job gets, and what becomes of it."""

    grace_s: Annotated[float, Field(ge=0)] = 30.0
    then: Literal["requeue", "stop"] = "requeue"


class ModelSpec(_Section):
    """What is trained, where the job says so: then admission knows whether it fits. `global_batch` is in sequences."""

    name: str | None = None
    config: str | None = None
    seq: Positive | None = None
    micro_batch: Positive | None = None
    global_batch: Positive | None = None
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    optimizer: str = "adamw"
    recompute: Literal["none", "selective", "full"] | None = None
    layout: str | None = None

    @model_validator(mode="after")
    def _names_one_model(self) -> "ModelSpec":
        if (self.name is None) == (self.config is None):
            raise ValueError("give either name (a model in the catalogue) or config (a path to config.json)")
        return self


class JobSpec(_Section):
    """One job. `gpus` is its total, `gpu_milli` the part of each; `gpu` the kind it needs, None for any."""

    run: str | tuple[str, ...]
    gpus: Positive
    gpu: str | None = None
    gpu_milli: Annotated[int, Field(ge=1, le=1000)] = 1000
    version: Literal[1] = 1
    name: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "job"
    launch: Launch = "auto"
    tier: Tier = "standard"
    capacity: CapacityWanted = "any"
    queue: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$")] = "default"
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    estimate_s: Annotated[float, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_bytes: Annotated[int, Field(gt=0)] | None = None
    place: Place = Place()
    elastic: Elastic = Elastic()
    limit: Limit = Limit()
    checkpoint: Checkpoint = Checkpoint()
    on_preempt: OnPreempt = OnPreempt()
    model: ModelSpec | None = None
    env: dict[str, str] = Field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    cwd: str | None = None  # the folder to run in; None is the one it is submitted from

    @model_validator(mode="after")
    def _check(self) -> "JobSpec":
        if not self.run or (isinstance(self.run, str) and not self.run.strip()):
            raise ValueError("run is empty: give a command")
        names = [*self.env, *self.secrets]
        for variable in names:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", variable):
                raise ValueError(f"{variable!r} cannot name an environment variable")
        twice = sorted(set(self.env) & set(self.secrets))
        if twice:
            raise ValueError(f"{twice[0]} is both in env and in secrets: a secret's value never stands in the spec")
        self._check_shape()
        return self

    def _check_shape(self) -> None:
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

    @property
    def sizes(self) -> tuple[int, ...]:
        """Fewer GPUs that it can run on, in whole units, largest first."""
        return tuple(size for size in self.elastic.below(self.gpus) if size % (self.place.unit or 1) == 0)

    @classmethod
    def from_flags(
        cls,
        *,
        run: str | Sequence[str],
        gpus: str,
        env: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        **flags: str | int | None,
    ) -> "JobSpec":
        """A job from the command line's flags: `tier="standard"`, `checkpoint_to="..."`, `limit_time="47h"`.

        None means that the flag was not given.

        Raises:
            SpecError: an unknown flag or value.
        """
        document: dict[str, Any] = {"run": run if isinstance(run, str) else list(run), "gpus": gpus}
        document |= {"env": dict(env or {}), "secrets": list(secrets)}
        for flag, value in flags.items():
            if value is None:
                continue
            section, key = _flag_place(flag)
            (document.setdefault(section, {}) if section else document)[key] = value
        return _read(document, _Where("flags", {}))


def parse_spec(text: str, *, source: str = "<spec>") -> JobSpec:
    """The job that this YAML describes.

    Raises:
        SpecError: what is wrong, with file, line and column, and what was probably meant.
    """
    document, positions = _load_yaml(text, source)
    return _read(document, _Where(source, positions))


Path = tuple[str | int, ...]


@dataclass(frozen=True)
class _Where:
    """Where each key stands in the text, from 1, so that an error can point at it."""

    source: str
    positions: Mapping[Path, tuple[int, int]]

    def error(self, path: Path, message: str, hint: str | None = None) -> SpecError:
        known = next((self.positions[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.positions), None)
        place = f"{self.source}:{known[0]}:{known[1]}" if known else self.source
        return SpecError(f"{place}: {message}", hint=hint)


def _every(text: str) -> float | str:
    return "auto" if text == "auto" else parse_duration_s(text)


# Keys of the YAML whose value carries a unit: the field in base units, and its reader. The top is section None.
_UNITS: dict[tuple[str | None, str], tuple[str, Callable[[str], Any]]] = {
    (None, "estimate"): ("estimate_s", parse_duration_s),
    (None, "memory"): ("memory_bytes", parse_bytes),
    ("limit", "time"): ("time_s", parse_duration_s),
    ("limit", "cost"): ("cost_micro_usd", parse_micro_usd),
    ("checkpoint", "every"): ("every_s", _every),
    ("on_preempt", "grace"): ("grace_s", parse_duration_s),
}
_SECTIONS: dict[str, type[_Section]] = {
    "place": Place,
    "elastic": Elastic,
    "limit": Limit,
    "checkpoint": Checkpoint,
    "on_preempt": OnPreempt,
    "model": ModelSpec,
}
_WRITTEN_AS = {field: key for (_, key), (field, _) in _UNITS.items()}
_IN_GPUS = ("gpu", "gpu_milli")  # `gpus: 64xH100` and `gpus: 0.5` say these


def _keys(section: str | None) -> list[str]:
    """The keys that people may write in a section (None: at the top)."""
    fields = JobSpec.model_fields if section is None else _SECTIONS[section].model_fields
    return [_WRITTEN_AS.get(field, field) for field in fields if section is not None or field not in _IN_GPUS]


def _flag_place(flag: str) -> tuple[str | None, str]:
    """Which section and key a flag of the command line belongs to."""
    flag = {"grace": "on_preempt_grace", "model": "model_name"}.get(flag, flag)
    for section in _SECTIONS:
        if flag.startswith(f"{section}_") and flag.removeprefix(f"{section}_") in _keys(section):
            return section, flag.removeprefix(f"{section}_")
    return None, flag


def _read(document: Any, where: _Where) -> JobSpec:
    if not isinstance(document, dict):
        raise where.error((), "a job is a mapping of keys to values", "the shortest is: run: python train.py, gpus: 4")
    _check_keys(document, None, where)
    for key in ("run", "gpus"):
        if document.get(key) is None:
            raise where.error(
                (), f"the job has no {key}", "only run and gpus are required: run: python train.py, gpus: 4"
            )
    values = dict(document)
    try:
        wanted = parse_wanted(_plain(document["gpus"], ("gpus",), where))
    except SpecError as error:
        raise where.error(("gpus",), error.message, error.hint) from None
    values["gpus"], values["gpu_milli"], values["gpu"] = wanted
    values |= _in_base_units({key: document[key] for key in document if (None, key) in _UNITS}, None, where)
    values["env"] = {str(name): _text(value, name, where) for name, value in _mapping(document, "env", where).items()}
    for section in _SECTIONS:
        if section in document:
            values[section] = _read_section(section, _mapping(document, section, where), where)
    values = {key: value for key, value in values.items() if value is not None and (None, key) not in _UNITS}
    try:
        return JobSpec.model_validate(values)
    except ValidationError as error:
        raise _explained(error, document, where) from None


def _read_section(section: str, written: dict[str, Any], where: _Where) -> dict[str, Any]:
    _check_keys(written, section, where)
    return _in_base_units(written, section, where)


def _in_base_units(written: dict[str, Any], section: str | None, where: _Where) -> dict[str, Any]:
    values = {}
    for key, value in written.items():
        field, read = _UNITS.get((section, key), (key, None))
        path = (key,) if section is None else (section, key)
        if value is not None:
            values[field] = value if read is None else _quantity(read, value, path, where)
    return values


def _quantity(read: Callable[[str], Any], value: Any, path: Path, where: _Where) -> Any:
    try:
        return read(str(_plain(value, path, where)))
    except UnitError as error:
        raise where.error(path, f"{'.'.join(map(str, path))}: {error.message}", error.hint) from None


def _mapping(document: dict[str, Any], key: str, where: _Where) -> dict[str, Any]:
    value = document.get(key) or {}
    if not isinstance(value, dict):
        raise where.error((key,), f"{key} must be a mapping, not {value!r}", f"write its keys indented below {key}:")
    return value


def _check_keys(written: dict[str, Any], section: str | None, where: _Where) -> None:
    known = _keys(section)
    for key in written:
        if key in known:
            continue
        path = (key,) if section is None else (section, key)
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        place = f" in {section}" if section else ""
        raise where.error(path, f"unknown key {key!r}{place}", hint + "known are " + ", ".join(known))


def _plain(value: Any, path: Path, where: _Where) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise where.error(path, f"{'.'.join(map(str, path))} cannot be {value!r}")
    return value


def _text(value: Any, name: Any, where: _Where) -> str:
    """An environment variable's value: YAML would turn 1e3, yes or 1.10 into something else, so those need quotes."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise where.error(("env", name), f"env.{name} is not a text", f'put it in quotes: {name}: "..."')
    return str(value)


def _explained(error: ValidationError, document: dict[str, Any], where: _Where) -> SpecError:
    """Pydantic's first complaint in our words, at its place in the text."""
    first = error.errors()[0]
    path = tuple(_WRITTEN_AS.get(str(part), part) for part in first["loc"] if not _is_branch(part))
    name = ".".join(map(str, path))
    context = first.get("ctx", {})
    if first["type"] == "value_error":
        return where.error(path, str(context["error"]))
    if first["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", context["expected"]) or [context["expected"]]
        near = difflib.get_close_matches(str(first["input"]), allowed, n=1, cutoff=0.5)
        hint = (f"did you mean {near[0]}? " if near else "") + f"use {', '.join(allowed)}"
        if name == "tier" and first["input"] in ("spot", "on-demand"):
            hint = f"that is what the cloud sells: write capacity: {first['input']}; a tier is {', '.join(allowed)}"
        return where.error(path, f"unknown {name} {first['input']!r}", hint)
    advice = _HINTS.get(name) or _LIMIT_HINTS.get(first["type"], "").format(**context) or None
    return where.error(path, f"{name} = {first['input']!r}: {first['msg'].lower().replace('tuple', 'list')}", advice)


_HINTS = {
    "name": "use lower-case letters, digits and dashes, 40 at most",
    "queue": "use letters, digits, dots, dashes and slashes",
    "run": "write a command (run: python train.py) or a list of words (run: [python, train.py])",
    "secrets": "write a list of names: secrets: [HF_TOKEN]",
    "elastic.sizes": "write a list of sizes: sizes: [48, 32]",
    "checkpoint.keep": "two generations at least are kept, so that one may be damaged",
}

_LIMIT_HINTS = {
    "greater_than": "use more than {gt}",
    "greater_than_equal": "use {ge} or more",
    "less_than_equal": "use {le} or less",
    "int_parsing": "write a whole number",
    "int_from_float": "write a whole number",
}


def _is_branch(part: str | int) -> bool:
    """Pydantic names the branch of a union in its path; people did not write that."""
    return isinstance(part, str) and bool(re.search(r"[\[\]()]|^(str|float|int|tuple|constrained)", part))


def _load_yaml(text: str, source: str) -> tuple[Any, dict[Path, tuple[int, int]]]:
    """The document as plain values, and where its keys stand."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    positions: dict[Path, tuple[int, int]] = {}
    try:
        return _strip(YAML(typ="rt").load(text), (), positions), positions
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        hint = "give each key once" if "duplicate" in str(error.problem) else "check indentation and quotes there"
        raise SpecError(f"{place}: not valid YAML: {_first_line(error.problem)}", hint=hint) from None
    except YAMLError as error:
        raise SpecError(f"{source}: not valid YAML: {_first_line(str(error))}", hint="use plain text") from None
    except RecursionError:
        raise SpecError(f"{source}: the YAML is nested too deeply", hint="a job needs three levels at most") from None


def _first_line(text: str | None) -> str:
    return (text or "unreadable").strip().splitlines()[0]


def _strip(node: Any, path: Path, positions: dict[Path, tuple[int, int]]) -> Any:
    """Ruamel's tree as plain values, noting each key's line and column."""
    if isinstance(node, dict):
        plain = {}
        for key, value in node.items():
            if key in (node.lc.data or {}):  # type: ignore[attr-defined]  # A merged key stands elsewhere.
                line, column = node.lc.key(key)  # type: ignore[attr-defined]
                positions[(*path, key)] = (line + 1, column + 1)
            plain[key] = _strip(value, (*path, key), positions)
        return plain
    if isinstance(node, list):
        for index in range(len(node)):
            line, column = node.lc.item(index)  # type: ignore[attr-defined]
            positions[(*path, index)] = (line + 1, column + 1)
        return [_strip(value, (*path, index), positions) for index, value in enumerate(node)]
    if isinstance(node, bool) or node is None:
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return getattr(node, "value", node)  # A scalar with a tag: its text, never an object.
