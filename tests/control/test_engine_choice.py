"""`cordee up --on`: which machines a server may be given."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from cordee.control.engines.choice import check_engine, engine_of
from cordee.control.engines.port import Host
from cordee.control.engines.slurm import Allocation, _Fleet
from cordee.control.node_tokens import DerivedTokens
from cordee.errors import InputError, MissingExtraError


@pytest.mark.parametrize("on", ["", "slurmish", "ray:", "ray://", "rays", "local:1"])
def test_a_name_of_no_machines_is_refused_with_those_that_there_are(on: str) -> None:
    with pytest.raises(InputError, match="names no machines") as refused:
        check_engine(on)
    assert "--on local" in str(refused.value.hint) and "--on ray" in str(refused.value.hint)


def test_nodes_of_a_cluster_need_an_address_at_which_they_reach_the_server(tmp_path: Path) -> None:
    host = Host(list, lambda node: False, lambda node: None)
    with pytest.raises(InputError, match="do not reach this server"):
        engine_of("ray", tmp_path, DerivedTokens("x"), host, slots=None, url=None, fingerprint=None)


@pytest.mark.parametrize(("state", "dead"), [("TIMEOUT", True), ("NODE_FAIL", False), (None, False)])
def test_slurm_proves_the_end_of_ranks_only_by_jobs_that_it_ended(state: str | None, dead: bool) -> None:
    """A node that slurmctld does not hear may still run its ranks, and be connected to the server."""
    fleet = _Fleet()
    fleet.look([Allocation("7", "RUNNING", "n1", "None")])
    assert fleet.nodes() == ["n1"]
    fleet.look([] if state is None else [Allocation("7", state, "n1", "None")])
    assert fleet.nodes() == [] and bool(fleet.deaths()) is dead


@pytest.mark.skipif(
    find_spec("ray") is None or find_spec("grpc") is not None, reason="Ray without its client is needed"
)
def test_ray_without_its_client_is_said_at_once() -> None:
    with pytest.raises(MissingExtraError, match=r"(?s)Ray Client needs grpc.*ray\[client\].*--on ray"):
        check_engine("ray://head:10001")
