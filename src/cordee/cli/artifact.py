"""The verbs `cordee artifact`: push and pull versions of models and data, name them, compare them, clean up."""

import secrets
import shutil
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.progress import DownloadColumn, TransferSpeedColumn

from cordee.answers.artifacts import CollectRequest
from cordee.artifacts import ArtifactClient, PushWanted, pushed_bytes
from cordee.cli import terminal
from cordee.cli.artifact_text import page, print_diff, print_list, print_version
from cordee.cli.plan_more import write_page
from cordee.cli.terminal import Home, Json
from cordee.errors import CorruptError, InputError
from cordee.storage.registry import oci, signature
from cordee.storage.registry.manifest import KINDS, Kind
from cordee.units import format_bytes, plural

_BYTES = (DownloadColumn(), TransferSpeedColumn())

artifact = typer.Typer(no_args_is_help=True, add_completion=False)

Ref = Annotated[
    str, typer.Argument(metavar="REF", help="NAME, NAME:VERSION, NAME:TAG or NAME@DIGEST; NAME alone: its newest.")
]


@artifact.command()
def push(
    source: Annotated[Path, typer.Argument(help="A file, a folder, or an OCI image layout.")],
    name: Annotated[str, typer.Argument(help="Name, such as llama-sft or team/llama-sft.")],
    *,
    kind: Annotated[str | None, typer.Option(help=f"One of {', '.join(KINDS)}.", show_default="by the files")] = None,
    base: Annotated[
        str,
        typer.Option(
            metavar="REF",
            help="Store the difference to this version, such as a fine-tuned model's base; none: store all.",
            show_default="the name's base so far",
        ),
    ] = "",
    made_from: Annotated[
        list[str] | None, typer.Option("--from", metavar="REF", help="Version that it was made from; repeatable.")
    ] = None,
    job: Annotated[str, typer.Option(help="Job that made it.", show_default="the one in which this runs")] = "",
    queue: Annotated[
        str, typer.Option(help="Queue whose roles decide who sees it.", show_default="as before, or that of the job")
    ] = "",
    tag: Annotated[str, typer.Option(help="Tag that names it from now on.")] = "",
    note: Annotated[str, typer.Option(help="A note on the version.")] = "",
    sign: Annotated[Path | None, typer.Option(metavar="KEY", help="Sign it with this private key.")] = None,
    allow_pickles: Annotated[
        bool, typer.Option("--allow-pickles", help="Scan files that run code when loaded, instead of refusing them.")
    ] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Make a version of a file or a folder."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"{kind!r} is no kind of artifact", hint=f"it is one of {', '.join(KINDS)}")
    wanted = PushWanted(
        kind=cast("Kind | None", kind),
        base=base,
        parents=tuple(made_from or ()),
        job=job,
        queue=queue,
        note=note,
        tag=tag,
        key=sign,
        allow_pickles=allow_pickles,
    )
    total_bytes = pushed_bytes(source)
    with (
        terminal.connect(home) as client,
        terminal.progress("pushing", total_bytes, *_BYTES, adds=True, quiet=as_json) as advance,
    ):
        made = ArtifactClient(client).push(source, name, wanted, advance)
    if as_json:
        terminal.print_json(made.version)
        return
    what = "" if made.is_new else " already has this content"
    sent = f"{format_bytes(made.written_bytes)} written of {format_bytes(made.version.size_bytes)}"
    print(f"{made.version.ref}{what}: {sent}, {made.version.digest[:12]}")


@artifact.command()
def pull(
    ref: Ref,
    folder: Annotated[Path | None, typer.Argument(help="New folder.", show_default="the name's last part")] = None,
    *,
    key: Annotated[str, typer.Option(metavar="PUBLIC", help="Accept it only if this public key has signed it.")] = "",
    as_oci: Annotated[bool, typer.Option("--oci", help="Write an OCI image layout, for oras and skopeo.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write the files of a version into a new folder: all of them, or none."""
    out = folder or Path(ref.partition(":")[0].partition("@")[0].rpartition("/")[2])
    with terminal.connect(home) as client:
        artifacts = ArtifactClient(client)
        size_bytes = artifacts.show(ref).size_bytes
        target = out.with_name(f".{out.name}.{secrets.token_hex(4)}.files") if as_oci else out
        with terminal.progress("pulling", size_bytes, *_BYTES, adds=True, quiet=as_json) as advance:
            version = artifacts.pull(ref, target, key, advance)
        if as_oci:
            try:
                notes = {"org.opencontainers.image.version": str(version.version), "dev.cordee.digest": version.digest}
                oci.write_layout(target, out, str(version.version), notes)
            finally:
                shutil.rmtree(target, ignore_errors=True)
    if as_json:
        terminal.print_json(version)
    else:
        print(f"{version.ref} is in {out}: {format_bytes(version.size_bytes)}, verified")


@artifact.command()
def ls(
    name: Annotated[str, typer.Argument(help="All versions of this name.", show_default="the newest of each")] = "",
    *,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List artifacts, or the versions of one."""
    with terminal.connect(home) as client:
        found = ArtifactClient(client).versions(name)
    if as_json:
        terminal.print_json(found)
    elif found:
        print_list(terminal.stdout(), found)
    else:
        print("no artifacts yet; make one: cordee artifact push FOLDER NAME")


@artifact.command()
def show(
    ref: Ref,
    *,
    html: Annotated[Path | None, typer.Option(help="Write a page with the lineage.")] = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Show a version: the job, code and dollars that made it, its lineage and its history."""
    with terminal.connect(home) as client:
        found = ArtifactClient(client).show(ref)
    if html is not None:
        write_page(html, page(found))
    if as_json:
        terminal.print_json(found)
    else:
        print_version(terminal.stdout(), found)


@artifact.command()
def tag(
    ref: Ref,
    word: Annotated[str, typer.Argument(metavar="TAG", help="The tag.")],
    *,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the tag.")] = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Give a version a tag; a tag names one version at a time."""
    with terminal.connect(home) as client:
        found = ArtifactClient(client).tag(ref, word, remove=remove)
    if as_json:
        terminal.print_json(found)
    else:
        print(f"{found.name} has no tag {word} any more" if remove else f"{word} is {found.ref}")


@artifact.command()
def stage(
    ref: Ref,
    word: Annotated[str, typer.Argument(metavar="STAGE", help="The stage, such as production; none: in no stage.")],
    *,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Say to which stage a version has come; several versions may be in one."""
    with terminal.connect(home) as client:
        found = ArtifactClient(client).stage(ref, "" if word == "none" else word)
    if as_json:
        terminal.print_json(found)
    else:
        print(f"{found.ref} is in {found.stage}" if found.stage else f"{found.ref} is in no stage")


@artifact.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="REF", help="The version before.")],
    second: Annotated[str, typer.Argument(metavar="REF", help="The version after.")],
    *,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Compare two versions: files, and tensor by tensor."""
    with terminal.connect(home) as client, terminal.waiting("comparing"):
        found = ArtifactClient(client).diff(first, second)
    if as_json:
        terminal.print_json(found)
    else:
        print_diff(found)


@artifact.command()
def verify(ref: Ref, *, home: Home = None, as_json: Json = False) -> None:
    """Read every byte of a version again; exit 52 if something is missing or was altered."""
    with terminal.connect(home) as client:
        artifacts = ArtifactClient(client)
        version = artifacts.show(ref)
        with terminal.progress("verifying", version.size_bytes, *_BYTES, adds=True, quiet=as_json) as advance:
            problems = artifacts.verify(ref, advance)
    if as_json:
        terminal.print_json({"ref": version.ref, "problems": problems})
    else:
        print("\n".join(problems) if problems else f"{version.ref} is whole: {format_bytes(version.size_bytes)} read")
    if problems:
        raise CorruptError(f"{plural(len(problems), 'chunk')} of {version.ref} cannot be read", hint="push it again")


@artifact.command()
def rm(
    ref: Ref,
    *,
    why: Annotated[str, typer.Option(help="The reason, for the history.")] = "",
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Remove a version that no tag, no stage and no other version needs; `gc` frees its bytes."""
    with terminal.connect(home) as client:
        found = ArtifactClient(client).remove(ref, why)
    if as_json:
        terminal.print_json(found)
    else:
        print(f"{found.ref} is removed; `cordee artifact gc` frees its bytes")


@artifact.command()
def gc(
    *,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Remove all but the newest N versions of each name, and those in use.")
    ] = None,
    name: Annotated[str, typer.Option(help="With --keep: only versions of this name.")] = "",
    yes: terminal.Yes = False,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Free the bytes that no version needs; without --yes only show them."""
    wanted = CollectRequest(keep=keep, name=name, dry=not yes)
    with terminal.connect(home) as client:
        found = ArtifactClient(client).collect(wanted)
    if as_json:
        terminal.print_json(found)
        return
    if found.versions:
        print_list(terminal.stdout(), found.versions)
    would = "would free" if found.dry else "freed"
    more = "; add --yes to do it" if found.dry and (found.chunks or found.versions) else ""
    print(
        f"{would} {format_bytes(found.freed_bytes)} in {plural(found.chunks, 'chunk')}"
        f" and {plural(len(found.versions), 'version')}{more}"
    )


@artifact.command("key")
def make_key(
    path: Annotated[Path, typer.Argument(help="File of a private key.")],
    *,
    make: Annotated[bool, typer.Option("--make", help="Make a new key.")] = False,
) -> None:
    """Print the public key of a private one, with which `pull --key` checks signatures."""
    print(signature.make_key(path) if make else signature.public_key(path))
