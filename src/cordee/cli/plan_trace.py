"""`cordee plan --trace`: the memory of the model's own code on fake ranks, beside the plan of the same layout."""

from collections.abc import Sequence
from dataclasses import replace

import typer

from cordee.cli import terminal
from cordee.cli.plan_trace_text import print_comparison
from cordee.errors import DoesNotFitError, InputError
from cordee.near import did_you_mean
from cordee.plan.ask import Request
from cordee.train.trace_memory.comparison import Tracing

PLANNED_CODES = ("hf", "torchtitan")
_SLOW = "still tracing: code that loops over its tokens takes minutes; a shorter --seq is traced sooner"


def compare(tracing: Tracing, request: Request | None, *, as_json: bool) -> None:
    """Trace a layout, and print it beside its plan; None: the planner does not know the model.

    Raises:
        CordeeError: the model, the layout or the settings cannot be traced.
        typer.Exit: it does not fit; with 21.
    """
    with terminal.waiting("tracing the model's code") as text:
        found = replace(tracing, on_slow=lambda: text.now(_SLOW)).compare(request)
    if as_json:
        terminal.print_json(found.document())
    else:
        print_comparison(found)
    if not found.fits:
        raise typer.Exit(DoesNotFitError.exit_code)


def refuse_beside(given: Sequence[str], gpus: str | None, *, is_range: bool) -> None:
    """Refuse the flags of a plan that a trace would drop, and a question that is not one of memory on some GPUs.

    Raises:
        InputError: with what to leave out.
    """
    if given:
        raise InputError(f"{given[0]} does not work with --trace", hint="leave out one of the two")
    if gpus is None or is_range:
        asked = "a trace needs --gpus" if gpus is None else f"a trace needs one number of GPUs, not {gpus}"
        raise InputError(asked, hint="write --gpus 8xH100")


def refuse_untraced(code: str | None, *, autocast: bool) -> None:
    """Refuse the flags that a plan without a trace would drop, and code that nobody has.

    Raises:
        InputError: with what to write instead.
    """
    if code is not None and code not in PLANNED_CODES:
        hint = "use --framework megatron" if code == "megatron" else did_you_mean(code, PLANNED_CODES)
        raise InputError(f"{code!r} is not model code that is planned", hint=hint)
    if autocast:
        raise InputError("--autocast needs --trace", hint="add --trace; DDP and one GPU are planned so anyway")
