"""The front door: the verbs, and how an error is printed.

A verb's module is imported only when the verb is called, so that `cordee --help` stays light.
"""

import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

import cordee
from cordee.errors import CordeeError
from cordee.imports import end_uncollected, uncollected

# Group: verb: (its module, whose function has the verb's name; one line of help).
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Before a run": {
        "plan": ("cordee.cli.plan", "Find the layouts that fit, with their speed and cost."),
        "calibrate": ("cordee.cli.calibrate", "Measure this machine, so that plans use its own tables."),
        "serve": ("cordee.cli.serve", "Plan a service; run, scale, update, stop it; manage keys of its gateways."),
        "rag": ("cordee.cli.rag", "Build, ask and serve a knowledge base on one small machine."),
        "simulate": ("cordee.cli.simulate", "Run a trace of jobs under several policies, and compare them."),
        "pipeline": ("cordee.cli.pipeline", "Compare pipeline schedules for your pass times."),
        "experts": ("cordee.cli.experts", "Place and replicate a model's experts by load."),
        "figures": ("cordee.cli.figures", "Recompute figures that are often quoted, and check them."),
        "kernels": ("cordee.cli.kernels", "Show what six GPU kernels reach, or what the compiler makes of them."),
    },
    "Jobs": {
        "run": ("cordee.cli.run", "Queue a job, or a sweep of jobs; start a server if none runs."),
        "rehearse": ("cordee.cli.rehearse", "Run some steps of a job, and check that it survives a notice."),
        "sweep": ("cordee.cli.sweep", "Begin a sweep, or show sweeps: their trials, the best one, their cost."),
        "jobs": ("cordee.cli.jobs", "List jobs, or show one with its attempts."),
        "top": ("cordee.cli.top", "Show jobs and GPUs live: step, loss, tokens/s, MFU, memory, $/h."),
        "why": ("cordee.cli.jobs", "Explain a job's state, and forecast when it starts and ends."),
        "logs": ("cordee.cli.jobs", "Print the output of a job's ranks."),
        "shell": ("cordee.cli.shell", "Open a shell on a node, as a job."),
        "exec": ("cordee.cli.shell", "Run a command where a job runs, with its environment and GPUs."),
        "port-forward": ("cordee.cli.port_forward", "Reach a job's notebook or TensorBoard from this machine."),
        "stop": ("cordee.cli.jobs", "Stop a job; it checkpoints first, unless --now is given."),
        "pause": ("cordee.cli.chains", "Pause a job or a sweep: it saves, and gives its GPUs back."),
        "resume": ("cordee.cli.chains", "Let a paused or held job, or a paused sweep, go on."),
        "hold": ("cordee.cli.chains", "Keep a job from starting until it is resumed."),
        "requeue": ("cordee.cli.chains", "Send a job to the end of its queue, or let one that has ended run again."),
        "prioritize": ("cordee.cli.chains", "Send a waiting job to the top of its queue."),
        "render": ("cordee.cli.render", "Write a job file for another system: slurm, kubernetes."),
    },
    "Cluster": {
        "up": ("cordee.cli.operate", "Start a server; jobs of an earlier one continue."),
        "connect": ("cordee.cli.connect", "Use a server on another machine."),
        "web": ("cordee.cli.web", "Open the server's pages in a browser, logged in."),
        "down": ("cordee.cli.operate", "Checkpoint and requeue all jobs, then end the server."),
        "nodes": ("cordee.cli.nodes", "List nodes; cordon, drain or uncordon one; let one join or leave."),
        "reserve": ("cordee.cli.reserve", "Reserve nodes for a queue or a user for a time; list, cancel."),
        "doctor": ("cordee.cli.doctor", "Examine this machine: GPUs, links, disk, limits, clock."),
        "budget": ("cordee.cli.budget", "Set, list and remove budgets of queues and users."),
        "queues": ("cordee.cli.queues", "Show or set the tree of queues: quotas, usage and borrowing."),
        "audit": ("cordee.cli.audit", "Show which user asked for which change, and check that no record was altered."),
        "admin": ("cordee.cli.admin", "Back a server up, restore it, or check its log."),
    },
    "After a run": {
        "cost": ("cordee.cli.cost", "Show GPU time by class, tokens, and their cost; also of a cluster under Slurm."),
        "compare": ("cordee.cli.compare", "Compare jobs: settings, curves, time, cost."),
        "profile": ("cordee.cli.profile", "Break down GPU time from profiles."),
        "artifact": ("cordee.cli.artifact", "Push, pull, tag and compare versions of models and data."),
        "checkpoint": ("cordee.cli.checkpoint", "List, verify, compare, pin, export or import checkpoints."),
        "replay": ("cordee.cli.simulate", "Replay a server's log under another policy."),
    },
    "Cordee": {
        "demo": ("cordee.cli.demo", "Run one real job from plan to cost, without a GPU."),
        "version": ("cordee.cli.main", "Print the version."),
    },
}
# Functions that cannot have their verb's name.
_FUNCTIONS = {"port-forward": "port_forward"}
# The last line of `cordee VERB --help`.
EXAMPLES = {
    "demo": "cordee demo --out report.html",
    "web": "cordee web --print",
    "plan": "cordee plan llama-3-8b --gpus 1xRTX-4090 --train qlora --seq 4096",
    "serve": "cordee serve plan llama-3-8b --gpus 8xH100 --rate 20/s --ttft 500ms --tpot 50ms",
    "rag": "cordee rag build kb docs/ && cordee rag query kb 'how does a save survive?'",
    "calibrate": "cordee calibrate --to /shared/checkpoints",
    "figures": "cordee figures --json",
    "kernels": "cordee kernels --arch sm90",
    "experts": "cordee experts loads.csv --gpus 32 --nodes 4 --replicas 288 --groups 8 --json > plan.json",
    "pipeline": "cordee pipeline --ranks 8 --microbatches 20 --times f=1,b=1,w=1 --memory 9",
    "profile": "cordee profile rank*.json.gz --html profile.html",
    "run": "cordee run --gpus 4 --tier preemptible --checkpoint-to /shared/checkpoints -- python train.py",
    "shell": "cordee shell --gpus 1 --idle 30m",
    "exec": "cordee exec my-job -- nvidia-smi",
    "port-forward": "cordee port-forward my-job 8888",
    "rehearse": "cordee rehearse job.yaml",
    "stop": "cordee stop my-job --wait",
    "top": "cordee top --once",
    "compare": "cordee compare exp1 exp2 --html compare.html",
    "pause": "cordee pause my-job",
    "resume": "cordee resume my-job",
    "hold": "cordee hold my-job",
    "requeue": "cordee requeue my-job",
    "prioritize": "cordee prioritize my-job",
    "render": "cordee render kubernetes job.yaml --image registry/train:1 --kueue-queue research -o k8s.yaml",
    "sweep": "cordee sweep sweep.yaml, then: cordee sweep show my-sweep --html sweep.html",
    "jobs": "cordee jobs my-job",
    "why": "cordee why my-job",
    "logs": "cordee logs my-job --follow --rank 0",
    "nodes": "cordee nodes drain node7 --why 'disk errors'",
    "reserve": "cordee reserve --nodes n1,n2 --from +2h --for 4h --queue eval",
    "doctor": "cordee doctor --to /shared/checkpoints",
    "queues": "cordee queues set queues.yaml",
    "budget": "cordee budget set --queue llm --cost '$20,000' --hard",
    "audit": "cordee audit ls --user ada --since 7d",
    "admin": "cordee admin backup cordee.tar.gz",
    "cost": "cordee cost --by tenant",
    "up": "cordee up --listen 0.0.0.0:8470",
    "connect": "cordee connect https://head:8470 TOKEN --fingerprint SHA256",
    "down": "cordee down --yes",
    "simulate": "cordee simulate jobs.csv.gz --cluster 80x8xH100 --policy cordee,fifo,easy --html compare.html",
    "replay": "cordee replay ~/.cordee --policy fifo",
    "artifact": "cordee artifact push out/ team/llama-sft --base llama-3-8b:1 --tag best",
    "checkpoint": "cordee checkpoint export s3://bucket/run/my-job 400 --to hf --out my-model",
}

# What follows the verb `sweep` if it begins one, as `run` does: a job file, or flags.
_BEGINS_SWEEP = re.compile(r".+\.ya?ml|--(?!help$).+")

# Other names, which scripts may use: of verbs (an earlier one, the singular), and of the flags of some verbs.
RENAMED_VERBS = {"trace": "profile", "node": "nodes"}
RENAMED_FLAGS = {
    **{verb: {"--trace": "--chrome-trace"} for verb in ("pipeline", "simulate", "cost")},
    "experts": {"--share": "--expert-fraction"},
}


def version(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Print the version."""
    print(json.dumps({"version": cordee.__version__}) if as_json else cordee.__version__)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    if argv is None:  # a process of its own
        end_uncollected()
    words = current_words(sys.argv[1:] if argv is None else argv)
    try:
        with uncollected():
            app = _app(words)
        app(words)
    except CordeeError as error:
        _print_error(error, as_json="--json" in _before_dashes(words))
        raise SystemExit(error.exit_code) from None


def current_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command with earlier names of verbs and flags replaced; what follows `--` stays.

    >>> current_words(["trace", "rank0.json"]), current_words(["cost", "--trace=spent.json"])
    (['profile', 'rank0.json'], ['cost', '--chrome-trace=spent.json'])
    >>> current_words(["sweep", "sweep.yaml"]), current_words(["sweep", "show", "lr"])
    (['run', '--only-sweep', 'sweep.yaml'], ['sweep', 'show', 'lr'])
    """
    at = next((at for at, word in enumerate(words) if not word.startswith("-")), None)
    if at is None:
        return list(words)
    verb = RENAMED_VERBS.get(words[at], words[at])
    flags = RENAMED_FLAGS.get(verb, {})
    own = _before_dashes(words)
    renamed = [flags.get(name, name) + equals + value for name, equals, value in (word.partition("=") for word in own)]
    begins_sweep = verb == "sweep" and any(map(_BEGINS_SWEEP.fullmatch, own[at + 1 : at + 2]))
    renamed[at : at + 1] = ["run", "--only-sweep"] if begins_sweep else [verb]
    return [*renamed, *words[len(own) :]]


def _app(words: Sequence[str]) -> typer.Typer:
    """Return the app with all verbs; only the one that is called has its function."""
    app = typer.Typer(
        name="cordee",
        help="Plan, schedule, survive and account for training and serving large models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    called = next((word for word in words if not word.startswith("-")), None)
    for group, verbs in GROUPS.items():
        for verb, (module, line) in verbs.items():
            name = _FUNCTIONS.get(verb, verb)
            function: Any = getattr(import_module(module), name) if verb == called else _not_called
            example = f"Example: {EXAMPLES[verb]}" if verb in EXAMPLES else None
            if isinstance(function, typer.Typer):
                app.add_typer(function, name=verb, help=line, epilog=example, rich_help_panel=group)
            else:
                app.command(verb, short_help=line, epilog=example, rich_help_panel=group)(function)
    app.callback(invoke_without_command=True)(_common)
    return app


def _not_called() -> None:
    """Stand in for a verb that is only listed."""


def _common(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Handle the options that need no verb."""
    if show_version:
        version()
        raise SystemExit(0)


def _before_dashes(words: Sequence[str]) -> Sequence[str]:
    """Return Cordee's own words: the user's command follows after `--`."""
    return words[: words.index("--")] if "--" in words else words


def _print_error(error: CordeeError, *, as_json: bool) -> None:
    """Print the error and its hint to stderr."""
    if as_json:
        report = {"error": error.message, "hint": error.hint, "exit_code": error.exit_code}
        print(json.dumps(report), file=sys.stderr)
        return
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
