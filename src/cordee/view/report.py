"""One HTML file that holds everything it shows: no script, no font, no image from elsewhere.

It reads well in light and in dark, on a telephone and on paper. It knows no job and no event: its caller does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.view.markup import SPAN_COLOURS, palette_css, text


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that was checked while the report was made."""

    says: str
    measured: str
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the story. `figures` are HTML of this room's own making; all else is plain text."""

    title: str
    lead: str
    figures: Sequence[str] = ()
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The whole page. `facts` stand large on top: (number, what it is)."""

    title: str
    lead: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = ()
    footer: str = ""


def report_html(report: Report) -> str:
    """The page, self-contained."""
    facts = "".join(f"<div><b>{text(number)}</b><span>{text(what)}</span></div>" for number, what in report.facts)
    sections = "".join(_section(number, section) for number, section in enumerate(report.sections, start=1))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(report.title)}</title><style>{palette_css()}{_CSS}{_fills()}</style></head><body>"
        f"<header>{_MARK}<h1>{text(report.title)}</h1><p>{text(report.lead)}</p></header>"
        f'<main>{f"""<div class="facts">{facts}</div>""" if facts else ""}{sections}</main>'
        f"<footer>{text(report.footer)}</footer></body></html>\n"
    )


def _section(number: int, section: Section) -> str:
    figures = "".join(f"<figure>{figure}</figure>" for figure in section.figures)
    claims = "".join(_claim(claim) for claim in section.claims)
    notes = "".join(f"<li>{text(note)}</li>" for note in section.notes)
    return (
        f'<section><h2><span class="number">{number}</span>{text(section.title)}</h2><p>{text(section.lead)}</p>'
        f"{figures}{_list('claims', claims)}{_list('notes', notes)}</section>"
    )


def _list(name: str, items: str) -> str:
    return f'<ul class="{name}">{items}</ul>' if items else ""


def _claim(claim: Claim) -> str:
    sign, name = ("✓", "holds") if claim.holds else ("✗", "fails")
    return (
        f'<li class="{name}"><i aria-label="{name}">{sign}</i><div>{text(claim.says)}'
        f"<small>{text(claim.measured)}</small></div></li>"
    )


def _fills() -> str:
    return "".join(f".stack .{name},.dot.{name}{{background-color:var(--{name})}}" for name in SPAN_COLOURS)


_MARK = (
    '<svg class="peak" viewBox="0 0 64 40" aria-hidden="true"><path d="M2 38L24 8l9 12 7-9 22 27z"/>'
    '<path class="rope" d="M8 36C18 24 22 26 25 20S34 24 40 15"/><circle cx="25" cy="20" r="2.4"/>'
    '<circle cx="40" cy="15" r="2.4"/></svg>'
)

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
 font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
header,main,footer{max-width:1120px;margin:0 auto;padding:0 24px}
header{padding-top:48px;padding-bottom:8px}
header p{max-width:46em;color:var(--soft);font-size:18px;margin:.4em 0 0}
.peak{width:64px;fill:none;stroke:var(--ink);stroke-width:2;stroke-linejoin:round}
.peak .rope{stroke:var(--accent);stroke-width:1.6;fill:none}.peak circle{fill:var(--accent);stroke:none}
h1{font-size:clamp(28px,4vw,42px);line-height:1.15;letter-spacing:-.02em;margin:.3em 0 0;font-weight:700}
h2{font-size:22px;letter-spacing:-.01em;margin:0 0 .3em;display:flex;gap:12px;align-items:center}
.number{flex:none;width:30px;height:30px;border-radius:50%;background:var(--ink);color:var(--paper);font-size:15px;
 display:grid;place-items:center;letter-spacing:0}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px;margin:26px 0 6px}
.facts div{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:16px 18px}
.facts b{display:block;font-size:27px;line-height:1.2;letter-spacing:-.02em;font-variant-numeric:tabular-nums}
.facts span{color:var(--soft);font-size:14px}
section{background:var(--card);border:1px solid var(--rule);border-radius:14px;padding:26px 28px;margin:20px 0}
section>p{max-width:50em;margin:.2em 0 1em}
figure{margin:18px 0 6px;overflow-x:auto}
figure svg{display:block;min-width:640px}
.claims,.notes{list-style:none;margin:20px 0 0;padding:0}
.claims{display:grid;border-top:1px solid var(--rule);padding-top:14px;
 grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:2px 28px}
.claims li{display:flex;gap:11px;padding:5px 0}
.claims i{flex:none;font-style:normal;width:22px;height:22px;border-radius:50%;display:grid;
 place-items:center;font-size:13px;font-weight:700;color:var(--card);background:var(--useful);margin-top:2px}
.claims .fails i{background:var(--lost)}
small{display:block;color:var(--soft);font-size:13.5px;font-variant-numeric:tabular-nums}
.notes li{color:var(--soft);font-size:14px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:9px 10px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
thead th{color:var(--soft);font-weight:500;font-size:13px}
tbody th,th:first-child,td:first-child{text-align:left}tbody th{font-weight:600}
td.share,th.share{width:30%;min-width:150px;text-align:left}
.stack{display:flex;height:16px;border-radius:4px;overflow:hidden;background:var(--idle)}
.stack i,.dot{display:block}.dot{display:inline-block;width:9px;height:9px;border-radius:3px;margin-right:6px}
.cases{display:grid;gap:15px}
.case p{margin:0 0 4px;display:flex;flex-wrap:wrap;gap:0 10px}.case p span{color:var(--soft)}
.case .stack{height:22px;background:none;border-radius:0;align-items:center}.case .stack i{height:100%;min-width:1px}
.case .stack i:first-child{border-radius:4px 0 0 4px}
.case .stack b{padding-left:9px;font-variant-numeric:tabular-nums;line-height:1}
.stack .lost{background-image:repeating-linear-gradient(45deg,transparent 0 5px,rgba(255,255,255,.28) 5px 7px)}
footer{color:var(--soft);font-size:13.5px;padding-top:8px;padding-bottom:44px}
@media(max-width:640px){section{padding:20px 16px}header,main,footer{padding-left:14px;padding-right:14px}}
@media print{body{background:none;font-size:12px}
section{break-inside:avoid;padding:14px 0;border:0;border-top:1px solid var(--rule);border-radius:0}
figure,.wide{overflow:visible}figure svg{min-width:0}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
