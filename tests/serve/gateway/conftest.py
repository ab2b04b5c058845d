"""One gateway with two fake engines for all tests of this folder that leave both alive."""

from collections.abc import Iterator

import pytest
from gateway_rig import FakeEngine, Rig, rig, run


@pytest.fixture(scope="session")
def pair_of_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with rig(tmp_path_factory.mktemp("gateway")) as made:
        made.fake("a", interval_ms=5, slots=32)
        made.fake("b", interval_ms=5, slots=32)
        made.start()
        yield made


@pytest.fixture
def two(pair_of_engines: Rig) -> Iterator[Rig]:
    """Return the rig with both engines well and the routes as at its start."""
    made = pair_of_engines
    yield made
    engines = [each for each in made.processes if isinstance(each, FakeEngine)]

    async def mend(session: object) -> None:
        from gateway_rig import post, until

        for each in engines:
            await post(session, f"{each.address}/fault", {})  # type: ignore[arg-type]

        async def well() -> bool:
            async with session.get(f"{made.url}/metrics") as response:  # type: ignore[attr-defined]
                lines = [line for line in (await response.text()).splitlines() if "replica_usable{" in line]
            return len(lines) == 2 and all(line.endswith(" 1") for line in lines)

        await until(well, "both replicas in rotation")

    made.routes.services["chat"]["endpoints"] = []
    for each in engines:
        made.routes.endpoint(f"{each.name}.1", each.address, slots=32)
    made.routes.more = {}
    made.routes.write()
    run(mend)
