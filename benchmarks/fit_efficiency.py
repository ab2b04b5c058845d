"""Writes the calibrated tables of `hardware/data/efficiency.toml`: `fit_efficiency.py CSV [--write]`.

Each chip's table is fitted on all its sources; its spread is that of errors on sources that a fit did not see, and with
`--spread` the only thing that is written.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path

from cordee.hardware.load import load_catalogue
from least_squares import FREEDOM, fit_table
from planner_time import chip_of, everything, predict_left_out, unseen_spread
from published import read_published
from step_cases import Case, Stack, is_unexplained, time_cases

DATA = Path(__file__).parents[1] / "src" / "cordee" / "hardware" / "data"
CHIPS = {"A100": "GA100", "H100": "GH100", "B200": "GB100"}


def calibrated_block(chip: str, cases: list[Case], as_of: str) -> str:
    """The TOML table of one chip."""
    stack, plain = Stack(cases), cases[0].gpu.uncalibrated
    table = fit_table(stack, plain, everything(stack))
    names = ", ".join(f'"{name}"' for name in sorted(set(stack.sources)))
    lines = [f"[chips.{chip}.calibrated]"]
    lines += [f"{name} = {getattr(table, name):.4g}" for name in FREEDOM]
    software = ", ".join(f'"{name}"' for name in table.software)
    lines += [f"spread = {spread_left_out(cases):.3g}", f"host_spread = {table.host_spread:.3g}"]
    lines += [f"software = [{software}]", f"fitted_on = [{names}]"]
    lines += [f'source = "benchmarks/fit_efficiency.py on {len(cases)} published step times"', f'as_of = "{as_of}"']
    return "\n".join(lines) + "\n"


def spread_left_out(cases: list[Case]) -> float:
    """The spread of one chip's sources, each predicted by a table that was fitted on the others, or by none."""
    stack, plain = Stack(cases), cases[0].gpu.uncalibrated
    ways = (predict_left_out(stack, plain)[:2], stack.predict_with_doubt(plain))
    return unseen_spread(stack, ways, everything(stack))


def main() -> None:
    """Fit, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path, nargs="+")
    parser.add_argument("--as-of", required=True, help="the month of the fit: 2026-11")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--spread", action="store_true", help="leave the tables as they are but for their spread")
    given = parser.parse_args()
    by_chip: dict[str, list[Case]] = defaultdict(list)
    for path in given.csv:
        for case in time_cases(read_published(path, load_catalogue())[0])[0]:
            if chip_of(case) in CHIPS and not is_unexplained(case):
                by_chip[CHIPS[chip_of(case)]].append(case)
    path = DATA / "efficiency.toml"
    text = path.read_text(encoding="utf-8")
    for chip, cases in sorted(by_chip.items()):
        if given.spread:
            before = rf"(\[chips\.{chip}\.calibrated\]\n(?:.+\n)*?spread = )[0-9.]+"
            text = re.sub(before, rf"\g<1>{spread_left_out(cases):.3g}", text)
            continue
        block = calibrated_block(chip, cases, given.as_of)
        print(block, flush=True)
        text = re.sub(rf"\[chips\.{chip}\.calibrated\]\n.*?(?=\n\[|\Z)", "", text, flags=re.DOTALL)
        head = re.search(rf"\[chips\.{chip}\]\n.*?(?=\n\[|\Z)", text, flags=re.DOTALL)
        assert head is not None, f"{path} has no chip {chip}"
        text = text[: head.end()].rstrip() + "\n\n" + block + "\n" + text[head.end() :].lstrip()
    if given.write:
        path.write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
