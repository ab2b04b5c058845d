"""Nodes that bring one dataset into their caches: `storage_nodes.py --weed WEED [--nodes N] [--shards N] [--json]`.

Each node is a folder of its own, a process that gives its pieces to the others, and a prefetch as an agent runs it.
Over the S3 server and the link of `storage.py`: one node alone, a second one afterwards, and all at once.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cordee.storage.cache.neighbours import write_neighbours
from storage import HERE, RATE, WAIT_S, cpu_s, fill, store

URL, KEY = "s3://bucket/set/mds", "key"


class Node:
    """A node: its cache, and the process that gives pieces of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        argv = [sys.executable, "-m", "cordee.storage.cache.sharing", "--root", str(root)]
        self.giver = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.giver.stdin is not None and self.giver.stdout is not None
        self.giver.stdin.write(KEY + "\n")
        self.giver.stdin.flush()
        found = json.loads(self.giver.stdout.readline())
        self.at = f"127.0.0.1:{found['port']}/{found['fingerprint']}"

    def prefetch(self, endpoint: str) -> "subprocess.Popen[bytes]":
        """Begin to bring the dataset here."""
        env = {**os.environ, "CORDEE_CACHE": str(self.root), "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
        env |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        return subprocess.Popen(
            [sys.executable, "-m", "cordee.storage.cache.prefetch", URL], env=env, stdout=subprocess.PIPE
        )


def play(label: str, nodes: list[Node], port: int) -> dict[str, object]:
    """Let these nodes prefetch at once; return what came from where."""
    command = [sys.executable, str(HERE / "storage_link.py"), "--to", str(port), "--listeners", str(len(nodes))]
    command += ["--rate", str(RATE), "--wait", str(WAIT_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as link:
        assert link.stdin is not None and link.stdout is not None
        ports = json.loads(link.stdout.readline())
        before_s = [cpu_s(node.giver.pid) for node in nodes]
        began_s, children_s = time.monotonic(), os.times().children_user + os.times().children_system
        running = [node.prefetch(f"http://127.0.0.1:{own}") for node, own in zip(nodes, ports, strict=True)]
        found = [json.loads(each.communicate()[0]) for each in running]
        total_s, used = time.monotonic() - began_s, os.times()
        takers_s = used.children_user + used.children_system - children_s
        givers_s = sum(cpu_s(node.giver.pid) for node in nodes) - sum(before_s)
        link.stdin.write("count\n")
        link.stdin.flush()
        counted = json.loads(link.stdout.readline())
        link.stdin.close()
        link.wait()
    set_bytes = found[0]["bytes"]
    assert all(each["bytes_there"] == set_bytes for each in found), found
    given = sum(each["given_bytes"] for each in found)
    return {
        "label": label,
        "nodes": len(nodes),
        "store_ratio": sum(each["bytes"] for each in counted) / set_bytes,
        "given_ratio": given / set_bytes,
        "total_s": total_s,
        "link_s": set_bytes / RATE,
        "takers_cpu_s_per_gb": takers_s / (len(nodes) * set_bytes / 1e9),
        "givers_cpu_s_per_gb": givers_s / (given / 1e9) if given else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weed", required=True, help="the binary of SeaweedFS")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cordee-nodes-") as name:
        folder = Path(name)
        (folder / "weed").mkdir()
        nodes = [Node(folder / str(number)) for number in range(2 + given.nodes)]
        groups = [nodes[:2], nodes[2:]]
        for group in groups:
            for node in group:
                write_neighbours(node.root, KEY, node.at, {URL: [each.at for each in group]})
        with store(given.weed, folder / "weed") as port:
            fill(port, given.shards, {"cordee"})
            rows = [play("one node", nodes[:1], port), play("a second one afterwards", nodes[1:2], port)]
            rows.append(play(f"{given.nodes} nodes at once", nodes[2:], port))
        for node in nodes:
            assert node.giver.stdin is not None
            node.giver.stdin.close()
            node.giver.wait()
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['label']:26}{row['store_ratio']:>6.2f}x from the store{row['given_ratio']:>6.2f}x from nodes"
            f"{row['total_s']:>7.1f} s (link {row['link_s']:.1f} s)"
            f"{row['takers_cpu_s_per_gb']:>6.1f} CPU-s/GB taken{row['givers_cpu_s_per_gb']:>6.1f} given"
        )


if __name__ == "__main__":
    main()
