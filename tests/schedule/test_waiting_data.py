"""The datasets of waiting jobs, in the order in which they will be read."""

from cordee.schedule.waiting_data import waiting_data
from world import World, job, node


def test_datasets_are_in_the_order_of_the_queue() -> None:
    world = World(
        node("n1"),
        job("runs", 8, "production", data=("s3://running",)),
        job("last", 8, "preemptible", data=("s3://c",)),
        job("none", 8),
        job("second", 4, data=("s3://b", "s3://a")),
        job("first", 8, priority=1, data=("s3://a",)),
    )
    assert waiting_data(world.state)[0] == "s3://running"
    world.cycle()
    assert waiting_data(world.state) == ("s3://a", "s3://b", "s3://c")
