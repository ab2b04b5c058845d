"""The lineage of a version: its columns by time, its links, and that each box is drawn in both frames."""

import re

from cordee.answers.artifacts import MakerView, RelativeView, VersionDetailView
from cordee.answers.lineage import lineage_of
from cordee.units import US_PER_HOUR
from cordee.view.lineage import Box, lineage_html

MAKER = MakerView(
    job_id="sft-abcdef", name="sft", owner="ines", state="done", commit="0123456789abcdef", command="python sft.py",
    layout="fsdp 8", steps=900, gpu_us=2 * US_PER_HOUR, micro_usd=5_980_000,
)  # fmt: skip


def version(maker: MakerView | None, **more: object) -> VersionDetailView:
    def relative(ref: str, how: str, removed: bool = False) -> RelativeView:
        return RelativeView.model_validate({"ref": ref, "how": how, "digest": "0" * 64, "removed": removed})

    fields = {
        "ref": "m:2", "name": "m", "version": 2, "digest": "1" * 64, "kind": "model", "size_bytes": 1,
        "stored_bytes": 1,
        "pushed_us": 0, "by": "ines", "queue": "default", "tags": [], "stage": "", "base": "", "note": "", "key": "",
        "job_id": maker and maker.job_id, "signed": False, "signature": "", "maker": maker,
        "used_by": ["eval-bbbbbb"],
        "lineage": [relative("corpus:1", "made from"), relative("0" * 12, "made from", removed=True),
                    relative("child:1", "parent of")], "history": [],
    }  # fmt: skip
    return VersionDetailView.model_validate(fields | more)


def test_columns_are_in_the_order_of_time_and_say_what_the_job_was() -> None:
    columns = lineage_of(version(MAKER), "/jobs/{}".format, "/artifacts/{}".format)
    assert columns == [
        [
            Box("corpus:1", "it was made from this", "/artifacts/corpus:1"),
            Box(f"{'0' * 12} (removed)", "it was made from this"),
            Box("commit 0123456789ab", "python sft.py"),
            Box("fsdp 8", "its plan, 900 steps"),
        ],
        [Box("sft-abcdef", "2.00 GPU-hours, $5.98", "/jobs/sft-abcdef")],
        [Box("m:2", is_self=True)],
        [
            Box("child:1", "was made from it", "/artifacts/child:1"),
            Box("eval-bbbbbb", "a job that used it", "/jobs/eval-bbbbbb"),
        ],
    ]
    assert lineage_of(version(None))[1:3] == [[], [Box("m:2", "by ines", is_self=True)]]


def test_both_drawings_have_each_box_and_each_link_and_many_are_counted() -> None:
    columns = lineage_of(version(MAKER), "/jobs/{}".format, "/artifacts/{}".format)
    drawn = lineage_html(columns, "lineage <of> m:2")
    assert drawn.count("<svg") == 2 and drawn.count('role="group"') == 2 and "&lt;of&gt;" in drawn
    for box in (box for column in columns for box in column):
        assert drawn.count(f"<title>{box.name}</title>") == 2, box
        assert not box.href or drawn.count(f'href="{box.href}"') == 2
    wide = drawn[: drawn.index("</svg>")]
    assert wide.count('class="edge"') == 4 + 1 + 2
    right = max(float(x) + float(w) for x, w in re.findall(r'<rect[^>]* x="([\d.]+)"[^>]* width="([\d.]+)"', wide))
    assert right <= 1080
    many = lineage_html([[Box(f"b{n}") for n in range(30)], [Box("m", is_self=True)]], "many")
    assert many.count('class="box"') == 2 * 8 and "and 23 more" in many and 'role="img"' in many
