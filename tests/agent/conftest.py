import pytest
from agent_world import World


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path / "home")
    yield made
    made.close()
