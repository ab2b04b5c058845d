"""Labels of a node: what is refused, with the hint."""

import pytest

from cordee.errors import InputError
from cordee.hardware.labels import check_labels, parse_label, parse_node_file


def test_a_node_file() -> None:
    text = '# of the provisioning\nrack=r7\nblock="b1"\n\ncapacity = spot\nprice=$2.10  # agreed in May\n'
    assert parse_node_file(text) == {"rack": "r7", "block": "b1", "capacity": "spot", "price": "$2.10"}


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("rack", "'rack' is not KEY=VALUE", "rack=r7"),
        ("rack=", "'rack=' is not KEY=VALUE", "rack=r7"),
        ("zone=a", "no label 'zone'", "block, rack, island, island_gpus, capacity, price"),
        ("capacity=any", "capacity=any is not known", "on-demand or spot"),
        ("island_gpus=0", "island_gpus=0 is not a number of GPUs", "island_gpus=8"),
        ("price=2.10", "'2.10' is not an amount of money", "$2.50"),
    ],
)
def test_a_label_that_cannot_be_is_refused(text: str, message: str, hint: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_label(text)
    assert message in refused.value.message and hint in (refused.value.hint or "")


def test_labels_of_settings_are_checked_too() -> None:
    check_labels({"rack": "r7", "capacity": "on-demand"})
    with pytest.raises(InputError, match="no label 'Rack'"):
        check_labels({"Rack": "r7"})
