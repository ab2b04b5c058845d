"""Nodes ask each other's caches before the store: a neighbour costs a bounded wait at most, and never a wrong byte."""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from cache_world import direct, fill, in_s3, to_s3

from cordee.errors import DataDamagedError
from cordee.storage.cache import neighbours
from cordee.storage.cache.api import Data
from cordee.storage.cache.neighbours import write_neighbours
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pieces import PIECE_BYTES, Pieces
from cordee.storage.cache.prefetch import bring_all
from cordee.storage.cache.sharing import SharingServer

SIZES = {"a.bin": 3 * PIECE_BYTES + 100, "b.bin": 20 * PIECE_BYTES, "c.bin": 10}
KEY = "key of the cluster"


@pytest.fixture
def cluster(tmp_path):
    """Two nodes with caches of their own; the first one has read the dataset, and gives it to others."""
    contents = fill(tmp_path / "set", SIZES)
    first = direct(tmp_path / "set", tmp_path / "first")
    assert whole(first.data) == contents
    server = SharingServer(first.node, KEY, "127.0.0.1")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    second = direct(tmp_path / "set", tmp_path / "second")
    node = f"127.0.0.1:{server.port}/{server.fingerprint}"
    yield SimpleNamespace(first=first, second=second, server=server, node=node, contents=contents, url=first.data.url)
    server.shutdown()
    server.server_close()


def whole(data) -> dict[str, bytes]:
    return {name: data.open(name).read() for name in data}


def tell(cluster, *nodes: str, key: str = KEY) -> None:
    write_neighbours(cluster.second.node.root, key, "", {cluster.url: nodes})


def test_the_second_node_takes_nothing_from_the_store(cluster) -> None:
    tell(cluster, cluster.node)
    assert whole(cluster.second.data) == cluster.contents
    assert cluster.second.source.read_bytes == 0
    assert cluster.second.fetching.neighbours.given_bytes == sum(SIZES.values())
    assert cluster.second.fetching.fetched_bytes == 0


def test_what_a_neighbour_lacks_comes_from_the_store(cluster) -> None:
    pins = {pin.name: pin for pin in cluster.first.data.pins}
    cluster.first.node.drop(pins["a.bin"].object_id)
    pieces = cluster.first.node.open(pins["b.bin"].object_id)
    os.pwrite(pieces.state_fd, bytes(24), 64 + 24 * 5)  # the record of its sixth piece
    tell(cluster, cluster.node)
    assert whole(cluster.second.data) == cluster.contents
    from_store = cluster.second.source.read_bytes
    assert SIZES["a.bin"] + PIECE_BYTES <= from_store < sum(SIZES.values()), "and up to the end of a request"


def test_damage_on_a_neighbours_disk_is_found_on_arrival(cluster) -> None:
    for pin in cluster.first.data.pins:
        pieces = cluster.first.node.open(pin.object_id)
        os.pwrite(pieces.data_fd, b"damaged"[: pin.size_bytes], pin.size_bytes // 2)
    tell(cluster, cluster.node)
    assert whole(cluster.second.data) == cluster.contents


@pytest.mark.parametrize("how", ["its key is another", "its certificate is another", "nobody listens", "no address"])
def test_who_is_no_neighbour_is_not_asked_twice(cluster, how, caplog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    other = cluster.node[:-1] + ("0" if cluster.node[-1] != "0" else "1")
    nodes = {"its key is another": cluster.node, "its certificate is another": other, "no address": "nonsense"}
    tell(cluster, nodes.get(how, f"127.0.0.1:{port}/{'0' * 64}"), key="" if how == "its key is another" else KEY)
    assert whole(cluster.second.data) == cluster.contents
    assert cluster.second.source.read_bytes == sum(SIZES.values())
    assert 1 <= caplog.text.count("is not asked for a while") <= 3, "each of the first requests at most"


def test_a_neighbour_that_does_not_answer_costs_a_bounded_wait(cluster, monkeypatch, caplog) -> None:
    """It takes connections, and is silent: its node is frozen."""
    monkeypatch.setattr(neighbours, "PATIENCE_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tell(cluster, f"127.0.0.1:{silent.getsockname()[1]}/{'0' * 64}")
        assert whole(cluster.second.data) == cluster.contents
    assert cluster.second.source.read_bytes == sum(SIZES.values())
    assert 1 <= caplog.text.count("is not asked for a while") <= 3, "each of the first requests at most"


def test_a_neighbour_that_dies_in_the_middle_of_an_answer(cluster, monkeypatch) -> None:
    pieces = cluster.server.shared.pieces

    def dies(object_id: str, first: int, stop: int):
        for digest, data in pieces(object_id, first, stop):
            yield digest, data[: len(data) // 2]

    monkeypatch.setattr(cluster.server.shared, "pieces", dies)
    tell(cluster, cluster.node)
    assert whole(cluster.second.data) == cluster.contents


def test_a_neighbour_that_makes_up_digests_is_found_by_that_of_the_store(cluster, s3, tmp_path, monkeypatch) -> None:
    url = to_s3(s3.behind, {"x.bin": bytes(3 * PIECE_BYTES)}, f"lies-{os.getpid()}")
    first = in_s3(url, tmp_path / "s3-first")
    right = whole(first.data)
    monkeypatch.setattr(cluster.server.shared, "_node", first.node)
    pieces = cluster.server.shared.pieces
    wrong = bytes(PIECE_BYTES - 1) + b"!"
    monkeypatch.setattr(
        cluster.server.shared,
        "pieces",
        lambda *asked: ((Pieces.digest_of(memoryview(wrong)), wrong) for _ in pieces(*asked)),
    )
    second = in_s3(url, tmp_path / "s3-second")
    write_neighbours(second.node.root, KEY, "", {url: [cluster.node]})
    with pytest.raises(DataDamagedError, match=r"x\.bin had other bytes than its store says"):
        whole(second.data)
        second.data.check(settle=True)
    again = Data(url, second.data.pins, second.node, second.channel)
    assert whole(again) == right, "the store alone is asked for this object from now on"


def test_nodes_that_begin_at_once_take_different_objects_first(cluster, tmp_path) -> None:
    caches = [NodeCache(tmp_path / f"cache-{number}") for number in range(4)]
    names = [f"10.0.0.{number}:1/x" for number in range(4)]
    for cache, own in zip(caches, names, strict=True):
        write_neighbours(cache.root, KEY, own, {cluster.url: names})
    asked = [neighbours.Neighbours(cache.root) for cache in caches]
    for pin in cluster.first.data.pins:
        assert sum(each.comes_first(pin) for each in asked) == 1
    assert neighbours.Neighbours(tmp_path / "none").comes_first(cluster.first.data.pins[0])


def test_a_gang_that_begins_at_once_fetches_its_data_about_once(tmp_path) -> None:
    contents = fill(tmp_path / "set", {f"{number}.bin": 2 * PIECE_BYTES for number in range(24)})
    gang = [direct(tmp_path / "set", tmp_path / f"cache-{number}") for number in range(3)]
    servers = [SharingServer(each.node, KEY, "127.0.0.1") for each in gang]
    names = [f"127.0.0.1:{server.port}/{server.fingerprint}" for server in servers]
    for each, server, own in zip(gang, servers, names, strict=True):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_neighbours(each.node.root, KEY, own, {each.data.url: names})
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda each: bring_all(each.fetching, each.data.pins), gang))
    total = sum(map(len, contents.values()))
    fetched = sum(each.source.read_bytes for each in gang)
    assert total <= fetched < 2 * total, "three times without neighbours"
    assert fetched + sum(each.fetching.neighbours.given_bytes for each in gang) == 3 * total
    for each, server in zip(gang, servers, strict=True):
        assert whole(each.data) == contents
        server.shutdown()
        server.server_close()
