"""The time half of `planner_accuracy.py`: step times predicted without calibration, and with tables that never saw the
source they are judged on; the constant-HFU line beside them; regret and rank correlation among layouts of one model.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from cordee.hardware.catalog import ChipEfficiency
from cordee.plan.step import INTERVAL_SIGMAS
from least_squares import FREEDOM, fit_table, spread_of
from published import Published
from step_cases import Case, Stack, time_cases

ENOUGH_FOR_A_LINE = 8
ENOUGH_TO_RANK = 3
_SHOWN = ("median", "mape", "bias", "worst")
# GPUs that share a chip share a table.
CHIPS = {
    "A100-40": "A100",
    "A100-80": "A100",
    "H200": "H100",
    "GB200": "B200",
    "B300": "B200",
    "GB300": "B200",
    "H800": "H100",
}


def chip_of(case: Case) -> str:
    """The GPU type whose table a case is predicted with."""
    return CHIPS.get(case.gpu.name, case.gpu.name)


def time_report(runs: Sequence[Published], held_out: Collection[str] = ()) -> dict[str, Any]:
    """Per GPU type and source: both predictions, the line to beat, coverage of the interval, ranking.

    Sources that are held out are scored, and no fit sees them; nor does it rows whose time has a cause that is not
    modelled.
    """
    cases, left_out = time_cases(runs)
    by_chip: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_chip[chip_of(case)].append(case)
    chips = {chip: _chip_report(of_chip, held_out) for chip, of_chip in sorted(by_chip.items())}
    return {"cases": len(cases), "left_out": left_out, "chips": chips}


def _chip_report(cases: Sequence[Case], held_out: Collection[str] = ()) -> dict[str, Any]:
    stack = Stack(cases)
    plain = cases[0].gpu.uncalibrated
    uncalibrated = stack.predict(plain)
    calibrated, doubts, tables = predict_left_out(stack, plain, held_out)
    seen = ~np.isin(stack.sources, list(held_out))
    plain_doubt = stack.predict_with_doubt(plain)[1]
    both = ((calibrated, doubts), (uncalibrated, plain_doubt))
    report: dict[str, Any] = {"sources": {}, "ranking": {}, "tables": {k: asdict(v) for k, v in tables.items()}}
    for source in sorted(set(stack.sources)):
        own = stack.sources == source
        mine = [case for case, is_own in zip(cases, own, strict=True) if is_own]
        others = (stack.sources != source) & seen
        spread = unseen_spread(stack, both, others) if others.any() else plain.spread
        row = {
            "n": int(own.sum()),
            "uncalibrated": _errors(uncalibrated[own], stack.measured[own]),
            "uncalibrated_coverage": _coverage(
                uncalibrated[own], stack.measured[own], np.hypot(plain.spread, plain_doubt[own])
            ),
            "fitted_on": sorted(set(stack.sources[others])),
            "calibrated": _errors(calibrated[own], stack.measured[own]) if others.any() else None,
            "one_constant": _one_constant(calibrated[own], stack.measured[own]),
            "spread": spread,
            "coverage": _coverage(calibrated[own], stack.measured[own], np.hypot(spread, doubts[own])),
            "constant_hfu": _constant_hfu(mine),
        }
        report["sources"][source] = row
        for precision in sorted({case.training.precision for case in mine}):
            at = np.array([case.source == source and case.training.precision == precision for case in cases])
            row[precision] = {
                "n": int(at.sum()),
                "uncalibrated": _errors(uncalibrated[at], stack.measured[at]),
                "calibrated": _errors(calibrated[at], stack.measured[at]),
                "constant_hfu": _constant_hfu([case for case, is_at in zip(cases, at, strict=True) if is_at]),
            }
        for name, predicted in (("uncalibrated", uncalibrated), ("calibrated", calibrated)):
            ranked = _ranking(mine, predicted[own])
            if ranked:
                report["ranking"].setdefault(source, {})[name] = ranked
    return report


def everything(stack: Stack) -> np.ndarray:
    """All rows of a stack."""
    return np.ones(len(stack.measured), dtype=bool)


def predict_left_out(
    stack: Stack, plain: ChipEfficiency, held_out: Collection[str] = ()
) -> tuple[np.ndarray, np.ndarray, dict[str, ChipEfficiency]]:
    """Each source predicted by a table that was fitted on the others of its GPU type; alone, by the uncalibrated.

    With the deviation of each that the planner knows of beyond the table's spread.
    """
    predicted, doubts, tables = np.empty(len(stack.measured)), np.empty(len(stack.measured)), {}
    seen, known = ~np.isin(stack.sources, list(held_out)), dict[str, ChipEfficiency]()
    for source in sorted(set(stack.sources)):
        own = stack.sources == source
        others = ~own & seen & ~stack.unexplained
        key = source if seen[own].any() else ""  # one table for all that are held out
        if key not in known:
            known[key] = fit_table(stack, plain, others, tuple(FREEDOM)) if others.any() else plain
        tables[source] = known[key]
        seconds, beyond = stack.predict_with_doubt(tables[source])
        predicted[own], doubts[own] = seconds[own], beyond[own]
    return predicted, doubts, tables


def unseen_spread(stack: Stack, ways: Sequence[tuple[np.ndarray, np.ndarray]], rows: np.ndarray) -> float:
    """The spread of these rows, predicted and doubted in one way or another (fitted on other sources, not fitted).

    It is that of the worse way: how far a fit moves the table is not known either.
    """
    measured, sources = stack.measured[rows], stack.sources[rows]
    return max(spread_of(np.log(measured / seconds[rows]), doubts[rows], sources) for seconds, doubts in ways)


def _errors(predicted: np.ndarray, measured: np.ndarray) -> dict[str, float]:
    error = predicted / measured - 1
    worst = float(error[np.abs(error).argmax()])
    middle = float(np.median(np.abs(error)))
    return {"median": middle, "mape": float(np.abs(error).mean()), "bias": float(error.mean()), "worst": worst}


def _one_constant(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean absolute error once the median ratio of the source is taken out."""
    constant = np.exp(np.median(np.log(measured / predicted)))
    return float(np.abs(predicted * constant / measured - 1).mean())


def _coverage(predicted: np.ndarray, measured: np.ndarray, spread: np.ndarray) -> float:
    """The share of measurements inside the 90 % interval."""
    return float((np.abs(np.log(measured / predicted)) <= INTERVAL_SIGMAS * spread).mean())


def _constant_hfu(cases: Sequence[Case]) -> float | None:
    """The line to beat: every row at the mean FLOP rate of the source's other rows."""
    if len(cases) < ENOUGH_FOR_A_LINE:
        return None
    flop = np.array([case.flop_per_gpu / case.gpu.peak_flop_per_s(case.training.precision) for case in cases])
    measured = np.array([case.measured_s for case in cases])
    rates = flop / measured
    others = (rates.sum() - rates) / (len(rates) - 1)
    return float(np.abs(flop / others / measured - 1).mean())


def _ranking(cases: Sequence[Case], predicted: np.ndarray) -> dict[str, Any] | None:
    """Regret and Spearman over groups of layouts of one model on one number of GPUs with one batch.

    `by_gpus` has the number of groups and their mean regret for each number of GPUs.
    """
    groups: dict[Any, dict[Any, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for case, guess in zip(cases, predicted, strict=True):
        same = (case.shape, case.layout.gpus, case.training, case.gpu.name)
        groups[same][case.layout].append((float(guess), case.measured_s))
    regrets, ranks, sizes, random = [], [], [], []
    by_gpus: dict[int, list[float]] = defaultdict(list)
    for (_, gpus, _, _), layouts in groups.items():
        if len(layouts) < ENOUGH_TO_RANK:
            continue
        pairs = np.array([np.mean(found, axis=0) for found in layouts.values()])
        best = pairs[:, 1].min()
        regrets.append(float(pairs[pairs[:, 0].argmin(), 1] / best - 1))
        by_gpus[gpus].append(regrets[-1])
        random.append(float(pairs[:, 1].mean() / best - 1))
        ranks.append(_spearman(pairs[:, 0], pairs[:, 1]))
        sizes.append(len(pairs))
    if not sizes:
        return None
    return {
        "groups": len(sizes),
        "layouts": int(sum(sizes)),
        "regret": float(np.mean(regrets)),
        "random_regret": float(np.mean(random)),
        "worst_regret": float(max(regrets)),
        "spearman": float(np.average(ranks, weights=sizes)),
        "by_gpus": {gpus: (len(found), float(np.mean(found))) for gpus, found in sorted(by_gpus.items())},
    }


def _spearman(left: np.ndarray, right: np.ndarray) -> float:
    def ranked(values: np.ndarray) -> np.ndarray:
        return np.array([(values < value).sum() + ((values == value).sum() - 1) / 2 for value in values])

    a, b = ranked(left), ranked(right)
    if a.std() == 0 or b.std() == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _told_by(by_gpus: dict[int, tuple[int, float]]) -> str:
    return ", ".join(f"{gpus}: {100 * regret:.1f}" for gpus, (_, regret) in by_gpus.items())


def print_time(report: dict[str, Any]) -> None:
    """The time half as tables, one for each GPU type."""
    print(f"\nTIME  (predicted - measured) / measured, %; {report['cases']} cases")
    for reason, count in report["left_out"].items():
        print(f"  not scored, {count}: {reason}")
    percent: Callable[[float | None], str] = lambda v: "     -" if v is None else f"{100 * v:6.1f}"  # noqa: E731
    for chip, found in report["chips"].items():
        print(f"\n{chip}: tables fitted leave-one-source-out; interval 90 %")
        print(
            f"{'source':40} {'n':>4} |{'uncalibrated':>28} |{'calibrated':>28} |{'const':>6} |{'HFU':>6} |{'cover':>6}"
        )
        keys = "median   MAPE   bias  worst"
        print(f"{'':45} | {keys} | {keys} |  (one) | (line) | (90 %)")
        for source, row in found["sources"].items():
            lines = [(source, row)] + [
                (f"  {p}", row[p]) for p in ("bf16", "fp16", "fp8", "fp32") if p in row and row[p]["n"] < row["n"]
            ]
            for name, one in lines:
                plain = " ".join(percent(one["uncalibrated"][key]) for key in _SHOWN)
                fitted = one.get("calibrated") or dict.fromkeys(_SHOWN)
                shown = " ".join(percent(fitted[key]) for key in _SHOWN)
                tail = " |".join(percent(one.get(key)) for key in ("one_constant", "constant_hfu", "coverage"))
                print(f"{name[:40]:40} {one['n']:4d} | {plain} | {shown} | {tail}")
        for source, kinds in found["ranking"].items():
            for kind, one in kinds.items():
                print(
                    f"  ranking, {source[:38]}, {kind}: {one['groups']} groups, {one['layouts']} layouts: regret "
                    f"{100 * one['regret']:.1f} % (random {100 * one['random_regret']:.1f}, worst "
                    f"{100 * one['worst_regret']:.1f}), Spearman {one['spearman']:.2f}; "
                    f"by GPUs {_told_by(one['by_gpus'])}"
                )
        told = ", ".join(sorted(found["sources"]))
        print(f"  each source is predicted by a table fitted on the others of: {told}")
