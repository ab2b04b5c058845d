"""`python -m cordee.agent --folder F`: the agent of one node; F/agent.json says of which."""

import argparse
import logging
import sys
from pathlib import Path

from cordee.imports import end_uncollected, uncollected

with uncollected():
    from cordee.agent.agent import NodeAgent
    from cordee.agent.connection import Connection
    from cordee.agent.facts import Facts
    from cordee.agent.gpus import discover
    from cordee.agent.keeper import CRASHED
    from cordee.agent.settings import AgentSettings
    from cordee.errors import CordeeError


def main() -> int:
    """Run the agent; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cordee.agent", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="the agent's own, with agent.json")
    folder = parser.parse_args().folder.resolve()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # else each part of a rank's log has a line in the agent's
    logging.getLogger("websockets").setLevel(logging.WARNING)
    try:
        settings = AgentSettings.read(folder)
        devices = discover(settings.slots)
    except CordeeError as error:
        logging.error("%s", error)
        return error.exit_code
    logging.info("agent of node %s: %s", settings.node, devices.says)
    try:
        return NodeAgent(folder, settings, Facts(settings.node, devices, settings.labels), Connection).run()
    except Exception:
        logging.exception("the agent of node %s has failed", settings.node)
        return CRASHED


if __name__ == "__main__":
    end_uncollected()
    sys.exit(main())
