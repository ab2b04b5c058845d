"""The tables of `cordee serve tune`, at the width of a terminal."""

import pytest
from rich.console import Console

from cordee.cli import terminal
from cordee.cli.tune_text import TuningDocument, print_tuning, trial_line
from cordee.plan.serving.tuning import Change
from cordee.serve.policy.tuning import Interval, Measured, Round, Trial, Tuning

ROUND = Round(32, 0, 2.0, 16_384, 2048, (0.08,) * 32, (0.004,) * 32)
PLAIN = Measured((ROUND,) * 5, ("a",), ("a",), slots=4, kv_tokens=16_384, usd_per_hour=2.5)
SLOTS = Trial(
    Change("8 slots", {"--parallel": 8, "--ctx-size": 32_768}, lossless=True, gain=1.6), True, "", PLAIN,
    Interval(0.41, 0.45, 0.49), 1.0,
)  # fmt: skip
CACHE = Trial(
    Change("KV cache in q8_0", {}, lossless=False), False, "changes answers: keep it with --allow-lossy", PLAIN,
    Interval(0.02, 0.06, 0.1), 0.883,
)  # fmt: skip
LOOK_UP = Trial(Change("n-gram look-up", {}, lossless=True), False, "not tried: give --prompts")


@pytest.mark.parametrize("columns", [80, 120])
def test_tables_fit_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "stdout", lambda: Console(width=columns, color_system=None))
    found = Tuning(PLAIN, (SLOTS, CACHE, LOOK_UP), SLOTS.change.flags, PLAIN, Interval(0.38, 0.42, 0.46))
    print_tuning(TuningDocument.of("chat", found, 3), dry_run=False)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= columns
    words = " ".join(out.split())
    assert "8 slots +60 % +45 % (+41 to +49) yes" in words and "– – no: not tried: give --prompts" in words
    assert (
        "+42 % (+38 to +46) tokens a second in all; chat is updated to revision 3: parallel=8, ctx-size=32768" in words
    )
    assert ("P99" in words) == (columns == 120)


def test_a_dry_run_says_how_to_keep_what_pays(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"--parallel": 8, "--no-cache-prompt": False}
    found = Tuning(PLAIN, (SLOTS,), flags, PLAIN, Interval(0.38, 0.42, 0.46))
    print_tuning(TuningDocument.of("chat", found, None), dry_run=True)
    assert "cordee serve update chat --flag 'parallel=8' --flag 'no-cache-prompt=false'" in capsys.readouterr().out
    print_tuning(TuningDocument.of("chat", Tuning(PLAIN, (CACHE,), {}), None), dry_run=True)
    assert "chat stays as it is: nothing that was tried pays" in capsys.readouterr().out
    assert trial_line(SLOTS) == "8 slots: 1,024 tokens/s, TTFT 80.0 ms, TPOT 4.0 ms, +45 % (+41 to +49): kept"
