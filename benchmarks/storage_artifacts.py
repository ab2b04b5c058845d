"""Versions of models over a limited link: `storage_artifacts.py --weed WEED [--tuned-steps N] [--json]`.

A small transformer is trained, and tuned from its bf16 weights with AdamW at a rate of 1e-5: the bytes that the tuned
model takes over its base, read back bit by bit. Then a large folder of bf16 weights is pushed and pulled, in one
process, through the link of `storage.py` (50 MB/s each way, 20 ms a request): the seconds over those of the link.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from cordee.storage.registry.store import ArtifactStore, files_below
from cordee.storage.remote import RemoteBlobs
from cordee.storage.safetensors import write_file
from storage import HERE, RATE, WAIT_S, cpu_s, store

VOCABULARY, WIDTH, LAYERS, LENGTH, BATCH = 4096, 320, 6, 64, 8
TRAINED_STEPS = 40


class Small(torch.nn.Module):
    """A causal transformer of 10 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 5, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


def train(model: Small, rate: float, steps: int, seed: int) -> None:
    """Train on tokens whose frequencies follow Zipf's law, each likely to follow from the one before."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        first = np.minimum(rng.zipf(1.2, (BATCH, LENGTH + 1)), VOCABULARY) - 1
        first[:, 1::2] = (first[:, 0::2][:, : first[:, 1::2].shape[1]] * 7 + seed) % VOCABULARY
        tokens = torch.from_numpy(first.astype(np.int64))
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write tensors in bf16 as one safetensors file."""
    folder.mkdir()
    half = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in tensors.items()}
    table = [(name, "bfloat16", tuple(each.shape), each.nbytes) for name, each in half.items()]
    write_file(
        folder / "model.safetensors", table, (each.view(torch.uint8).numpy().tobytes() for each in half.values())
    )
    return folder


def equal_elements(one: Path, other: Path) -> float:
    """Return the fraction of bf16 elements that are equal in two files of the same tensors."""
    first, second = (np.fromfile(each / "model.safetensors", np.uint8)[-(1 << 24) :] for each in (one, other))
    return float((first.view(np.uint16) == second.view(np.uint16)).mean())


def timed(doing):
    began_s, before = time.monotonic(), os.times()
    found = doing()
    used = os.times()
    return found, time.monotonic() - began_s, used.user + used.system - before.user - before.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weed", required=True, help="the binary of SeaweedFS")
    parser.add_argument("--large", type=int, default=256_000_000)
    parser.add_argument("--tuned-steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Small()
    train(model, 1e-3, TRAINED_STEPS, 1)
    with tempfile.TemporaryDirectory(prefix="cordee-artifacts-") as name:
        folder = Path(name)
        base = save(folder / "base", model.state_dict())
        with torch.no_grad():
            for each in model.parameters():
                each.copy_(each.to(torch.bfloat16))  # tuned from what was published
        train(model, 1e-5, given.tuned_steps, 2)
        tuned = save(folder / "tuned", model.state_dict())
        rng = np.random.default_rng(3)
        count = given.large // 2 // 8
        large = save(
            folder / "large",
            {f"layer.{at}": torch.from_numpy(rng.normal(0, 0.02, count).astype(np.float32)) for at in range(8)},
        )
        (folder / "weed").mkdir()
        with store(given.weed, folder / "weed") as port:
            found = over_link(port, base, tuned, large, folder / "back")
    if given.json:
        print(json.dumps(found, indent=2))
    else:
        for key, value in found.items():
            print(f"{key:28} {value:.3f}" if isinstance(value, float) else f"{key:28} {value}")


def over_link(port: int, base: Path, tuned: Path, large: Path, back: Path) -> dict[str, object]:
    """Push and pull all three through the link."""
    import boto3

    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", region_name="us-east-1",
                          aws_access_key_id="key", aws_secret_access_key="secret")  # fmt: skip
    client.create_bucket(Bucket="bucket")
    client.close()
    command = [sys.executable, str(HERE / "storage_link.py"), "--to", str(port), "--listeners", "1"]
    command += ["--rate", str(RATE), "--wait", str(WAIT_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as link:
        assert link.stdin is not None and link.stdout is not None
        os.environ |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{json.loads(link.stdout.readline())[0]}"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        artifacts = ArtifactStore(RemoteBlobs("s3://bucket/artifacts"))
        first = artifacts.push(files_below(base), "model")
        over = artifacts.push(files_below(tuned), "model", base=artifacts.read(first.manifest.digest))
        artifacts.pull(artifacts.read(over.manifest.digest), back)
        same = (back / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()
        whole, push_s, push_cpu_s = timed(lambda: artifacts.push(files_below(large), "model"))
        link_s = whole.written_bytes / RATE
        again = back.with_name("large-back")
        _, pull_s, pull_cpu_s = timed(lambda: artifacts.pull(artifacts.read(whole.manifest.digest), again))
        same = same and all(
            each.read_bytes() == (large / each.name).read_bytes() for each in again.iterdir() if each.is_file()
        )
        link_cpu_s = cpu_s(link.pid)
        link.stdin.close()
    return {
        "tuned_bytes": over.manifest.size_bytes,
        "tuned_stored_ratio": over.written_bytes / over.manifest.size_bytes,
        "tuned_equal_elements": equal_elements(base, tuned),
        "bitwise": same,
        "large_bytes": whole.manifest.size_bytes,
        "large_stored_ratio": whole.written_bytes / whole.manifest.size_bytes,
        "link_s": link_s,
        "push_s": push_s,
        "push_over_link": push_s / link_s,
        "push_cpu_s": push_cpu_s,
        "pull_s": pull_s,
        "pull_over_link": pull_s / link_s,
        "pull_cpu_s": pull_cpu_s,
        "link_cpu_s": link_cpu_s,
    }


if __name__ == "__main__":
    main()
