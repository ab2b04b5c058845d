"""A checkpoint in several places: each has it whole, any intact copy serves, a bad one is repaired, and S3 is one."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cordee.errors import CheckpointError, DestinationError
from cordee.storage.audit import find, generations, verify
from cordee.storage.base_destination import owner_of, remember
from cordee.storage.chunks import has_decayed, write_chunk
from cordee.storage.destination import open_blobs
from cordee.storage.files import FileBlobs
from cordee.storage.generations import check_generation, pin, sweep_near
from cordee.storage.levels import LeveledBlobs
from cordee.storage.log import Log, live_commits, read_entries
from cordee.storage.manifest import Manifest, read_manifest, write_manifest
from cordee.train.checkpoint.checkpointer import Checkpointer

WAIT_S = 60


def saved(to: str, steps: int) -> list[torch.Tensor]:
    """The weights at each step of a run that saves at each."""
    checkpointer = Checkpointer(to, rank=0, world_size=1)
    checkpointer.open()
    weights = []
    for step in range(1, steps + 1):
        weights.append(torch.full((300_000,), float(step)))
        checkpointer.save({"w": weights[-1], "v": weights[-1] + 100, "step": step}, step=step, extras={})
        checkpointer.wait(WAIT_S)
    checkpointer.close()
    return weights


def loaded(to: str) -> tuple[torch.Tensor, Checkpointer]:
    checkpointer = Checkpointer(to, rank=0, world_size=1)
    commit = checkpointer.open()
    state = {"w": torch.zeros(300_000), "v": torch.zeros(300_000), "step": 0}
    checkpointer.load(state, commit)
    checkpointer.close()
    return state["w"], checkpointer


def own_chunks(to: str) -> list[list[str]]:
    """Keys of the chunks of each generation that no other one has."""
    blobs = open_blobs(to)
    names = [entry.record.fields["manifest"] for entry in live_commits(read_entries(blobs))]
    keys = [{chunk.key for chunk in read_manifest(blobs, name).chunks} for name in names]
    return [sorted(k - set().union(*(other for other in keys if other is not k))) for k in keys]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_run_goes_on_from_s3_over_a_network_that_fails_a_tenth_of_all_requests(s3, monkeypatch) -> None:
    monkeypatch.setattr("cordee.storage.remote.WAIT_S", 0.0)
    with s3.failing(s3.by_chance(7, 0.1)):  # The uploader's own waits are real.
        weights = saved("s3://bucket/run", 2)
    with s3.failing(s3.by_chance(8, 0.1)):
        found, checkpointer = loaded("s3://bucket/run")
    assert torch.equal(found, weights[-1]) and checkpointer.skipped == []


def test_a_store_that_is_away_fails_the_save_and_not_the_run(s3) -> None:
    checkpointer = Checkpointer("s3://bucket/run", rank=0, world_size=1)
    checkpointer.open()
    with s3.failing(lambda method, path: "403" if method == "PUT" and "chunks" in path else None):
        checkpointer.save({"step": 1}, step=1, extras={})
        with pytest.raises(CheckpointError, match="AccessDenied"):
            checkpointer.wait(WAIT_S)
    checkpointer.save({"step": 2}, step=2, extras={})
    assert checkpointer.wait(WAIT_S).step == 2
    checkpointer.close()


def test_bad_copies_are_repaired_from_the_other_tier(tmp_path, s3, caplog) -> None:
    to = f"{tmp_path}/near,s3://bucket/run"
    weights = saved(to, 2)
    near, home = open_blobs(to).levels
    assert list(near.list("chunks")) == list(home.list("chunks")) and list(near.list("log")) == []
    flipped, gone = own_chunks(to)[1][:2]
    flip(tmp_path / "near" / flipped)
    near.delete(gone)
    home.delete(f"manifests/{live_commits(read_entries(home))[-1].record.fields['manifest']}")
    with caplog.at_level(logging.WARNING, "cordee.storage"):
        found, checkpointer = loaded(to)
    assert torch.equal(found, weights[-1]) and checkpointer.skipped == []
    assert "does not match its checksum" in caplog.text and "repaired from s3://bucket/run" in caplog.text
    name = live_commits(read_entries(home))[-1].record.fields["manifest"]
    assert check_generation(LeveledBlobs([near, near]), name) is None, "whole in the near level again"


def test_where_no_tier_has_it_intact_the_load_steps_back_and_names_both(tmp_path) -> None:
    to = f"{tmp_path}/near,{tmp_path}/home"
    weights = saved(to, 2)
    for level in ("near", "home"):
        flip(tmp_path / level / own_chunks(to)[1][0])
    found, checkpointer = loaded(to)
    assert torch.equal(found, weights[0])
    (skipped,) = checkpointer.skipped
    assert skipped.step == 2 and "/near" in skipped.reason and "/home" in skipped.reason


def test_a_new_node_with_an_empty_disk_reads_from_home_and_fills_its_own(tmp_path) -> None:
    weights = saved(f"{tmp_path}/a,{tmp_path}/home", 1)
    to = f"{tmp_path}/b,{tmp_path}/home"
    found, _ = loaded(to)
    assert torch.equal(found, weights[-1])
    assert list(FileBlobs(tmp_path / "b").list("chunks")) == list(FileBlobs(tmp_path / "home").list("chunks"))


def test_a_chunk_that_is_used_again_is_brought_to_the_tiers_that_lack_it(tmp_path) -> None:
    levels = LeveledBlobs([FileBlobs(tmp_path / "near"), FileBlobs(tmp_path / "home")])
    first, _ = write_chunk(levels.levels[1], b"frozen", save=1, epoch=1, known={})
    again, new = write_chunk(levels, b"frozen", save=2, epoch=1, known={first.xxh3: first})
    assert again == first and not new and levels.levels[0].get(first.key) == b"frozen"


def test_a_tier_that_cannot_be_read_is_no_damage(tmp_path) -> None:
    levels = LeveledBlobs([FileBlobs(tmp_path / "near"), FileBlobs(tmp_path / "home")])
    saved(str(levels), 1)
    name = live_commits(read_entries(levels))[-1].record.fields["manifest"]

    def away(key: str, *how: object, **more: object) -> bytes:
        raise DestinationError(f"cannot read {key}")

    levels.levels[0].get = levels.levels[0].read_blocks = away
    assert check_generation(levels, name) is None
    (chunk, *_) = own_chunks(str(levels))[0]
    flip(tmp_path / "home" / chunk)
    with pytest.raises(DestinationError, match="cannot read chunks"):
        check_generation(levels, name)


def test_frozen_weights_cost_nothing_the_second_time(tmp_path) -> None:
    """As with LoRA: a frozen base of 16 MB, an adapter of 64 kB with its optimizer. Also after a restart."""
    torch.manual_seed(1)
    base = torch.nn.Linear(2000, 2000)
    base.requires_grad_(False)
    adapter = torch.nn.Sequential(torch.nn.Linear(2000, 4, bias=False), torch.nn.Linear(4, 2000, bias=False))
    model = torch.nn.ModuleDict({"base": base, "adapter": adapter})
    opt = torch.optim.AdamW(adapter.parameters())
    blobs = FileBlobs(tmp_path)
    sizes: list[int] = []
    for _ in range(2):
        checkpointer = Checkpointer(str(tmp_path), rank=0, world_size=1)
        commit = checkpointer.open()
        state = {"model": model, "opt": opt}
        if commit:
            checkpointer.load(state, commit)
        for step in range(2):
            x = torch.randn(2, 2000)
            (base(x) + adapter(x)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            saved = checkpointer.save(state, step=len(sizes) + step, extras={})
            made = checkpointer.wait(WAIT_S)
            assert saved.bytes > 16_000_000
            sizes.append(read_manifest(blobs, made.manifest).ranks[0].written_bytes)
        checkpointer.close()
    assert sizes[0] > 16_000_000
    assert all(size < 0.05 * sizes[0] for size in sizes[1:]), sizes


def test_reread_repairs_damaged_copies_but_not_the_base(tmp_path) -> None:
    near, home, base = (FileBlobs(tmp_path / name) for name in ("near", "home", "base"))
    both, data = LeveledBlobs([near, home]), bytes(range(256)) * 8192
    chunk, _ = write_chunk(both, data, save=1, epoch=1, known={})
    known = {chunk.xxh3: chunk}
    for harmed in ((near,), (home,), (near, home)):
        for level in harmed:
            flip(level.root / chunk.key)
        decayed = {(level, chunk.key) for level in both.levels if has_decayed(level, chunk, chunk.key)}
        assert {level for level, _ in decayed} == set(harmed)
        assert write_chunk(both, data, save=2, epoch=1, known=known, decayed_copies=decayed) == (chunk, False)
        assert near.get(chunk.key) == home.get(chunk.key) == data and not decayed
    # What a base has lost the job gets for itself.
    lent, _ = write_chunk(base, data, save=1, epoch=1, known={})
    here = replace(lent, key=remember(home, str(base.root)) + lent.key)
    assert write_chunk(home, data, save=3, epoch=1, known={lent.xxh3: here}) == (here, False)
    flip(base.root / lent.key)
    owner, key = owner_of(home, here.key)
    assert has_decayed(owner, here, key)
    own, new = write_chunk(home, data, save=3, epoch=1, known={lent.xxh3: here}, decayed_copies={(owner, key)})
    assert new and home.get(own.key) == data and base.get(lent.key) != data


def test_two_jobs_rest_on_one_pinned_base_and_neither_writes_it(tmp_path) -> None:
    torch.manual_seed(1)
    frozen = torch.randn(1_000_000)
    first = Checkpointer(str(tmp_path / "base"), rank=0, world_size=1)
    first.open()
    first.save({"frozen": frozen}, step=1, extras={})
    generation = first.wait(WAIT_S).generation
    first.close()
    rested = Checkpointer(str(tmp_path / "a"), rank=0, world_size=1, base=str(tmp_path / "base"))
    with pytest.raises(CheckpointError, match="nothing is pinned"):
        rested.open()
    base = FileBlobs(tmp_path / "base")
    pin(Log.visit(base, nonce="v"), generation, "base")
    before = {key: base.get(key) for folder in ("chunks", "log", "manifests") for key in base.list(folder)}
    for name in ("a", "b"):
        blobs = FileBlobs(tmp_path / name)
        job = Checkpointer(str(blobs), rank=0, world_size=1, base=str(base))
        job.open()
        for step in (1, 2, 3):
            job.save({"frozen": frozen, "head": torch.full((9,), float(step))}, step=step, extras={})
            commit = job.wait(WAIT_S)
        job.close()
        assert sum(blobs.size(key) for key in blobs.list("chunks")) < 1000, "4 MB lie in the base only"
        again = Checkpointer(str(blobs), rank=0, world_size=1)  # It need not be told of the base.
        state = {"frozen": torch.zeros(1_000_000), "head": torch.zeros(9)}
        again.load(state, again.open())
        again.close()
        assert torch.equal(state["frozen"], frozen) and state["head"][0] == 3
        assert generations(blobs, read_entries(blobs))[-1].stored_bytes < 1000
    assert {key: base.get(key) for folder in ("chunks", "log", "manifests") for key in base.list(folder)} == before
    flip(tmp_path / "base" / max(base.list("chunks"), key=base.size))
    assert "does not match its checksum" in check_generation(blobs, commit.manifest), (
        "also the base's bytes are verified"
    )


def test_each_node_removes_from_its_own_disk_what_nobody_needs(tmp_path) -> None:
    """Rank 0 cannot: it does not see the disks of other nodes."""
    home = FileBlobs(tmp_path / "home")
    log = Log.open(home, nonce="a")
    levels = LeveledBlobs([FileBlobs(tmp_path / "node1"), home])
    kept, _ = write_chunk(levels, b"kept", save=1, epoch=1, known={})
    name = write_manifest(levels, Manifest(1, 1, 1, 0, (kept,), {}, {}, ()))
    log.append("commit", save=1, step=1, world_size=0, manifest=name, bytes=4, stall_us=0, uploaded_us=0)
    write_chunk(levels, b"of a save that failed", save=1, epoch=1, known={})
    running, _ = write_chunk(levels, b"of the next save", save=2, epoch=1, known={})
    sweep_near(log, levels, save=1)
    assert sorted(levels.levels[0].list("chunks")) == sorted([kept.key, running.key])
    assert len(list(home.list("chunks"))) == 3, "the home is rank 0's"


def run_of(to: str, steps: int, **options) -> Checkpointer:
    """A run that saves at each step, without waiting for more than the commit."""
    checkpointer = Checkpointer(to, rank=0, world_size=1, **options)
    checkpointer.open()
    for step in range(1, steps + 1):
        state = {"w": torch.full((300_000,), float(step)), "frozen": torch.ones(300_000)}
        checkpointer.save(state, step=step, extras={})
        checkpointer.wait(WAIT_S)
    checkpointer.close()
    return checkpointer


def steps_in(to: str) -> dict[int, bool]:
    """Live generations by step: is it whole in this store?"""
    blobs = open_blobs(to)
    found = {}
    for entry in live_commits(read_entries(blobs)):
        name = entry.record.fields["manifest"]
        found[entry.record.fields["step"]] = check_generation(blobs, name) is None
    return found


def test_the_home_gets_each_third_and_each_tier_keeps_its_own_newest_two(tmp_path) -> None:
    near, home = tmp_path / "near", tmp_path / "home"
    to = f"{near},{home} every 3"
    checkpointer = run_of(to, 9)
    assert steps_in(to) == {4: True, 7: True, 8: True, 9: True}, "the home's newest two, the newest two of all"
    assert steps_in(str(home)) == {4: True, 7: True, 8: False, 9: False}
    large = [key for key in FileBlobs(home).list("chunks") if (home / key).stat().st_size > 1_000_000]
    assert len(large) == 3, "w of steps 4 and 7, and once what did not change"
    upload_s = checkpointer.status().upload_s
    assert upload_s[0] > 0 and upload_s[1] > 0, "each reach is measured by itself"
    again = Checkpointer(to, rank=0, world_size=1)
    commit = again.open()
    assert (commit.step, commit.missing_levels, again.skipped) == (9, 1, [])
    again.save({"w": torch.zeros(300_000), "frozen": torch.ones(300_000)}, step=10, extras={})
    assert again.wait(WAIT_S).missing_levels == 0, "the first checkpoint of an attempt goes everywhere"
    again.close()
    assert steps_in(str(home))[10]


def test_without_the_near_disk_the_home_is_what_is_left(tmp_path) -> None:
    near, home = tmp_path / "near", tmp_path / "home"
    run_of(f"{near},{home} every 3", 6)
    to = f"{tmp_path}/another,{home} every 3"
    checkpointer = Checkpointer(to, rank=0, world_size=1)
    commit = checkpointer.open()
    assert commit.step == 4 and [skipped.step for skipped in checkpointer.skipped] == [6, 5]
    assert all("only meant to be in nearer levels" in skipped.reason for skipped in checkpointer.skipped)
    state = {"w": torch.zeros(300_000), "frozen": torch.zeros(300_000)}
    checkpointer.load(state, commit)
    assert bool((state["w"] == 4).all())
    for step in (5, 6, 7):
        checkpointer.save(state, step=step, extras={})
        checkpointer.wait(WAIT_S)
    checkpointer.close()
    assert steps_in(to) == {4: True, 5: True, 6: True, 7: True}, "what is lost counts for nothing, and goes"


def test_a_bad_near_copy_of_what_the_home_lacks_steps_back(tmp_path) -> None:
    near, home = tmp_path / "near", tmp_path / "home"
    to = f"{near},{home} every 3"
    run_of(to, 3)
    flip(near / own_chunks(to)[-1][0])
    checkpointer = Checkpointer(to, rank=0, world_size=1)
    assert checkpointer.open().step == 2
    checkpointer.close()


def test_verify_asks_a_store_only_for_what_it_was_to_have(tmp_path) -> None:
    near, home = tmp_path / "near", tmp_path / "home"
    to = f"{near},{home} every 3"
    run_of(to, 3)
    blobs = open_blobs(to)
    found = [verify(blobs, entry) for entry in live_commits(read_entries(blobs))]
    assert [(each.commit.missing_levels, each.bad, each.lost) for each in found] == [
        (0, (), None),
        (1, (), None),
        (1, (), None),
    ]
    alone = [verify(FileBlobs(home), entry).lost for entry in live_commits(read_entries(FileBlobs(home)))]
    assert alone[0] is None and all("nearer destination" in each for each in alone[1:])
    entries = read_entries(FileBlobs(home))
    assert find(entries, None, FileBlobs(home)) == entries[1] and find(entries, None, blobs) == entries[-1]


def test_a_capture_goes_as_far_as_it_is_asked_to(tmp_path) -> None:
    """Who leaves in a hurry writes to the near disk only; who has time writes to all."""
    checkpointer = Checkpointer(f"{tmp_path}/near,{tmp_path}/home every 9", rank=0, world_size=1)
    checkpointer.open()
    missing_levels = []
    for step, reach in enumerate((1, None, None, 2, 1), 1):
        checkpointer.save({"w": torch.full((9,), step)}, step=step, extras={}, reach=reach, last=step == 5)
        missing_levels.append(checkpointer.wait(WAIT_S).missing_levels)
    checkpointer.close()
    assert missing_levels == [1, 0, 1, 0, 1]
    last = live_commits(read_entries(FileBlobs(tmp_path / "home")))[-1]
    assert last.record.fields["ending"] == "left"
