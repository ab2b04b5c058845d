"""Services on a terminal: the list, one with its replicas, its progress, and how to use it."""

from collections import Counter

from rich.text import Text

from cordee.answers.services import ReplicaView, ServiceView
from cordee.cli import measured, terminal
from cordee.units import (
    US_PER_S,
    format_bytes,
    format_count,
    format_duration,
    format_latency,
    format_micro_usd,
    plural,
)

NARROW_COLUMNS = 100
_DO = {
    "waiting": ("waits for GPUs", "wait for GPUs"),
    "loading": ("loads", "load"),
    "standby": ("is in reserve", "are in reserve"),
    "unready": ("does not answer", "do not answer"),
    "draining": ("drains", "drain"),
}
_COLOURS = {
    "ready": "green",
    "standby": "cyan",
    "updating": "cyan",
    "starting": "yellow",
    "loading": "yellow",
    "waiting": "yellow",
    "draining": "yellow",
    "idle": "dim",
    "ended": "dim",
    "degraded": "bold red",
    "unready": "bold red",
}


def progress_line(service: ServiceView) -> str:
    """Return how far a service is: its replicas by what they do, and why it is not further."""
    found = Counter(each.state for each in service.replicas)
    others = {state: number for state, number in sorted(found.items()) if state != "ready"}
    parts = [f"{number} {_DO[state][number > 1]}" for state, number in others.items()]
    if service.state == "idle":
        parts.append("none runs until a request comes")
    elif not service.replicas:
        parts.append("no replica is left" if service.state == "ended" else "no replica yet")
    wanted = (
        f"{min(found['ready'], service.wanted)} of {plural(service.wanted, 'replica')} ready" if service.wanted else ""
    )
    why = service.why if service.state in ("starting", "degraded", "updating") else ""
    return ": ".join(part for part in (wanted, ", ".join(parts), why) if part)


def print_list(found: list[ServiceView]) -> None:
    """Print services, one a line; a narrow terminal leaves out engine, rates and TPOT."""
    console = terminal.stdout()
    cells: dict[str, list[str | Text]] = {
        "SERVICE": [each.name for each in found],
        "STATE": [_state(each.state) for each in found],
        "READY": [f"{_ready(each)}/{each.wanted}" for each in found],
        "BOUNDS": [_bounds(each) for each in found],
        "REV": [str(each.revision) for each in found],
        "ENGINE": [_engine(each) for each in found],
        "MODEL": [_short_model(each) for each in found],
        "REQ/S": [_rate(each.measured.requests_per_s) for each in found],
        "TOK/S": [_rate(each.measured.tokens_per_s) for each in found],
        "TTFT": [_latency(each.measured.ttft_p99_us) for each in found],
        "TPOT": [_latency(each.measured.tpot_p99_us) for each in found],
        "QUEUED": [str(each.measured.queued or "–") for each in found],
        "WHY": [each.why or "–" for each in found],
    }
    if console.width < NARROW_COLUMNS:
        for name in ("BOUNDS", "REV", "ENGINE", "TOK/S", "TPOT"):
            del cells[name]
    right = ("READY", "REV", "REQ/S", "TOK/S", "TTFT", "TPOT", "QUEUED")
    rows = terminal.table(*cells, right=right, folds=("MODEL", "WHY"))
    for row in zip(*cells.values(), strict=True):
        rows.add_row(*row)
    console.print(rows)


def print_service(service: ServiceView) -> None:
    """Print one service with its replicas."""
    console = terminal.stdout()
    facts = terminal.table("", "", folds=("",))
    facts.show_header = False
    section = service.spec["service"]
    for name, value in (
        ("service", service.name),
        ("state", _state(service.state)),
        ("why", service.why),
        ("replicas", f"{_ready(service)} of {service.wanted} ready{_more(service)}"),
        ("model", "" if service.models else f"{_model(service)}{_weights(service)}"),
        ("models", _models(service)),
        ("engine", f"{_engine(service)}{_flags(section['flags'])}"),
        ("gpus", _gpus(service)),
        ("slo", _slo(section["slo"])),
        ("price", _price(service)),
        ("now", _now(service)),
        ("plan", _plan(service)),
        ("revision", f"{service.revision}, declared {terminal.since(service.declared_us)} ago by {service.owner}"),
        ("requests to", ", ".join(f"{url}/v1" for url in service.urls)),
    ):
        if value:
            facts.add_row(name, value)
    console.print(facts)
    if service.compared:
        console.print(measured.comparisons(service.compared))
    if service.replicas:
        console.print(_replicas(service.replicas, narrow=console.width < NARROW_COLUMNS, several=bool(service.models)))


def _models(service: ServiceView) -> str:
    """Return where each of several models is, and how many requests wait for it."""
    parts = []
    for each in service.models:
        facts = [plural(each.replicas, "replica") if each.replicas else "none"]
        facts += [f"{each.queued} queued"] if each.queued else []
        facts += [f"loads in {format_duration(each.load_us / US_PER_S)}"] if each.load_us is not None else []
        facts += [each.why] if each.why else []
        parts.append(f"{each.name}: {', '.join(facts)}")
    return "\n".join(parts)


def _replicas(found: list[ReplicaView], *, narrow: bool, several: bool) -> object:
    cells: dict[str, list[str | Text]] = {
        "REPLICA": [f"{each.job_id}.{each.epoch}" if each.epoch else each.job_id for each in found],
        "STATE": [_state(each.state) for each in found],
        "SINCE": [terminal.since(each.since_us) for each in found],
        "MODEL": [each.model or "–" for each in found],
        "REV": [str(each.revision) for each in found],
        "NODE": [each.node or "–" for each in found],
        "ADDRESS": [each.address or "–" for each in found],
        "KV TOKENS": ["–" if each.kv_tokens is None else f"{each.kv_tokens:,}" for each in found],
        "SLOTS": [str(each.slots or "–") for each in found],
        "WHY": [each.why or "–" for each in found],
    }
    if narrow:
        for name in ("ADDRESS", "SLOTS", "REV"):
            del cells[name]
    if not several:
        del cells["MODEL"]
    if all(not each.why for each in found):
        del cells["WHY"]
    rows = terminal.table(*cells, right=("SINCE", "REV", "KV TOKENS", "SLOTS"), folds=("MODEL", "WHY"))
    for row in zip(*cells.values(), strict=True):
        rows.add_row(*row)
    return rows


def print_urls(service: ServiceView) -> None:
    """Print how to use a service: the gateway's URL, or those of its replicas where no gateway runs."""
    if service.urls:
        url = f"{service.urls[0]}/v1"
        print(url)
        say = (
            f"""curl {url}/chat/completions -H 'Content-Type: application/json' -d '{{"model": "{service.name}", """
            """"messages": [{"role": "user", "content": "Hello"}]}'"""
        )
        terminal.stderr().print(say, highlight=False, markup=False, soft_wrap=True)
        return
    for replica in service.replicas:
        if replica.state == "ready":
            print(f"{replica.address}/v1")
    terminal.stderr().print(
        "note: these are replicas, which come and go; a gateway in front of them does not: cordee up --gateway auto",
        highlight=False,
    )


def _state(word: str) -> Text:
    return Text(word, style=_COLOURS.get(word, ""))


def _ready(service: ServiceView) -> int:
    return min(service.wanted, sum(each.state == "ready" for each in service.replicas))


def _bounds(service: ServiceView) -> str:
    return str(service.min) if service.min == service.max else f"{service.min}..{service.max}"


def _more(service: ServiceView) -> str:
    scales = "" if service.min == service.max else f", scales from {service.min} to {service.max}"
    return scales + (f", {service.standby} in reserve" if service.standby else "")


def _engine(service: ServiceView) -> str:
    running = next((each.engine for each in service.replicas if each.engine), None)
    return running or str(service.spec["service"]["engine"])


def _model(service: ServiceView) -> str:
    run = service.spec["run"]
    command = run if isinstance(run, str) else " ".join(run)
    return str(service.spec["service"]["model"] or command)


def _weights(service: ServiceView) -> str:
    """Return which weights its replicas have, where the model's name does not say so."""
    section = service.spec["service"]
    step, version = section.get("steps", {}).get(section["model"]), section.get("versions", {}).get(section["model"])
    return f", step {step:,}" if step is not None else f", {version['ref']}" if version is not None else ""


def _short_model(service: ServiceView) -> str:
    more = f" +{len(service.models) - 1}" if service.models else ""
    return _model(service).rstrip("/").rpartition("/")[2] + more


def _flags(flags: dict[str, object]) -> str:
    return f" ({', '.join(f'{name}={value}' for name, value in flags.items())})" if flags else ""


def _gpus(service: ServiceView) -> str:
    spec = service.spec
    number = f"{spec['gpus'] if spec['gpu_milli'] == 1000 else spec['gpu_milli'] / 1000:g}"
    number = spec.get("mig") or number  # an earlier server knows no MIG
    return f"{number}{' x ' + spec['gpu'] if spec['gpu'] else ''} a replica, {spec['tier']}, queue {spec['queue']}"


def _slo(slo: dict[str, float | None]) -> str:
    limits = (("TTFT", slo["ttft_s"]), ("TPOT", slo["tpot_s"]))
    return ", ".join(f"{name} {format_latency(value)}" for name, value in limits if value is not None)


def _price(service: ServiceView) -> str:
    """Return the price of a replica and of all that there are, and the most that they may cost."""
    each, most = service.micro_usd_per_hour, service.spec["service"].get("max_micro_usd_per_hour")
    parts = [f"{format_micro_usd(each)}/h a replica", f"{format_micro_usd(each * len(service.replicas))}/h now"]
    return ", ".join((parts if each else []) + ([f"at most {format_micro_usd(most)}/h"] if most else []))


def _now(service: ServiceView) -> str:
    now = service.measured
    parts = [f"{plural(now.running, 'request')} open"] if now.running else []
    parts += [f"{now.queued} queued"] if now.queued else []
    parts += [f"{_rate(now.requests_per_s)} requests/s"] if now.requests_per_s else []
    parts += [f"{_rate(now.tokens_per_s)} tokens/s"] if now.tokens_per_s else []
    parts += [f"TTFT p99 {_latency(now.ttft_p99_us)}"] if now.ttft_p99_us else []
    parts += [f"TPOT p99 {_latency(now.tpot_p99_us)}"] if now.tpot_p99_us else []
    parts += [f"{now.kv_fraction:.0%} of the KV cache"] if now.kv_fraction else []
    return ", ".join(parts)


def _plan(service: ServiceView) -> str:
    plan = service.estimate
    if plan is None:
        return ""
    parts = [plan.layout] if plan.layout else []
    parts += [f"{format_count(plan.kv_tokens)} KV tokens"] if plan.kv_tokens else []
    parts += [f"{plan.sequences} sequences"] if plan.sequences else []
    parts += [f"TTFT {_latency(plan.ttft_us)}"] if plan.ttft_us else []
    parts += [f"TPOT {_latency(plan.tpot_us)}"] if plan.tpot_us else []
    parts += [f"{format_bytes(plan.peak_bytes)} a GPU"] if plan.peak_bytes else []
    return ", ".join(parts)


def _rate(per_s: float | None) -> str:
    return "–" if per_s is None else f"{per_s:,.1f}" if per_s < 100 else f"{per_s:,.0f}"


def _latency(us: int | None) -> str:
    return "–" if us is None else format_latency(us / US_PER_S)
