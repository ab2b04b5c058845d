"""The verbs `cordee checkpoint`: inspect, pin, collect and convert the checkpoints of a destination.

Nothing here connects to a server or fences a running job: inspecting, pinning and collecting are a visitor's.
"""

import re
import secrets
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import DownloadColumn, TransferSpeedColumn

from cordee.cli import terminal
from cordee.cli.checkpoint_document import (
    CollectedDocument,
    DiffDocument,
    ExportDocument,
    GenerationDocument,
    ImportDocument,
    PinDocument,
    VerificationDocument,
)
from cordee.cli.terminal import Json
from cordee.errors import CorruptError, InputError, MissingExtraError
from cordee.units import format_bytes, plural
from cordee.workload.keep import parse_keep

try:
    from cordee.storage import audit, generations, transfer
    from cordee.storage.destination import open_blobs, open_existing
    from cordee.storage.files import Blobs
    from cordee.storage.log import Log, live_commits, read_entries
    from cordee.storage.manifest import Manifest, read_manifest
    from cordee.storage.sealed import Damaged
except ImportError as error:
    raise MissingExtraError(
        f"checkpoints need the library {error.name}, which is not installed", hint="pip install 'cordee[train]'"
    ) from error

_BYTES = (DownloadColumn(), TransferSpeedColumn())

checkpoint = typer.Typer(no_args_is_help=True, add_completion=False)

To = Annotated[
    str,
    typer.Argument(
        metavar="DESTINATION",
        help="Folder or URL of the job's checkpoints: its `to`; under a server, with the job's id.",
    ),
]
Which = Annotated[
    str | None,
    typer.Argument(metavar="[WHICH]", help="A step, a generation (g7) or a pin's name; default: the newest."),
]


class ExportFormat(StrEnum):
    """The format of an export."""

    SAFETENSORS = "safetensors"
    HF = "hf"


@checkpoint.command()
def ls(to: To, *, as_json: Json = False) -> None:
    """List the generations: step, size, bytes added to storage, whether it was read back, and pins."""
    blobs = open_existing(to)
    found = audit.generations(blobs, read_entries(blobs))
    if as_json:
        terminal.print_json([GenerationDocument.model_validate(each) for each in found])
        return
    if not found:
        print(f"no checkpoints in {to}")
        return
    heads = ["GEN", "STEP", "AGE", "SIZE", "ADDED", "RANKS"]
    near = ["NEAR ONLY"] if any(each.commit.missing_levels for each in found) else []
    table = terminal.table(*heads, "VERIFIED", *near, "PIN", right=heads, folds=("PIN",))
    for each in found:
        table.add_row(
            f"g{each.commit.generation}",
            str(each.commit.step),
            terminal.since(each.at_us) if each.at_us else "–",
            format_bytes(each.commit.bytes),
            "unreadable" if each.stored_bytes is None else format_bytes(each.stored_bytes),
            str(each.world_size or "any"),
            "yes" if each.verified else "no",
            *(["yes" if each.commit.missing_levels else ""] if near else []),
            each.pin or "",
        )
    terminal.stdout().print(table)


@checkpoint.command()
def verify(
    to: To,
    which: Which = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="Check all generations, not only the newest.")] = False,
    repair: Annotated[bool, typer.Option("--repair", help="Rewrite each bad copy from an intact one.")] = False,
    as_json: Json = False,
) -> None:
    """Read and check every copy of every byte; exit with 52 if a generation cannot be read from any copy."""
    blobs = open_existing(to)
    entries = read_entries(blobs)
    live = live_commits(entries)
    chosen = audit.meant_for(blobs, live) if every and which is None else [audit.find(entries, which, blobs)]
    total_bytes = sum(generations.commit_of(entry).bytes for entry in chosen) * len(blobs.levels)
    with terminal.progress("verifying", total_bytes, *_BYTES, adds=True, quiet=as_json) as advance:
        checked = [
            audit.verify(blobs, entry, repair=repair, on_bytes=lambda n: advance(n * len(blobs.levels)))
            for entry in chosen
        ]
    if as_json:
        terminal.print_json([VerificationDocument.model_validate(each) for each in checked])
    for each in [] if as_json else checked:
        state = f"lost: {each.lost}" if each.lost else "intact"
        if each.bad and not each.lost:
            state += f", and {plural(len(each.bad), 'bad copy', 'bad copies')}"
            state += " repaired" if repair else " (--repair writes them again)"
        name = f"step {each.commit.step} (g{each.commit.generation})"
        print(f"{name}: {state}; {plural(each.chunks, 'chunk')}, {format_bytes(each.bytes)}")
        for level, why in each.bad:
            print(f"  {why} in {level}")
    if every and len(chosen) < len(live) and not as_json:
        print(f"not checked, since they are only meant to be in nearer destinations: {len(live) - len(chosen)} more")
    lost = [each for each in checked if each.lost]
    if lost:
        raise CorruptError(
            f"{len(lost)} of {len(checked)} generations are damaged in every copy; the newest of them: {lost[-1].lost}",
            hint="a job that starts here goes back to the newest generation that verifies",
        )


@checkpoint.command()
def diff(to: To, first: str, second: Which = None, *, as_json: Json = False) -> None:
    """Show which tensors differ between two generations, and the bytes that are stored once for both."""
    blobs = open_existing(to)
    one, two = _read(blobs, first), _read(blobs, second)
    try:
        found = audit.diff(blobs, one, two)
    except Damaged as damage:
        raise CorruptError(str(damage), hint="cordee checkpoint verify shows what is intact") from None
    if as_json:
        terminal.print_json(DiffDocument(first=one.step, second=two.step, **asdict(found)))
        return
    fraction = found.shared_bytes / found.second_bytes if found.second_bytes else 1
    equal = plural(found.same, "tensor is", "tensors are")
    print(f"step {one.step} and step {two.step}: {equal} equal, {len(found.changed)} differ")
    print(f"{format_bytes(found.shared_bytes)} of {format_bytes(found.second_bytes)} stored once ({fraction:.1%})")
    for sign, names in (("-", found.only_first), ("+", found.only_second), ("~", found.changed)):
        for name in names:
            print(f"{sign} {name}")


@checkpoint.command()
def pin(
    to: To,
    which: Which = None,
    *,
    name: Annotated[str, typer.Option(help="Name of the pin.")] = "pinned",
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
    as_json: Json = False,
) -> None:
    """Keep a generation whatever the job's `keep` says; safe beside a running job."""
    blobs = open_existing(to)
    log = Log.visit(blobs, nonce=secrets.token_hex(8))
    if re.fullmatch(r"g?\d+", name) or not re.fullmatch(r"[\w-]+", name):
        raise InputError(
            f"{name!r} cannot name a pin",
            hint="use letters, digits and dashes, but not only a number or g and a number",
        )
    commit = generations.commit_of(audit.find(log.entries, which, log.blobs))
    generations.pin(log, commit.generation, None if remove else name)
    if as_json:
        pin = None if remove else name
        terminal.print_json(PinDocument(generation=commit.generation, step=commit.step, pin=pin))
        return
    print(f"step {commit.step} (g{commit.generation}) is " + ("no longer pinned" if remove else f"pinned as {name}"))


@checkpoint.command()
def gc(
    to: To,
    *,
    keep: Annotated[str | None, typer.Option(help='Retire the rest: "3", "3, every 10" or "3, every 10, 7d".')] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove blobs that no generation needs; with --keep, retire generations too. Safe beside a running job."""
    wanted = None if keep is None else parse_keep(keep)
    blobs = open_existing(to)
    log = Log.visit(blobs, nonce=secrets.token_hex(8))
    if dry_run:
        try:
            retired, keys = generations.would_collect(log, blobs, keep=wanted)
        except Damaged as damage:
            raise CorruptError(
                f"{damage}, so it is not known which blobs it needs, and nothing would be removed"
            ) from None
        done = generations.Collected(retired, len(keys))
    else:
        done = generations.collect(log, blobs, keep=wanted)
    if as_json:
        terminal.print_json(CollectedDocument(dry_run=dry_run, retired=done.retired, deleted=done.deleted))
        return
    verb = "would be " if dry_run else ""
    gone = plural(len(done.retired), "generation")
    gone += f" ({', '.join(f'g{index}' for index in done.retired)})" if done.retired else ""
    print(f"{gone} {verb}retired, {plural(done.deleted, 'blob')} {verb}removed")


@checkpoint.command()
def export(
    to: To,
    which: Which = None,
    *,
    form: Annotated[
        ExportFormat, typer.Option("--to", help="Format: one safetensors file, or a folder for from_pretrained (hf).")
    ] = ExportFormat.SAFETENSORS,
    out: Annotated[Path, typer.Option(help="File or folder to write.")],
    of: Annotated[
        str | None,
        typer.Option("--object", help="Export only this object of the state.", show_default="all; hf: model"),
    ] = None,
    like: Annotated[Path | None, typer.Option(help="Copy config and tokenizer from this folder (hf).")] = None,
    as_json: Json = False,
) -> None:
    """Write a generation's tensors as safetensors; every byte is verified."""
    if like is not None and form is not ExportFormat.HF:
        raise InputError("--like goes with --to hf")
    blobs = open_existing(to)
    whole = _read(blobs, which)
    of = of or ("model" if form is ExportFormat.HF else None)
    size_bytes = transfer.exported_bytes(whole, of)
    try:
        with terminal.progress("writing", size_bytes, *_BYTES, adds=True, quiet=as_json) as advance:
            if form is ExportFormat.HF:
                paths = transfer.export_hf(blobs, whole, out, of=of, like=like, on_bytes=advance)
            else:
                paths = transfer.export_safetensors(blobs, whole, out, of=of, on_bytes=advance)
    except Damaged as damage:
        raise CorruptError(
            f"step {whole.step}: {damage}", hint="cordee checkpoint verify shows what is intact"
        ) from None
    if as_json:
        terminal.print_json(ExportDocument(step=whole.step, bytes=size_bytes, files=paths))
        return
    print(f"step {whole.step}: {format_bytes(size_bytes)} in {plural(len(paths), 'file')}")
    for path in paths:
        print(f"  {path}")


@checkpoint.command("import")
def import_(
    to: To,
    source: Annotated[Path, typer.Argument(help="A .safetensors file, or a folder of such files.")],
    *,
    of: Annotated[str, typer.Option("--object", help="Object of the state that the tensors belong to.")] = "model",
    step: Annotated[int, typer.Option(help="Step of the generation.")] = 0,
    name: Annotated[str | None, typer.Option("--pin", help="Pin the generation under this name.")] = None,
    as_json: Json = False,
) -> None:
    """Make the first generation of a destination from safetensors files."""
    blobs = open_blobs(to)
    size_bytes = sum(path.stat().st_size for path in ([source] if source.is_file() else source.glob("*.safetensors")))
    with terminal.progress("reading", size_bytes, *_BYTES, adds=True, quiet=as_json) as advance:
        made = transfer.import_safetensors(
            blobs, source, nonce=secrets.token_hex(8), of=of, step=step, on_bytes=advance
        )
    if name is not None:
        generations.pin(Log.visit(blobs, nonce=secrets.token_hex(8)), made.generation, name)
    if as_json:
        terminal.print_json(ImportDocument(generation=made.generation, step=made.step, bytes=made.bytes, pin=name))
        return
    print(
        f"step {made.step} (g{made.generation}): {format_bytes(made.bytes)}" + (f", pinned as {name}" if name else "")
    )


def _read(blobs: Blobs, which: str | None) -> Manifest:
    commit = generations.commit_of(audit.find(read_entries(blobs), which, blobs))
    try:
        return read_manifest(blobs, commit.manifest)
    except Damaged as damage:
        raise CorruptError(
            f"step {commit.step}: {damage}", hint="cordee checkpoint ls lists the other generations"
        ) from None
