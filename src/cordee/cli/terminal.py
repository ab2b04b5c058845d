"""Shared by the verbs that print: options, tables that degrade when piped, JSON, a spinner."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic_core import to_jsonable_python
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from cordee.client import Client
from cordee.servers import default_home
from cordee.units import US_PER_S, format_bytes, format_duration, parse_duration_s
from cordee.workload.load import model_names
from cordee.workload.times import parse_time_us

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

Home = Annotated[
    Path | None, typer.Option("--home", help="Folder of the server.", show_default="CORDEE_URL, CORDEE_HOME, ~/.cordee")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Html = Annotated[Path | None, typer.Option(help="Write an HTML report.")]


def _list_models(wanted: bool) -> None:
    """Print the models of the catalogue, one a line, and leave."""
    if wanted:
        print("\n".join(sorted(model_names())))
        raise typer.Exit


def _list_kinds(wanted: bool) -> None:
    """Print the kinds of GPU that are known with their memory, one a line, and leave."""
    if wanted:
        from cordee.hardware.load import load_catalogue
        from cordee.planning import home_gpus

        gpus = load_catalogue(gpu_files=home_gpus()).gpus
        widest = max(len(gpu.name) for gpu in gpus)
        print("\n".join(f"{gpu.name:{widest}}  {format_bytes(gpu.memory_bytes):>6}" for gpu in gpus))
        raise typer.Exit


Models = Annotated[
    bool, typer.Option("--models", help="List the models of the catalogue.", is_eager=True, callback=_list_models)
]

Kinds = Annotated[
    bool, typer.Option("--kinds", help="List the kinds of GPU that are known.", is_eager=True, callback=_list_kinds)
]

_COLOURS = {
    "running": "green",
    "done": "green",
    "finished": "green",
    "up": "green",
    "checkpointed": "cyan",
    "queued": "yellow",
    "placed": "yellow",
    "stopping": "yellow",
    "paused": "cyan",
    "held": "cyan",
    "waiting": "yellow",
    "stopped": "dim",
    "killed": "magenta",
    "failed": "bold red",
    "lost": "bold red",
    "down": "bold red",
}


def connect(home: Path | None) -> Client:
    """Return a client of the home's server; without a home, of the server of CORDEE_URL or of the default home."""
    return Client(None if home is None else folder(home))


def warn(client: Client) -> None:
    """Print the problem that keeps the server from working, if there is one; the verb goes on."""
    problem = client.health().problem
    if problem is not None:
        say = f"the server is stuck, and retries each second: {problem}"
        stderr().print(say, highlight=False, markup=False)


def folder(home: Path | None) -> Path:
    """Return the home that was asked for, or the default one."""
    return (home or default_home()).expanduser().absolute()


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def may_ask() -> bool:
    """Return whether a person is there to answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(facts: Sequence[str], question: str) -> None:
    """Print the facts, ask the question, and leave unless the answer is yes."""
    for fact in facts:
        stderr().print(fact, highlight=False, markup=False)
    typer.confirm(question, abort=True, err=True)


def print_json(value: object) -> None:
    """Print views, documents or dataclasses, one or a sequence of them; not a number is null."""
    print(json.dumps(to_jsonable_python(value, by_alias=True, inf_nan_mode="null"), indent=2))


@contextmanager
def progress(
    text: str, total: int, *figures: "ProgressColumn", adds: bool = False, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; the yielded function takes the amount done or, with `adds`, what is added."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = stderr()
    if quiet or not console.is_terminal:
        yield lambda n: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), *figures, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(text, total=total or None)
        yield lambda n: shown.update(task, advance=n if adds else None, completed=None if adds else n)


def stdout() -> Console:
    """Return the console for answers; when piped, it cuts no line and draws no frame."""
    return Console() if sys.stdout.isatty() else Console(width=10_000, color_system=None)


def stderr() -> Console:
    """Return the console for messages beside the answer."""
    return Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=10_000, color_system=None)


def table(*columns: str, right: Sequence[str] = (), folds: Sequence[str] = ()) -> Table:
    """Return a table; `right` names the columns of numbers, `folds` those that wrap on a narrow terminal."""
    style = box.SIMPLE_HEAD if sys.stdout.isatty() else None
    made = Table(box=style, pad_edge=False, header_style="bold", padding=(0, 1))
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column not in folds,
            overflow="fold" if column in folds else "ellipsis",
        )
    return made


def print_with_notes(console: Console, rows: Table, notes: Sequence[str]) -> None:
    """Print a table with a note below each row that has one, where a column for it would be too narrow to read."""
    rows.show_edge = False
    lines = console.render_lines(rows, pad=False)
    head, folded = len(lines) - len(notes), len(lines) > len(notes) + 2
    for at, line in enumerate(lines):
        console.print(Segments([*line, Segment.line()]))
        if not folded and at >= head and notes[at - head]:
            console.print(Padding(Text(notes[at - head], style="dim"), (0, 0, 0, 4)))
    if folded:
        console.print("reasons: cordee why JOB")


def moment(text: str) -> str:
    """Return a moment that people write, `+2h` or a date with its time, as ISO 8601.

    Raises:
        UnitError: it is none.
    """
    if text.startswith("+"):
        return datetime.fromtimestamp(time.time() + parse_duration_s(text[1:]), UTC).isoformat()
    parse_time_us(text)
    return text


def state(word: str) -> Text:
    """Return a state or an outcome in its colour."""
    return Text(word, style=_COLOURS.get(word, ""))


def since(from_us: int, to_us: int | None = None) -> str:
    """Return the time from one moment to another, or to now."""
    end_us = time.time_ns() // 1000 if to_us is None else to_us
    seconds = max(0, round((end_us - from_us) / US_PER_S))
    return format_duration(seconds) if seconds else "0 s"


def ranges(gpus: list[int]) -> str:
    """Return GPU indices as ranges.

    >>> ranges([0, 1, 2, 3, 6])
    '0-3,6'
    """
    runs: list[list[int]] = []
    for gpu in sorted(gpus):
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return ",".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in runs)


@contextmanager
def waiting(text: str) -> Iterator["WaitText"]:
    """Show a spinner with a text that can change; without a terminal, print each new text as a line."""
    console = stderr()
    if not console.is_terminal:
        yield WaitText(lambda said: console.print(said, highlight=False), text)
        return
    with console.status(text) as status:
        yield WaitText(status.update, text, silent_first=True)


class WaitText:
    """A text about a wait, shown once each time it changes."""

    def __init__(self, say: Callable[[str], None], text: str, *, silent_first: bool = False) -> None:
        self._say, self._said = say, text
        if not silent_first:
            say(text)

    def now(self, text: str) -> None:
        """Show another text."""
        if text != self._said:
            self._said = text
            self._say(text)
