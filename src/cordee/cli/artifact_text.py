"""Artifacts as text and as a page: versions, lineage, differences."""

from collections.abc import Sequence

from rich.console import Console

from cordee.answers.artifacts import VersionDetailView, VersionView
from cordee.answers.lineage import lineage_of, name_of, used
from cordee.cli import terminal
from cordee.storage.registry.compare import ArtifactDiff, Differences
from cordee.units import format_bytes, plural
from cordee.view.lineage import lineage_html
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html

_NAMES_SHOWN = 10


def print_list(console: Console, found: Sequence[VersionView]) -> None:
    """Print versions, one a line."""
    jobs = ["JOB"] if any(each.job_id for each in found) else []
    marks = ["TAGS"] if any(each.tags or each.stage for each in found) else []
    columns = ("REF", "KIND", "SIZE", "STORED", "AGE", "BY", "QUEUE", *marks, *jobs)
    table = terminal.table(*columns, right=("SIZE", "STORED", "AGE"), folds=("REF",))
    for each in found:
        words = [*each.tags, *([f"({each.stage})"] if each.stage else [])]
        table.add_row(
            each.ref,
            each.kind,
            format_bytes(each.size_bytes),
            format_bytes(each.stored_bytes),
            terminal.since(each.pushed_us),
            each.by,
            each.queue,
            *([" ".join(words)] if marks else []),
            *([each.job_id or ""] if jobs else []),
        )
    console.print(table)


def facts_of(found: VersionDetailView) -> list[tuple[str, str]]:
    """Return what is known of a version as (name, text)."""
    stored = f"{format_bytes(found.stored_bytes)} written by its push"
    rows = [
        ("version", f"{found.ref}, {found.kind}, {found.digest}"),
        ("size", f"{format_bytes(found.size_bytes)}, {stored}"),
        ("pushed", f"{terminal.since(found.pushed_us)} ago by {found.by}"),
    ]
    optional = (
        ("tags", ", ".join(found.tags)),
        ("stage", found.stage),
        ("queue", found.queue),
        ("signed by", found.key if found.signed else ""),
        ("note", found.note),
        ("used by", ", ".join(found.used_by)),
    )
    rows += [(name, text) for name, text in optional if text]
    if found.maker is not None:
        maker = found.maker
        code = f", commit {maker.commit[:12]}" if maker.commit else ""
        rows.append(("made by", f"job {maker.job_id} of {maker.owner}, {maker.state}{code}"))
        if maker.command:
            rows.append(("command", maker.command))
        plan = f"{maker.layout}, " if maker.layout else ""
        steps = f"{plural(maker.steps, 'step')}, " if maker.steps is not None else ""
        rows.append(("it used", f"{plan}{steps}{used(maker)}"))
    elif found.job_id:
        rows.append(("made by", f"job {found.job_id}"))
    rows += [(each.how, name_of(each)) for each in found.lineage]
    return rows


def print_version(console: Console, found: VersionDetailView) -> None:
    """Print a version with its lineage and history."""
    rows = facts_of(found)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"{name:<{width}}  {text}", highlight=False, markup=False, soft_wrap=True)
    console.print("\nhistory, the newest first", highlight=False)
    for change in found.history[:_NAMES_SHOWN]:
        console.print(
            f"  {terminal.since(change.at_us):>8}  {change.by}: {change.what}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if len(found.history) > _NAMES_SHOWN:
        console.print(f"  and {len(found.history) - _NAMES_SHOWN} more: --json", highlight=False)


def print_diff(found: ArtifactDiff) -> None:
    """Print how the second version differs from the first."""
    for what, each in (("tensor", found.tensors), ("file", found.files)):
        if each.added or each.removed or each.changed or each.same:
            print(f"{plural(each.same, what)} the same{_changes(what, each)}")
    shared = found.shared_bytes / found.second_bytes if found.second_bytes else 1.0
    print(f"{format_bytes(found.shared_bytes)} of {format_bytes(found.second_bytes)} are shared ({shared:.0%})")


def page(found: VersionDetailView) -> str:
    """Return a page about a version: what is known of it, its lineage as a drawing, and its history."""
    drawing = lineage_html(lineage_of(found), f"lineage of {found.ref}")
    facts = table_html(("Fact", "Value"), facts_of(found))
    history = table_html(
        ("Age", "By", "Change"), [(terminal.since(each.at_us), each.by, each.what) for each in found.history]
    )
    sections = [
        Section("Lineage", "What it was made from, what made it, and what came of it.", [drawing]),
        Section("Version", "What is known of it.", [facts]),
        Section("History", "Changes of its name, the newest first.", [history]),
    ]
    lead = found.note or f"{found.kind} of {format_bytes(found.size_bytes)}, pushed by {found.by}"
    return report_html(HtmlReport(title=found.ref, lead=lead, sections=sections))


def _changes(what: str, each: Differences) -> str:
    parts = []
    for word, names in (("changed", each.changed), ("added", each.added), ("removed", each.removed)):
        if names:
            more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
            parts.append(f"\n  {word}: {', '.join(names[:_NAMES_SHOWN])}{more}")
    return "".join(parts)
