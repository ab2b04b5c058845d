"""Declarations of queues: names, parents, quotas and limits that a tree may have."""

import pytest

from cordee.errors import QueuesError
from cordee.events import Queue
from cordee.schedule.quota.queues import check

BAD = {
    "two of one name": ([Queue(name="a"), Queue(name="a")], "two queues are named a"),
    "unknown parent": ([Queue(name="team"), Queue(name="a", parent="taem")], "a is inside taem, which is no queue"),
    "a circle": (
        [Queue(name="a", parent="b"), Queue(name="b", parent="c"), Queue(name="c", parent="b")],
        "the queues go in a circle: b inside c inside b",
    ),
    "inside itself": ([Queue(name="a", parent="a")], "the queues go in a circle: a inside a"),
    "children above the parent": (
        [
            Queue(name="team", quota_gpus=8),
            Queue(name="a", parent="team", quota_gpus=6),
            Queue(name="b", parent="team", quota_gpus=4),
        ],
        "the quotas inside team come to 10 GPUs (a 6 + b 4), but its own is 8",
    ),
    "more than there is": (
        [Queue(name="a", quota_gpus=24), Queue(name="b", quota_gpus=16)],
        "40 GPUs are guaranteed (a 24 + b 16), but the cluster has 32",
    ),
    "limit below quota": (
        [Queue(name="a", quota_gpus=8, limit_gpus=4)],
        "a has a quota of 8 GPUs, but may hold 4 at most",
    ),
    "negative": ([Queue(name="a", quota_gpus=-1)], "a: quota_gpus is -1"),
    "weightless": ([Queue(name="a", weight=0)], "a: weight is 0"),
    "bad name": ([Queue(name="a b")], "'a b' cannot name a queue"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_tree_that_cannot_be_is_refused_with_the_numbers(case):
    queues, message = BAD[case]
    with pytest.raises(QueuesError) as caught:
        check(queues, 32)
    assert caught.value.message == message and caught.value.hint


def test_the_hint_names_the_nearest_queue():
    with pytest.raises(QueuesError) as caught:
        check(BAD["unknown parent"][0])
    assert caught.value.hint == "did you mean team? the queues are a, team"


def test_guaranteed_is_not_compared_while_no_node_is_known():
    check([Queue(name="a", quota_gpus=1000)], None)
