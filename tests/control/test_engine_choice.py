"""`cordee up --on`: which machines a server may be given."""

from pathlib import Path

import pytest

from cordee.control.engines.choice import check_engine, engine_of
from cordee.control.node_tokens import DerivedTokens
from cordee.errors import InputError


@pytest.mark.parametrize("on", ["", "slurmish", "ray:", "ray://", "rays", "local:1"])
def test_a_name_of_no_machines_is_refused_with_those_that_there_are(on: str) -> None:
    with pytest.raises(InputError, match="names no machines") as refused:
        check_engine(on)
    assert "--on local" in str(refused.value.hint) and "--on ray" in str(refused.value.hint)


def test_nodes_of_a_cluster_need_an_address_at_which_they_reach_the_server(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="do not reach this server"):
        engine_of("ray", tmp_path, DerivedTokens("x"), slots=None, url=None, fingerprint=None)
