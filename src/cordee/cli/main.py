"""The front door: which verbs there are, and what becomes of an error.

A verb's module is imported only when the verb is called, so that `cordee --help` stays light.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

import cordee
from cordee.errors import CordeeError

# Verb: (its module, whose function has the verb's name; one line of help).
VERBS: dict[str, tuple[str, str]] = {
    "demo": ("cordee.cli.demo", "One real job through the wall: plan, gang, push, resume, bill. Two minutes, no GPU."),
    "plan": ("cordee.cli.plan", "Does it fit, in which layout, how fast, what does it cost - before anything runs."),
    "figures": ("cordee.cli.figures", "Figures quoted in the field, worked out again: which hold, which do not."),
    "experts": (
        "cordee.cli.experts",
        "Replicate and place a model's experts from their loads; say if moving them pays.",
    ),
    "pipeline": ("cordee.cli.pipeline", "Pipeline schedules on your times: bubbles, memory, which to use."),
    "profile": (
        "cordee.cli.profile",
        "Read profiles of ranks: compute, exposed communication, idle time, stragglers; compare them with the plan.",
    ),
    "run": ("cordee.cli.jobs", "Queue a job, and start a server if none runs."),
    "stop": ("cordee.cli.jobs", "Ask a job to end: it checkpoints first, unless --now."),
    "jobs": ("cordee.cli.jobs", "List jobs, or show one with its attempts."),
    "why": ("cordee.cli.jobs", "Say why a job is where it is."),
    "logs": ("cordee.cli.jobs", "Print what a job's ranks wrote."),
    "nodes": ("cordee.cli.operate", "List nodes, who holds their GPUs, and what they cost."),
    "queues": ("cordee.cli.queues", "Show the tree of queues: quota, who holds, borrows, lends and waits; or set it."),
    "cost": ("cordee.cli.operate", "Say what every GPU-second was held for, and what it cost."),
    "up": ("cordee.cli.operate", "Start a server that takes jobs; those of an earlier one go on."),
    "down": ("cordee.cli.operate", "Checkpoint and requeue every job, then end the server."),
    "simulate": ("cordee.cli.simulate", "Run a trace under several policies: who waits, what is lost, what it costs."),
    "replay": ("cordee.cli.simulate", "Decide a live log again under another policy, and say what would have changed."),
    "checkpoint": (
        "cordee.cli.checkpoint",
        "List, verify, compare, pin, collect, export or import the checkpoints at a destination.",
    ),
    "version": ("cordee.cli.main", "Print the version."),
}

# What `cordee VERB --help` ends with.
EXAMPLES = {
    "demo": "cordee demo --out report.html",
    "plan": "cordee plan llama-3-70b --gpus 64xH100 --layout tp=8,pp=2",
    "figures": "cordee figures --json",
    "experts": "cordee experts loads.csv --gpus 32 --nodes 4 --replicas 288 --groups 8 --json > plan.json",
    "pipeline": "cordee pipeline --ranks 8 --microbatches 20 --times f=1,b=1,w=1 --memory 9",
    "profile": "cordee profile rank*.json.gz --html profile.html",
    "run": "cordee run --gpus 4 --tier preemptible --checkpoint-to /shared/checkpoints -- python train.py",
    "stop": "cordee stop my-job --wait",
    "jobs": "cordee jobs my-job",
    "why": "cordee why my-job",
    "logs": "cordee logs my-job --follow --rank 0",
    "nodes": "cordee nodes --json",
    "queues": "cordee queues set queues.yaml",
    "cost": "cordee cost --by user",
    "up": "cordee up --slots 4 --price-as H100",
    "down": "cordee down --yes",
    "simulate": "cordee simulate jobs.csv.gz --cluster 80x8xH100 --policy house,fifo,easy --html compare.html",
    "replay": "cordee replay ~/.cordee --policy fifo",
    "checkpoint": "cordee checkpoint export s3://bucket/run/my-job 400 --to hf --out my-model",
}

# Earlier names, which scripts may still use: of verbs, and of the flags of some verbs.
RENAMED_VERBS = {"trace": "profile"}
RENAMED_FLAGS = {verb: {"--trace": "--chrome-trace"} for verb in ("pipeline", "simulate", "cost")}


def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the version."""
    print(json.dumps({"version": cordee.__version__}) if as_json else cordee.__version__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    words = current_words(sys.argv[1:] if argv is None else argv)
    try:
        _app(words)(words)
    except CordeeError as error:
        _complain(error, as_json="--json" in _before_dashes(words))
        raise SystemExit(error.exit_code) from None


def current_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command with earlier names of verbs and flags replaced; what follows `--` stays.

    >>> current_words(["trace", "rank0.json"]), current_words(["cost", "--trace=spent.json"])
    (['profile', 'rank0.json'], ['cost', '--chrome-trace=spent.json'])
    """
    at = next((at for at, word in enumerate(words) if not word.startswith("-")), None)
    if at is None:
        return list(words)
    verb = RENAMED_VERBS.get(words[at], words[at])
    flags = RENAMED_FLAGS.get(verb, {})
    own = _before_dashes(words)
    renamed = [flags.get(name, name) + equals + value for name, equals, value in (word.partition("=") for word in own)]
    renamed[at] = verb
    return [*renamed, *words[len(own) :]]


def _app(words: Sequence[str]) -> typer.Typer:
    """All verbs; only the one that is called has its function."""
    app = typer.Typer(
        name="cordee",
        help="Plan, schedule, survive and account for training and serving large models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    called = next((word for word in words if not word.startswith("-")), None)
    for verb, (module, line) in VERBS.items():
        function: Any = getattr(import_module(module), verb) if verb == called else _not_called
        example = f"Example: {EXAMPLES[verb]}" if verb in EXAMPLES else None
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=verb, help=line, epilog=example)
            continue
        app.command(verb, short_help=line, epilog=example)(function)
    app.callback(invoke_without_command=True)(_common)
    return app


def _not_called() -> None:
    """Stand in for a verb that is only listed."""


def _common(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Keep `cordee` a group of verbs, however few they are."""
    if show_version:
        version()
        raise SystemExit(0)


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    """The words that are ours: after `--` stands the user's own command."""
    return words[: words.index("--")] if "--" in words else words


def _complain(error: CordeeError, *, as_json: bool) -> None:
    """Say what is wrong and what to do, on stderr."""
    if as_json:
        report = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
        print(json.dumps(report), file=sys.stderr)
        return
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
