"""The profile of both stages, what is predicted from it, and the verbs that measure and serve."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from engines_world import FLAGS
from rag_world import numbered

sys.path.insert(0, str(Path(__file__).parents[2] / "cli"))

from verbs import run

from cordee.errors import DoesNotFitError, InputError
from cordee.plan.serving.formats import KV
from cordee.plan.serving.memory.kv import sequence_bytes
from cordee.serve.policy.rag_forecast import MemoryPlan, RagProfile, RagSetup, even_arrivals, forecast
from cordee.serve.rag import profile as profiles
from cordee.serve.rag.enforce import resident_bytes
from cordee.serve.rag.engine import OwnEngine
from cordee.serve.rag.index import RagIndex
from cordee.serve.rag.predict import predict
from cordee.serve.rag.profile import sample
from cordee.serve.rag.setup import RagOptions, own_launch, planned, slot_bytes
from cordee.storage.sealed import seal
from cordee.units import MiB
from cordee.workload.load import load_shape

PROFILE = RagProfile(1e6, (0.002, 0.001), {1: 0.1, 2: 0.15}, 0.001, engine_bytes=10 * MiB, slot_bytes=MiB)
DOCUMENT = {
    "profile", "load_bytes_per_s", "search_s", "search_more_s", "embed_s", "generation_s", "cores",
    "load_cores", "engine_cores", "engine_bytes", "slot_bytes", "memory", "rates",
}  # fmt: skip
"""The keys of `cordee rag profile --json`."""


def options(folder: Path, **more: object) -> RagOptions:
    made = RagOptions(str(folder / "tiny.gguf"), slots=2, context=512, flags=dict(FLAGS))
    return replace(made, **more)  # type: ignore[arg-type]


def plan_for(index: RagIndex, partitions: int) -> MemoryPlan:
    size = max(each.size_bytes for each in index.catalog.partitions())
    return MemoryPlan(1, 0, partitions * size, 0, 0.0, ())


def test_loads_and_searches_are_measured(tmp_path: Path) -> None:
    index = numbered(tmp_path, 400, partitions=4)
    found = profiles.retrieval(index)
    size = index.catalog.partitions()[0].size_bytes
    slow = profiles.retrieval(index, 2e5)  # 7.2 kB in 36 ms or more, for most of which no processor is needed.
    assert slow.loading_s(size) > size / 2.1e5 > found.loading_s(size) and slow.load_cores < found.load_cores
    assert 0 < found.search_s[0] <= found.searching_s(9) and found.embed_s > 0 and found.cores >= 0.1


def test_the_verb_measures_predicts_and_compares(
    tmp_path: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "LEAST_S", 0.0)
    index = numbered(tmp_path)
    given = [
        str(index.folder), "--generator", str(tiny_folder / "tiny.gguf"), "--slots", "2", "--context", "512",
        *(word for name, value in FLAGS.items() for word in ("--flag", f"{name.lstrip('-')}={value}")),
    ]  # fmt: skip
    words = ["rag", "profile", *given, "--memory", "2GB", "--output", "4", "--rate", "20/s", "--check", "0.1"]
    code, out, err = run(capsys, *words, "--json")
    found = json.loads(out)
    assert code == 0 and found.keys() == DOCUMENT, err
    assert found["generation_s"].keys() == {"1", "2"} and found["memory"]["slots"] == 2
    [rate] = found["rates"]
    assert rate["requests"] == 10 and rate["measured"]["retrieval_s"] > 0 and rate["predicted"]["mean_s"] > 0
    assert rate["off"] == pytest.approx(rate["measured"]["mean_s"] / rate["predicted"]["mean_s"] - 1)
    assert not (index.folder / "events.jsonl").exists(), "a measurement is no change of a server"
    kept = profiles.load(index.folder, str(tiny_folder / "tiny.gguf"))
    assert kept is not None and kept.slot_bytes == found["slot_bytes"] > 0 and kept.engine_cores > 0
    # A server divides the memory by the profile that is kept.
    code, _, err = run(capsys, "rag", "serve", *given, "--memory", "1MB")
    assert code == DoesNotFitError.exit_code and "do not hold the engine with one slot" in err


def test_the_planner_says_what_a_slot_takes(tmp_path: Path, tiny_folder: Path) -> None:
    gguf, folder = own_launch(options(tiny_folder), "kb"), own_launch(options(tiny_folder, context=1024), "kb")
    assert gguf is not None and folder is not None
    # 2 x 2 layers x 2 heads x 16 x 4 B: the flags keep 32 bits.
    assert slot_bytes(gguf) == 512 * 512 and slot_bytes(folder) == 2 * 512 * 512
    halved = replace(gguf, flags={})
    assert slot_bytes(halved) == sequence_bytes(load_shape(str(tiny_folder)), KV["fp16"], 512) == 256 * 512
    other = tmp_path / "other.gguf"
    other.write_bytes((tiny_folder / "tiny.gguf").read_bytes().replace(b"llama", b"lamma"))
    assert slot_bytes(replace(gguf, model=str(other))) is None, "a family that is not known is measured"

    async def resident(slots: int) -> int:
        launch = own_launch(options(tiny_folder, context=32_768), "kb")
        assert launch is not None
        own = OwnEngine(launch, slots, None, lambda *change: None)
        await own.start()
        try:
            return resident_bytes(own.pid)
        finally:
            await asyncio.to_thread(own.end)

    grown = asyncio.run(resident(5)) - asyncio.run(resident(1))
    assert grown == pytest.approx(4 * 512 * 32_768, rel=0.2), "the engine takes what was planned"


def test_a_context_that_was_not_profiled_is_planned_as_it_is(tmp_path: Path, tiny_folder: Path) -> None:
    index = numbered(tmp_path)
    small, large = (
        planned(options(tiny_folder, context=each, slots=4, memory_bytes=10**9), index, PROFILE)
        for each in (512, 32_768)
    )
    assert large.engine_bytes - small.engine_bytes == 4 * 512 * (32_768 - 512)


def test_a_prediction_is_the_forecast_of_what_questions_want(tmp_path: Path, tiny_folder: Path) -> None:
    index, arrivals = numbered(tmp_path), even_arrivals(4.0, 20)
    questions, plan = sample(index, 20), plan_for(index, 2)
    assert len(set(questions)) == 20 and all(each.startswith("passage v") for each in questions)
    assert len(sample(index, 100)) == 100
    given = options(tiny_folder)
    whole = predict(index, given, plan, PROFILE, arrivals, questions)
    sizes = {each.id: each.size_bytes for each in index.catalog.partitions()}
    assert whole == forecast(PROFILE, RagSetup(sizes, plan.partition_bytes, 1), arrivals)
    probed = predict(index, replace(given, probes=2), plan, PROFILE, arrivals, questions)
    assert mean(each.retrieval_s for each in probed) < mean(each.retrieval_s for each in whole)


def test_a_profile_that_cannot_be_used_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    index, path = numbered(tmp_path), tmp_path / "kb" / profiles.NAME
    generator = options(tiny_folder).generator
    assert profiles.load(index.folder, generator) is None
    profiles.save(index, PROFILE, options(tiny_folder))
    assert profiles.load(index.folder, generator) == PROFILE
    assert profiles.load(index.folder, "http://127.0.0.1:9") is None, "it is of another generator"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match="make it again"):
        profiles.load(index.folder, generator)
    path.write_bytes(seal({"profile": {"load_s": 1.0, "generation_s": [], "search_s": []}, "generator": generator}))
    with pytest.raises(InputError, match="another version"):
        profiles.load(index.folder, generator)
    index.remove([str(tmp_path / "docs" / f"{number}.txt") for number in range(40)])
    with pytest.raises(InputError, match="no documents"):
        profiles.measure(index, options(tiny_folder), profiles.ProfileLoad(), lambda text: None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["serve", "{kb}", "--generator", "{kb}/none.gguf"], "there is no generator"),
        (["serve", "{kb}", "--generator", "http://127.0.0.1:9", "--listen", "here"], "'here' is not an address"),
        (["serve", "{kb}x", "--generator", "http://127.0.0.1:9"], "has no index"),
        (["profile", "{kb}", "--generator", "{kb}/none.gguf"], "there is no generator"),
    ],
)
def test_what_cannot_be_served_is_said(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kb = numbered(tmp_path, 4, partitions=1).folder
    code, _, err = run(capsys, "rag", *(word.format(kb=kb) for word in words))
    assert code == InputError.exit_code and says in err
