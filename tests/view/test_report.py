"""The report is one file that fetches nothing, escapes everything, and shows a failed claim as failed."""

import re
from html.parser import HTMLParser

from cordee.view.markup import text
from cordee.view.money import MoneyRow, cases_html, gpu_time, money_html
from cordee.view.report import Claim, HtmlReport, Section, report_html

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Balance(HTMLParser):
    """Fails on a tag that closes nothing or is never closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def page(evil: str = "plain") -> str:
    rows = [MoneyRow(evil, {"useful": 3_000_000, "lost": 1_000_000}, 2_990_000), MoneyRow("free", {"stall": 5})]
    figures = [money_html(rows), cases_html([(evil, evil, 80, 20)], worst_micro_usd=100)]
    claims = [Claim(evil, evil), Claim("this one fails", "1 is not 2", holds=False)]
    section = Section(evil, evil, figures=figures, claims=claims, notes=[evil])
    return report_html(HtmlReport(evil, evil, [section], facts=[(evil, evil)], footer=evil))


def test_tags_are_balanced_and_words_survive() -> None:
    parser = Balance()
    parser.feed(page())
    assert parser.open == []
    words = " ".join(parser.words)
    for expected in ("this one fails", "1 is not 2", "✗", "✓", "no price", "$2.99", "4.0 GPU-s"):
        assert expected in words


def test_users_words_are_escaped_everywhere() -> None:
    evil = '</style><script>alert("x")</script>'
    html = page(evil)
    assert "<script" not in html
    assert html.count(text(evil)) >= 10


def test_nothing_comes_from_elsewhere() -> None:
    html = page()
    assert not re.findall(r"https?://|src=|@import|<link|url\((?!#)", html)


def test_it_knows_dark_and_paper_and_small_screens() -> None:
    html = page()
    for query in ("prefers-color-scheme:dark", "@media print", "max-width:640px", "width=device-width"):
        assert query in html


def test_bars_of_a_row_fill_it_exactly() -> None:
    html = money_html([MoneyRow("a", {"useful": 1, "lost": 2, "stall": 1})])
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", html)]
    assert widths == [25.0, 25.0, 50.0]


def test_gpu_time_keeps_its_unit() -> None:
    assert [gpu_time(us) for us in (0, 1_500_000, 3_600_000_000)] == ["–", "1.5 GPU-s", "1.00 GPU-h"]
