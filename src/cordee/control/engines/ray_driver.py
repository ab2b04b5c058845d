"""`python -m cordee.control.engines.ray_driver`: the process that talks to Ray, since Ray may abort the one it is in.

It reads commands from stdin and writes facts to stdout, one JSON object a line. It decides nothing, and what it
reserves and starts outlives it: the next driver finds a node's placement group by its name.

    {"hold": {"id", "resources"}}               reserve a node's GPUs
    {"start": {"id", "resources", "folder", "config", "args"}}
                                                reserve them, and start the node's agent unless one runs
    {"release": ID}                             give a node back to Ray
    {"want": [RESOURCES, ...]}                  ask the autoscaler for a cluster of this size
    {"leave": true}                             give every node back, and end; the end of stdin gives nothing back

    {"cluster": {...}}                          once
    {"nodes": [...]} or {"alive": true}         once a second: the living nodes if they have changed
    {"gone": {"id", "why"}}                     a node has died, as Ray says
    {"waiting": {"id"}}, {"reserved": {"id"}}   Ray's own jobs hold the GPUs; they are reserved
    {"started": {"id", ...}}, {"failed": {"id", "why"}}
    {"warning": TEXT}                           something cannot be done
    {"problem": TEXT}                           the last line of a driver that ends because of it
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cordee.control.engines import ray_node
from cordee.imports import end_uncollected

LOOK_S = 1.0
END_S = 5.0  # from the end of stdin
BUSY_S = 0.05  # between two looks while nodes start
WAITING_S = 5.0  # a group that is not placed by then waits for GPUs of Ray's jobs


@dataclass(slots=True)
class _Hold:
    """A node that is to be held: first its group is placed, then a task in it starts the agent, unless one runs."""

    command: dict[str, Any]
    group: Any
    since_s: float = field(default_factory=time.monotonic)
    task: Any = None
    announced: bool = False


class Driver:
    """The Ray driver.

    Args:
        say: writes one fact.
    """

    def __init__(self, say: Callable[[dict[str, object]], None]) -> None:
        self._say = say
        self._holds: dict[str, _Hold] = {}  # by Ray's id of the node
        self._nodes: dict[str, dict[str, object]] = {}  # the living ones, by id
        self._prefix = ""
        self._groups: dict[str, Any] = {}  # placement groups by the id of their node

    def connect(self, address: str, namespace: str) -> None:
        """Join the cluster; Ray tries for about 20 s."""
        import ray
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(ray_node)
        self._prefix = f"{namespace}/"
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
        self._say({"cluster": {"ray": ray.__version__, "address": ray.get_runtime_context().gcs_address}})
        self._groups = _earlier_groups(self._prefix)

    def run(self, commands: "queue.SimpleQueue[dict[str, Any]]") -> None:
        """Serve until the command to leave."""
        look_s = 0.0
        while True:
            busy = any(hold.task is not None or not hold.announced for hold in self._holds.values())
            timeout_s = BUSY_S if busy else max(0.0, look_s - time.monotonic())
            try:
                command = commands.get(timeout=timeout_s)
                if self._obey(command):
                    return
            except queue.Empty:
                pass
            self._advance_all()
            if time.monotonic() >= look_s:
                look_s = time.monotonic() + LOOK_S
                self._look()

    def _obey(self, command: dict[str, Any]) -> bool:
        if "hold" in command or "start" in command:
            self._hold(command.get("hold") or command["start"])
        elif "release" in command:
            self._release(str(command["release"]))
        elif "want" in command:
            self._request(command["want"])
        elif "leave" in command:
            for node_id in list(self._groups):
                self._release(node_id)
            return True
        return "end" in command

    def _request(self, bundles: list[dict[str, float]]) -> None:
        import ray

        try:
            if _through_client():
                ray.get(ray.remote(num_cpus=0)(_request_resources).remote(bundles), timeout=END_S)
            else:
                _request_resources(bundles)
        except Exception as error:  # a cluster without an autoscaler is none the worse for it
            self._say({"warning": f"Ray's autoscaler cannot be asked for {len(bundles)} GPUs or slots: {error}"})

    # -- membership ----------------------------------------------------------------------------------------

    def _look(self) -> None:
        import ray

        known, draining = ray.nodes(), _draining()
        nodes = {str(node["NodeID"]): _facts(node, draining) for node in known if node["Alive"]}
        for node in known:
            if node["NodeID"] in self._nodes.keys() - nodes.keys():
                self._say({"gone": {"id": node["NodeID"], "why": node["DeathReasonMessage"]}})
        self._say({"nodes": list(nodes.values())} if nodes != self._nodes else {"alive": True})
        self._nodes = nodes
        # The group of a dead node would wait for ever: an id never comes back.
        for node_id in self._groups.keys() - nodes.keys():
            self._release(node_id)

    # -- one node ------------------------------------------------------------------------------------------

    def _hold(self, command: dict[str, Any]) -> None:
        from ray.util import placement_group

        node_id = str(command["id"])
        if node_id in self._holds:
            return
        if node_id not in self._groups:
            self._groups[node_id] = placement_group(
                [command["resources"]],
                name=self._prefix + node_id,
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": node_id}],
            )
        self._holds[node_id] = _Hold(command, self._groups[node_id])

    def _advance_all(self) -> None:
        if self._holds:
            placed = {name for name, state in _group_states() if state == "CREATED"}
            for node_id in list(self._holds):
                self._advance(node_id, is_placed=self._prefix + node_id in placed)

    def _advance(self, node_id: str, *, is_placed: bool) -> None:
        import ray

        hold = self._holds[node_id]
        if hold.task is None:
            if is_placed:
                self._say({"reserved": {"id": node_id}})
                if "config" in hold.command:
                    hold.task = self._submit(hold)
                else:
                    del self._holds[node_id]
            elif not hold.announced and time.monotonic() > hold.since_s + WAITING_S:
                hold.announced = True
                self._say({"waiting": {"id": node_id}})
            return
        if not ray.wait([hold.task], timeout=0)[0]:
            return
        del self._holds[node_id]
        try:
            self._say({"started": {"id": node_id, **ray.get(hold.task)}})
        except Exception as error:  # whatever the task raised, or the end of its node
            cause = getattr(error, "cause", None) or error
            self._say({"failed": {"id": node_id, "why": str(cause).strip().splitlines()[-1]}})

    def _submit(self, hold: _Hold) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        command = hold.command
        task = ray.remote(ray_node.start_agent).options(
            num_cpus=command["resources"].get("CPU", 0),
            num_gpus=command["resources"].get("GPU", 0),
            max_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(hold.group),
        )
        return task.remote(command["folder"], command["config"], command["args"])

    def _release(self, node_id: str) -> None:
        from ray.util import remove_placement_group

        self._holds.pop(node_id, None)
        if node_id in self._groups:
            remove_placement_group(self._groups.pop(node_id))


def _facts(node: dict[str, Any], draining: dict[str, int]) -> dict[str, object]:
    address, resources = node["NodeManagerAddress"], node["Resources"]
    return {
        "id": node["NodeID"],
        # Ray's default name is the address; the host's name says more.
        "name": node["NodeManagerHostname"] if node["NodeName"] in ("", address) else node["NodeName"],
        "address": address,
        "gpus": int(resources.get("GPU", 0)),
        "cpus": int(resources.get("CPU", 0)),
        "labels": {key: value for key, value in node["Labels"].items() if not key.startswith("ray.io/")},
        "drain_by_ms": draining.get(node["NodeID"]),
    }


def _draining() -> dict[str, int]:
    """Return the deadlines, in ms since the Unix epoch (0: none), of nodes that Ray is draining."""
    from ray._private.state import state

    # Ray has no public call for this; through Ray Client there is none at all.
    find = getattr(state, "get_draining_nodes", None)
    return {} if find is None or _through_client() else dict(find())


def _through_client() -> bool:
    import ray

    return bool(ray.util.client.ray.is_connected())


def _request_resources(bundles: list[dict[str, float]]) -> None:
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)


def _group_states() -> list[tuple[str, str]]:
    """Return the names and the states of all placement groups of the cluster."""
    from ray.util import placement_group_table

    return [(str(group["name"]), str(group["state"])) for group in placement_group_table().values()]


def _earlier_groups(prefix: str) -> dict[str, Any]:
    """Return the placement groups of earlier drivers, by the id of their node."""
    from ray.util import get_placement_group

    names = [name for name, state in _group_states() if name.startswith(prefix) and state != "REMOVED"]
    return {name.removeprefix(prefix): get_placement_group(name) for name in names}


def _read(commands: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    commands.put({"end": True})
    time.sleep(END_S)
    os._exit(0)  # a call of Ray's does not return


def main() -> int:
    """Run the driver; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cordee.control.engines.ray_driver", description=__doc__)
    parser.add_argument("--address", required=True, help="auto, HOST:PORT of the head, or ray://HOST:PORT (Ray Client)")
    parser.add_argument("--namespace", required=True, help="of this server's placement groups")
    args = parser.parse_args()
    facts = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints

    def say(fact: dict[str, object]) -> None:
        facts.write(json.dumps(fact) + "\n")

    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    driver = Driver(say)
    try:
        driver.connect(args.address, args.namespace)
        driver.run(commands)
    except Exception as error:
        say({"problem": f"{type(error).__name__}: {error}".strip()})
        raise
    return 0


if __name__ == "__main__":
    end_uncollected()
    sys.exit(main())
