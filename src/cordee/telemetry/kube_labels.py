"""`python -m cordee.telemetry.kube_labels --out FILE rack=KEY ...`: a node file from a Kubernetes node's own labels.

A pod cannot see the labels of its node otherwise. It runs before the agent; a failure ends the container, which the
kubelet starts again.
"""

import argparse
import json
import os
import ssl
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from cordee.errors import InputError
from cordee.hardware.labels import check_labels

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PATIENCE_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Write the node file; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cordee.telemetry.kube_labels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="node file to write")
    parser.add_argument("--account", type=Path, default=ACCOUNT, help="folder of the service account")
    parser.add_argument("labels", nargs="+", metavar="LABEL=KEY", help="a label, and the key of Kubernetes that has it")
    args = parser.parse_args(argv)
    keys = dict(each.split("=", 1) for each in args.labels)
    try:
        found = node_labels(os.environ["CORDEE_NODE"], args.account, os.environ)
        labels = {label: found[key] for label, key in keys.items() if key in found}
        check_labels(labels)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(f"{label}={value}\n" for label, value in labels.items()))
    except (OSError, ValueError, LookupError, InputError) as error:
        print(f"error: the labels of the node cannot be read: {error!r}", file=sys.stderr)
        print("hint: a pod's service account has to be allowed to get nodes", file=sys.stderr)
        return 1
    for label in keys.keys() - labels.keys():
        print(f"the node has no label {keys[label]}: its {label} is not known", file=sys.stderr)
    return 0


def node_labels(node: str, account: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of a node, as the API server of the cluster states them.

    Raises:
        OSError: the server or its certificate cannot be used, or it refuses.
        LookupError, ValueError: this is no pod, or the answer is no node.
    """
    host, port = env["KUBERNETES_SERVICE_HOST"], env["KUBERNETES_SERVICE_PORT"]
    request = urllib.request.Request(
        f"https://{f'[{host}]' if ':' in host else host}:{port}/api/v1/nodes/{node}",
        headers={"Authorization": f"Bearer {(account / 'token').read_text().strip()}"},
    )
    context = ssl.create_default_context(cafile=str(account / "ca.crt"))
    with urllib.request.urlopen(request, timeout=_PATIENCE_S, context=context) as answer:
        labels = json.load(answer)["metadata"]["labels"]
    return {str(key): str(value) for key, value in labels.items()}


if __name__ == "__main__":
    sys.exit(main())
