"""The router: matches, load, sessions, failures; no collapse onto one replica."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.serve.policy.route import OVERLOAD_TOKENS, ReplicaLoad, Router, RouteRequest, prefix_blocks

BLOCK = 512


def _router(replicas: int = 4, blocks: int = 1000) -> tuple[Router, dict[str, ReplicaLoad]]:
    names = [f"r{index}" for index in range(replicas)]
    return Router(dict.fromkeys(names, blocks)), {name: ReplicaLoad(10**6, 10**6, 64) for name in names}


def _request(*blocks: int, session: str = "", avoid: frozenset[str] = frozenset()) -> RouteRequest:
    return RouteRequest(blocks, len(blocks) * BLOCK, len(blocks) * BLOCK, session, avoid)


def test_a_follow_up_goes_where_its_prompt_is() -> None:
    router, load = _router()
    first = router.choose(_request(0, 1, 2, 3), load)
    assert first is not None and first.cached_tokens == 0
    for number in range(20):
        router.choose(_request(0, 100 + number, 200 + number), load)
    follow = router.choose(_request(0, 1, 2, 3, 4), load)
    assert follow is not None and (follow.replica, follow.why) == (first.replica, "prefix")
    assert (follow.cached_tokens, follow.miss_tokens) == (4 * BLOCK, BLOCK)


def test_prompts_that_share_one_block_do_not_all_follow_the_first() -> None:
    """The longest match alone sends every request to one replica."""
    router, load = _router()
    chosen = Counter(
        choice.replica
        for number in range(400)
        if (choice := router.choose(_request(0, *range(number * 8, number * 8 + 8)), load))
    )
    assert max(chosen.values()) <= 1.1 * 100 and len(chosen) == 4


def test_a_prompt_that_all_want_gets_more_replicas() -> None:
    router, load = _router()
    for _ in range(256):
        choice = router.choose(_request(*range(20)), load)
        assert choice is not None
        load[choice.replica].running += 1
        load[choice.replica].slots_free -= 1
    running = [each.running for each in load.values()]
    assert sum(running) == 256 and max(running) == 64 and min(running) > 0


def test_failing_replicas_are_avoided_and_taken_when_no_other_is_left() -> None:
    router, load = _router(2)
    first = router.choose(_request(1, 2, 3), load)
    assert first is not None
    load[first.replica].failing = True
    for _ in range(10):
        choice = router.choose(_request(1, 2, 3), load)
        assert choice is not None and choice.replica != first.replica
    (other,) = set(load) - {first.replica}
    load[other].failing = True
    assert router.choose(_request(1, 2, 3), load) is not None
    load[other].failing = False
    avoiding = router.choose(_request(1, 2, 3, avoid=frozenset({other})), load)
    assert avoiding is not None and avoiding.replica == other
    load[first.replica].failing = False
    avoiding = router.choose(_request(1, 2, 3, avoid=frozenset({other})), load)
    assert avoiding is not None and avoiding.replica == first.replica


def test_a_draining_replica_gets_nothing() -> None:
    router, load = _router(1)
    load["r0"].draining = True
    assert router.choose(_request(1), load) is None


def test_a_session_stays_unless_its_replica_is_overloaded() -> None:
    router, load = _router()
    first = router.choose(_request(1, 2, session="s"), load)
    assert first is not None
    load[first.replica].miss_tokens = OVERLOAD_TOKENS
    again = router.choose(_request(7, 8, session="s"), load)
    assert again is not None and (again.replica, again.why) == (first.replica, "session")
    load[first.replica].miss_tokens = 20 * OVERLOAD_TOKENS
    moved = router.choose(_request(9, 10, session="s"), load)
    assert moved is not None and moved.replica != first.replica
    stays = router.choose(_request(11, session="s"), load)
    assert stays is not None and stays.replica == moved.replica


def test_a_session_does_not_wait_for_tokens_while_others_have_them() -> None:
    router, load = _router()
    first = router.choose(_request(1, 2, session="s"), load)
    assert first is not None
    load[first.replica].kv_free = 0
    elsewhere = router.choose(_request(7, 8, session="s"), load)
    assert elsewhere is not None and elsewhere.replica != first.replica


def test_a_request_may_wait_for_its_prefix_or_take_what_is_free() -> None:
    router, load = _router(2)
    prompt = _request(*range(40))
    first = router.choose(prompt, load)
    assert first is not None
    load[first.replica].prefill_free = 0
    assert router.choose(prompt, load) is None
    other = router.choose(prompt, load, wait=False)
    assert other is not None and other.replica != first.replica


def test_a_request_larger_than_a_replica_goes_to_one_that_can_hold_it() -> None:
    router, load = _router(2)
    load["r0"].kv_tokens = load["r0"].kv_free = 1024
    for _ in range(5):
        choice = router.choose(_request(*range(10)), load)
        assert choice is not None and choice.replica == "r1"


def test_a_replica_that_comes_back_under_its_name_has_forgotten() -> None:
    router, load = _router(2)
    first = router.choose(_request(*range(10)), load)
    assert first is not None
    (other,) = set(load) - {first.replica}
    router.set_replicas({other: 1000})
    router.set_replicas({first.replica: 1000, other: 1000})
    choice = router.choose(_request(*range(10)), load)
    assert choice is not None and choice.cached_tokens == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=8), max_size=60), st.integers(1, 12))
def test_a_match_is_a_prefix_that_was_sent_there_and_memory_is_bounded(prompts: list[list[int]], size: int) -> None:
    router, load = _router(3, size)
    sent: dict[str, set[tuple[int, ...]]] = {name: set() for name in load}
    for prompt in prompts:
        blocks = tuple(hash(tuple(prompt[: index + 1])) for index in range(len(prompt)))
        choice = router.choose(RouteRequest(blocks, len(blocks) * BLOCK), load)
        assert choice is not None
        matched = choice.cached_tokens // BLOCK
        assert matched == 0 or blocks[:matched] in sent[choice.replica]
        assert all(len(each._held) <= size for each in router._caches.values())
        sent[choice.replica].update(blocks[: index + 1] for index in range(len(blocks)))


@given(st.binary(max_size=5000), st.binary(max_size=5000), st.binary(max_size=5000))
@settings(max_examples=40, deadline=None)
def test_blocks_are_equal_exactly_up_to_the_first_difference(same: bytes, a: bytes, b: bytes) -> None:
    left, right = prefix_blocks(same + a, block_bytes=64), prefix_blocks(same + b, block_bytes=64)
    common = next(
        (at for at, (x, y) in enumerate(zip(same + a, same + b, strict=False)) if x != y),
        len(same + min(a, b, key=len)),
    )
    assert left[: common // 64] == right[: common // 64]
    assert not set(left[common // 64 :]) & set(right[common // 64 :])
    assert len(left) == len(same + a) // 64
