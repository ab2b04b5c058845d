"""`cordee kernels`: six Triton kernels, measured where a GPU is, and what the compiler makes of them where none is."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.text import Text

from cordee.agent.gpus import discover
from cordee.cli import terminal
from cordee.cli.kernels_text import checked_table, compiled_table, measured_table
from cordee.errors import ClaimError, InputError, MissingExtraError, ScriptError
from cordee.hardware.load import load_catalogue
from cordee.kernels.catalogue import ARCHITECTURES, KERNELS, Checked, Compiled, Measured
from cordee.near import did_you_mean
from cordee.planning import home_gpus
from cordee.units import plural

_NAMES = tuple(kernel.name for kernel in KERNELS)
_SHAPES = {"compile": Compiled, "check": Checked, "measure": Measured}


def kernels(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[KERNEL]...", help=f"Only these: {', '.join(_NAMES)}.")
    ] = None,
    *,
    check: Annotated[bool, typer.Option("--check", help="Compare the results of each kernel with fp64.")] = False,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile even if there is a GPU.")] = False,
    arch: Annotated[
        list[str] | None, typer.Option(help=f"Compile only for this architecture: {', '.join(ARCHITECTURES)}.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    as_json: terminal.Json = False,
) -> None:
    """Show what each kernel reaches on this GPU, or, without one, what the compiler makes of it for three GPUs."""
    for noun, given, known in (("kernel", names, _NAMES), ("architecture", arch, tuple(ARCHITECTURES))):
        if unknown := sorted(set(given or ()) - set(known)):
            raise InputError(f"there is no {noun} {unknown[0]!r}", hint=did_you_mean(unknown[0], known))
    if check and (compiled or arch):
        raise InputError("--check does not compile for an architecture", hint="give --check, or --compile and --arch")
    devices = discover(None)
    work = "check" if check else "compile" if compiled or arch or not devices.real else "measure"
    # A GPU that the catalogue does not know has no roof: said before minutes of measuring.
    gpu = load_catalogue(gpu_files=home_gpus()).find_gpu(devices.gpu_name) if work == "measure" else None
    words = [*(names or ()), "--seed", str(seed), *(part for each in arch or () for part in ("--arch", each))]
    total = len(names or _NAMES) * {"check": 2, "compile": len(arch or ARCHITECTURES), "measure": 2}[work]
    found = []
    with terminal.progress(f"{work} kernels", total) as done:
        for record in _records(work, words):
            found.append(record)
            done(len(found))
    if as_json:
        terminal.print_json(found)
    elif work == "compile":
        terminal.stdout().print(compiled_table(found))
        _print_lessons(found)
    elif work == "check":
        terminal.stdout().print(checked_table(found))
    elif gpu is not None:
        terminal.stdout().print(measured_table(found, gpu))
    if wrong := [each for each in found if isinstance(each, Checked) and not each.holds]:
        those = ", ".join(f"{each.kernel} in {each.dtype}" for each in wrong)
        raise ClaimError(f"{plural(len(wrong), 'result')} beyond the rounding errors: {those}", hint=f"--seed {seed}")


def _records(work: str, words: Sequence[str]) -> Iterator[Any]:
    """Yield what a process of its own finds: Triton decides at its import whether it interprets.

    Raises:
        MissingExtraError: torch or Triton is not installed.
        ScriptError: the process failed.
    """
    argv = [sys.executable, "-m", "cordee.kernels", work, *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr, "asked for"
        for line in process.stdout:
            found = json.loads(line)
            # JSON has no whole numbers as keys.
            for name in ("load_bytes", "store_bytes"):
                if name in found:
                    found[name] = {int(size): count for size, count in found[name].items()}
            yield _SHAPES[work](**found)
        said = process.stderr.read().strip()
    last = said.splitlines()[-1] if said else "without a word"
    if process.returncode == MissingExtraError.exit_code:
        message, _, hint = last.partition(": ")
        raise MissingExtraError(message, hint=hint)
    if process.returncode:
        shown = " ".join(argv[1:])
        raise ScriptError(f"python {shown} failed with exit code {process.returncode}: {last}", hint=shown)


def _print_lessons(found: Sequence[Compiled]) -> None:
    console = terminal.stdout()
    shows = {kernel.name: kernel.shows for kernel in KERNELS}
    for name, _ in groupby(found, key=lambda each: each.kernel):
        console.print(Text.assemble((f"{name:<13}", "bold"), shows[name]))
