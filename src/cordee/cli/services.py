"""The verbs of services that run: run, list, show, scale, update, stop."""

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cordee.answers.services import ServiceView
from cordee.cli import terminal
from cordee.cli.capture import capture_job
from cordee.cli.job_file import job_from_file, pairs
from cordee.cli.services_text import print_list, print_service, print_urls, progress_line
from cordee.cli.terminal import Home, Json
from cordee.client import Client
from cordee.errors import InputError, SpecError
from cordee.servers import is_remote
from cordee.workload.launcher import SEARCH_PATHS
from cordee.workload.service import FROM_ARTIFACT, FROM_JOB, WRITTEN_AS
from cordee.workload.spec import JobSpec

_LOOK_S, _GATEWAY_S = 0.2, 20.0

What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL | FILE.yaml | -- COMMAND",
        help="A model: folder, .gguf file, name or artifact:REF; a job file with a section `service`; "
        "or a command that listens on $CORDEE_PORT.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the service.", show_default=False)]
NameOption = Annotated[
    str | None, typer.Option("--name", help="Name of the service.", show_default="the model's, else service")
]
FromJob = Annotated[
    str | None, typer.Option(help="Serve what this job trains: its newest verified checkpoint.", metavar="JOB")
]
Also = Annotated[
    list[str] | None,
    typer.Option("--also", metavar="MODEL", help="A further model; each replica holds one at a time. Repeatable."),
]
Like = Annotated[
    str | None,
    typer.Option(help="With --from-job: a folder with the model's config and tokenizer.", metavar="FOLDER",
                 show_default="the job's model.config, this folder, or what its checkpoint holds"),
]  # fmt: skip
Engine = Annotated[
    str | None,
    typer.Option(help="vllm, transformers, llama.cpp or command.", show_default="by the model and the nodes"),
]
ReplicaRange = Annotated[
    str | None,
    typer.Option("--replicas", help="2, or the fewest and the most: 1..4; 0..4: none without requests.",
                 show_default="1"),
]  # fmt: skip
Gpus = Annotated[str | None, typer.Option(help="GPUs of one replica: 1, 2xH100, 0.5, 1g.10gb.", show_default="1")]
Ttft = Annotated[str | None, typer.Option(help="Limit of the time to first token: 500ms.", show_default="any")]
Tpot = Annotated[str | None, typer.Option(help="Limit of the time per output token: 50ms.", show_default="any")]
Context = Annotated[
    int | None, typer.Option(help="Tokens of the longest prompt with its answer.", show_default="the engine's")
]
Drain = Annotated[str | None, typer.Option(help="Time for open requests before a replica leaves.", show_default="30s")]
Standby = Annotated[int | None, typer.Option(help="Ready replicas in reserve.", show_default="0")]
Idle = Annotated[
    str | None,
    typer.Option(help="With 0..N replicas: time without requests after which none is kept.", show_default="5m"),
]
MaxPrice = Annotated[
    str | None,
    typer.Option(help="Limit of the price of all replicas; no more are added beyond it: '$12/h'.", show_default="any"),
]
Health = Annotated[
    str | None, typer.Option(help="For a command: the path that answers 200 when it is ready.", show_default="/health")
]
Flags = Annotated[list[str] | None, typer.Option("--flag", help="NAME=VALUE, a setting of the engine by its own name.")]
Tier = Annotated[str | None, typer.Option(help="production, standard or preemptible.", show_default="production")]
Queue = Annotated[str | None, typer.Option(help="The queue.", show_default="default")]
Env = Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the replicas.")]
Secret = Annotated[list[str] | None, typer.Option(help="NAME of an environment variable to pass as a secret.")]
Ship = Annotated[
    bool | None,
    typer.Option("--ship/--live", help="Serve a copy of this folder's files, or the folder itself.",
                 show_default="--ship if it has a run, or the server is on another machine"),
]  # fmt: skip
Slots = Annotated[str | None, typer.Option(help="Number of CPU slots, if a server has to be started.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Show the progress until the service is ready.")]


def run(
    what: What = None,
    *,
    name: NameOption = None,
    from_job: FromJob = None,
    also: Also = None,
    like: Like = None,
    engine: Engine = None,
    replicas: ReplicaRange = None,
    gpus: Gpus = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    context: Context = None,
    drain: Drain = None,
    standby: Standby = None,
    idle: Idle = None,
    max_price: MaxPrice = None,
    health: Health = None,
    flag: Flags = None,
    tier: Tier = None,
    queue: Queue = None,
    env: Env = None,
    secret: Secret = None,
    ship: Ship = None,
    slots: Slots = None,
    follow: Follow = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Run a service, or update the one of this name; start a server and a gateway if none runs."""
    words = what or []
    section = _section(
        like=like, engine=engine, replicas=replicas, ttft=ttft, tpot=tpot, context=context, drain=drain,
        standby=standby, idle=idle, max_price=max_price, health=health, flag=flag, models=also,
    )  # fmt: skip
    flags = {"name": name, "tier": tier, "queue": queue}
    if len(words) == 1 and words[0].endswith((".yaml", ".yml")):
        given = {**flags, "gpus": gpus, "from_job": from_job, "env": env, "secret": secret} | section
        _check_none_given(given, words[0])
        spec = job_from_file(Path(words[0]))
        if spec.service is None:
            raise SpecError(f"{words[0]} has no section `service`", hint=f"a job is run by `cordee run {words[0]}`")
    else:
        spec = _from_words(words, from_job, section, gpus or "1", flags, pairs(env or ()), tuple(secret or ()))
    declare(spec, home, ship=ship, slots=slots, follow=follow, as_json=as_json)


def update(
    name: Name,
    *,
    model: Annotated[str | None, typer.Option(help="Serve another model.")] = None,
    from_job: FromJob = None,
    also: Also = None,
    like: Like = None,
    engine: Engine = None,
    replicas: ReplicaRange = None,
    gpus: Gpus = None,
    ttft: Ttft = None,
    tpot: Tpot = None,
    context: Context = None,
    drain: Drain = None,
    standby: Standby = None,
    idle: Idle = None,
    max_price: MaxPrice = None,
    health: Health = None,
    flag: Flags = None,
    env: Env = None,
    follow: Follow = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Change a running service: new replicas first, then the old ones drain; no request fails.

    One with the model of a training job goes on to the newest checkpoint, one with an artifact to the version that its
    reference names by now, also without another change.
    """
    changes = _section(
        like=like, engine=engine, replicas=replicas, ttft=ttft, tpot=tpot, context=context, drain=drain,
        standby=standby, idle=idle, max_price=max_price, health=health, flag=flag, model=_model(model, from_job),
        models=also,
    )  # fmt: skip
    with terminal.connect(home) as client:
        before = JobSpec.model_validate(client.service(name).spec)
    spec = changed(before, changes, gpus, pairs(env or ()))
    declare(spec, home, ship=None, slots=None, follow=follow, as_json=as_json, again=True)


def changed(before: JobSpec, changes: dict[str, Any], gpus: str | None, env: dict[str, str]) -> JobSpec:
    """Return the spec of a service with some keys of its section, as people write them, changed.

    Raises:
        InputError: there is no change, and no model that may have newer weights.
    """
    section = before.service
    assert section is not None, "it is a service"
    if not (changes or gpus or env or section.trained_by or section.artifacts):
        raise InputError("nothing to change was given", hint=f"cordee serve update {before.name} --context 8192")
    made = JobSpec.from_flags(
        run=before.run, gpus=gpus or "1", name=before.name, service={"model": f"{FROM_JOB}unchanged"} | changes
    )
    assert made.service is not None, "both are services"
    written_in = {key: field for field, key in WRITTEN_AS.items()}
    fields = {written_in.get(key, key) for key in changes} - {"slo", "flags"}
    reset: dict[str, Any] = {"steps": {}, "versions": {}} | (
        {"like": None} if "model" in changes else {}
    )  # The server sets the newest.
    section = section.model_copy(update=reset | {field: getattr(made.service, field) for field in fields})
    if "flags" in changes:
        section = section.model_copy(update={"flags": section.flags | made.service.flags})
    if "slo" in changes:
        latencies = {field: value for field, value in made.service.slo.model_dump().items() if value is not None}
        section = section.model_copy(update={"slo": section.slo.model_copy(update=latencies)})
    update: dict[str, Any] = {"service": section, "env": before.env | env}
    if "drain" in changes:
        update["on_preempt"] = before.on_preempt.model_copy(update={"grace_s": section.drain_s})
    if gpus is not None:
        update |= {field: getattr(made, field) for field in ("gpus", "gpu", "gpu_milli", "mig")}
    return JobSpec.model_validate(before.model_copy(update=update).model_dump())


def show_services(*, show_all: Annotated[bool, typer.Option("--all", help="List ended services too.")] = False,
                  home: Home = None, as_json: Json = False) -> None:  # fmt: skip
    """List services with their replicas, load and latencies."""
    with terminal.connect(home) as client:
        terminal.warn(client)
        found = [each for each in client.services() if show_all or each.state != "ended" or each.replicas]
    if as_json:
        terminal.print_json(found)
    elif not found:
        print("no service runs; start one: cordee serve run ./model")
    else:
        print_list(found)


def show(name: Name, *, home: Home = None, as_json: Json = False) -> None:
    """Show one service with its replicas."""
    with terminal.connect(home) as client:
        terminal.warn(client)
        found = client.service(name)
    if as_json:
        terminal.print_json(found)
    else:
        print_service(found)


def scale(
    name: Name,
    replicas: Annotated[str, typer.Argument(metavar="N | MIN..MAX", help="How many replicas.", show_default=False)],
    *,
    follow: Follow = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Set the number of a service's replicas, or its bounds."""
    with terminal.connect(home) as client:
        found = client.scale(name, replicas)
        found = _followed(client, found) if follow else found
    if as_json:
        terminal.print_json(found)
    else:
        print(f"{found.name} wants {found.wanted} of {found.min} to {found.max} replicas")


def stop(
    name: Name,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until its last replica has left.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """End a service: its replicas answer their open requests and leave."""
    with terminal.connect(home) as client:
        found = client.end_service(name)
        if wait:
            with terminal.waiting(progress_line(found)) as waiting:
                while found.replicas:
                    time.sleep(_LOOK_S)
                    found = client.service(name)
                    waiting.now(progress_line(found))
    if as_json:
        terminal.print_json(found)
    elif found.replicas:
        print(f"{name} ends: {progress_line(found)}")
    else:
        print(f"{name} has ended")


def _model(model: str | None, from_job: str | None) -> str | None:
    if model is not None and from_job is not None:
        raise InputError("a model and --from-job were given", hint="give one of the two")
    return f"{FROM_JOB}{from_job}" if from_job is not None else model


def _section(*, ttft: str | None, tpot: str | None, flag: list[str] | None, **others: Any) -> dict[str, Any]:
    """Return the section `service` as people write it, with the keys that were given."""
    section = {key: value for key, value in others.items() if value not in (None, [])}
    slo = {key: value for key, value in (("ttft", ttft), ("tpot", tpot)) if value is not None}
    flags = {key: plain_flag(value) for key, value in pairs(flag or (), "--flag").items()}
    return section | ({"slo": slo} if slo else {}) | ({"flags": flags} if flags else {})


def plain_flag(text: str) -> bool | int | float | str:
    """Return a flag's value as YAML would read it.

    >>> plain_flag("4"), plain_flag("0.9"), plain_flag("true"), plain_flag("auto")
    (4, 0.9, True, 'auto')
    """
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _check_none_given(given: dict[str, Any], file: str) -> None:
    for key, value in given.items():
        if value:
            flag = "--" + {"slo": "ttft", "flags": "flag", "models": "also"}.get(key, key).replace("_", "-")
            raise InputError(f"{flag} cannot be combined with a job file", hint=f"write it into {file}")


def _from_words(
    words: list[str], from_job: str | None, section: dict[str, Any], gpus: str, flags: dict[str, str | None],
    env: dict[str, str], secrets: tuple[str, ...],
) -> JobSpec:  # fmt: skip
    """Return the service of a model, or of a command that listens."""
    is_command = len(words) > 1 or section.get("engine") == "command"
    if not words and from_job is None:
        raise InputError("no model was given", hint="cordee serve run ./model, or: cordee serve run --from-job gpt")
    model = _model(None if is_command or not words else words[0], from_job)
    if model is not None:
        section = section | {"model": model}
    name = flags["name"] or ("service" if model is None else service_name(model))
    command = words if is_command else ()
    return JobSpec.from_flags(
        run=command, gpus=gpus, env=env, secrets=secrets, service=section, name=name,
        tier=flags["tier"], queue=flags["queue"],
    )  # fmt: skip


def service_name(model: str) -> str:
    """Return the name of a service that is given none.

    >>> service_name("./Tiny_Llama.gguf"), service_name("job:gpt"), service_name("meta/Llama-3.1-8B")
    ('tiny-llama', 'gpt', 'llama-3-1-8b')
    >>> service_name("artifact:team/llama-sft:best")
    'llama-sft'
    """
    ref = model.removeprefix(FROM_ARTIFACT)
    named = model.removeprefix(FROM_JOB) if ref == model else re.split("[:@]", ref)[0]
    last = named.rstrip("/").rpartition("/")[2].removesuffix(".gguf").lower()
    kept = "".join(char if char.isascii() and char.isalnum() else "-" for char in last).strip("-")
    return kept[:40].strip("-") or "service"


def declare(
    spec: JobSpec,
    home: Path | None,
    *,
    ship: bool | None,
    slots: str | None,
    follow: bool,
    as_json: bool,
    again: bool = False,
) -> None:
    """Send a service to the server, started with a gateway if none runs, and say what becomes of it.

    `again`: the spec is the server's own, with changes, so its files are not captured.
    """
    from cordee.control.spawn import ensure_server, running

    here = spec.model_copy(update={"cwd": spec.cwd or str(Path.cwd())})
    # Replicas find the programs and libraries of this shell, whichever shell started the server.
    found_here = {name: os.environ[name] for name in SEARCH_PATHS if name in os.environ}
    here = here.model_copy(update={"env": found_here | here.env})
    Client.check_secrets(here.secrets, os.environ)
    remote, begins = is_remote(home), False
    if not remote and running(folder := terminal.folder(home)) is None:
        begins = True
        with terminal.waiting(f"starting a server and a gateway on {folder}"):
            ensure_server(folder, slots=slots, gateway="auto")
    with terminal.connect(home) as client:
        copied: list[str] = []
        if not again and (here.run or remote or ship):  # else its engine is a program of the node
            here, copied = capture_job(client, here, ship=ship, remote=remote)
        made = client.declare(here.model_dump(mode="json"))
        for note in [*made.notes, *copied]:
            terminal.stderr().print(note if as_json else f"note: {note}", highlight=False, markup=False)
        if follow:
            made = _followed(client, made)
            deadline_s = time.monotonic() + (_GATEWAY_S if begins else 0)
            while not made.urls and time.monotonic() < deadline_s:  # a gateway that is starting
                time.sleep(_LOOK_S)
                made = client.service(made.name)
    if as_json:
        terminal.print_json(made)
    elif follow:
        print_urls(made)
    else:
        print(f"{made.name} is declared (revision {made.revision}): {progress_line(made)}")
        terminal.stderr().print(f"follow it: cordee serve show {made.name}", highlight=False)


def _followed(client: Client, service: ServiceView) -> ServiceView:
    """Show the progress of a service until it is ready; leave with 1 if its replica fails."""
    began_s = time.monotonic()
    try:
        with terminal.waiting(progress_line(service)) as waiting:
            while service.state not in ("ready", "idle", "ended"):
                time.sleep(_LOOK_S)
                service = client.service(service.name)
                waiting.now(progress_line(service))
                if "replica failed" in service.why and service.state != "degraded":
                    break
    except KeyboardInterrupt:
        terminal.stderr().print(f"it goes on: cordee serve show {service.name}", highlight=False)
        raise SystemExit(130) from None
    if service.state in ("ready", "idle"):
        seconds = time.monotonic() - began_s
        print(f"{service.name} is {service.state} after {seconds:.1f} s", file=sys.stderr)
        return service
    print(f"{service.name} is {service.state}: {service.why}", file=sys.stderr)
    print(f"hint: see `cordee serve show {service.name}`; end it: cordee serve stop {service.name}", file=sys.stderr)
    raise SystemExit(1)


VERBS: dict[str, Callable[..., None]] = {
    "run": run,
    "list": show_services,
    "show": show,
    "scale": scale,
    "update": update,
    "stop": stop,
}
