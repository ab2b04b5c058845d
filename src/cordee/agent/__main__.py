"""`python -m cordee.agent --home H --node N --epoch E [--slots S]`: the agent of one node."""

import argparse
import logging
import sys
from pathlib import Path

from cordee.agent.agent import NodeAgent
from cordee.agent.gpus import discover
from cordee.errors import CordeeError


def main() -> int:
    """Run the agent; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cordee.agent", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="of the server")
    parser.add_argument("--node", required=True, help="name of the node")
    parser.add_argument("--epoch", type=int, required=True, help="above that of every earlier agent of this node")
    parser.add_argument("--slots", type=int, help="offer this many CPU slots in place of GPUs")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        devices = discover(args.slots)
    except CordeeError as error:
        logging.error("%s", error)
        return error.exit_code
    logging.info("agent %s of node %s: %s", args.epoch, args.node, devices.says)
    return NodeAgent(args.home.resolve(), args.node, args.epoch, devices).run()


if __name__ == "__main__":
    sys.exit(main())
