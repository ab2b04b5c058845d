"""Versions of models: `storage_artifacts.py [--weed WEED] [--json]`.

A small transformer is trained, and tuned from its bf16 weights with AdamW at a rate of 1e-5, by some steps on tokens
of the same law or of a new one: the bytes that each tuned model takes over its base, read back bit by bit, beside those
of the exclusive or, and the CPU seconds of both. With WEED, the binary of SeaweedFS, a large folder of bf16 weights is
then pushed and pulled, in one process, through the link of `storage.py` (50 MB/s each way, 20 ms a request): the
seconds over those of the link.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from cordee.storage.files import FileBlobs
from cordee.storage.registry.planes import _planes, decode_chunk, encode_chunk
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


def train(model: Small, rate: float, steps: int, seed: int, law: int | None = None) -> None:
    """Train on tokens whose frequencies follow Zipf's law; `law`: every second one follows from the one before."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for _ in range(steps):
        first = np.minimum(rng.zipf(1.2, (BATCH, LENGTH + 1)), VOCABULARY) - 1
        if law is not None:
            first[:, 1::2] = (first[:, 0::2][:, : first[:, 1::2].shape[1]] * 7 + law) % VOCABULARY
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


def timed(doing):
    began_s, before = time.monotonic(), os.times()
    found = doing()
    used = os.times()
    return found, time.monotonic() - began_s, used.user + used.system - before.user - before.system


CASES = (
    ("the same tokens, 20 steps", None, None, 20),
    ("the same law, 20 steps", 1, 1, 20),
    ("a new law, 5 steps", 1, 2, 5),
    ("a new law, 20 steps", 1, 2, 20),
    ("a new law, 40 steps", 1, 2, 40),
)
"""Of each tuned model its name, the laws of the base's tokens and of its own, and its steps."""


def tuned_models(folder: Path) -> list[dict[str, object]]:
    """Return for each case the bytes and CPU seconds of the tuned model over its base."""
    rows, bases = [], {}
    for number, (name, before, law, steps) in enumerate(CASES):
        if before not in bases:
            torch.manual_seed(0)
            bases[before] = model = Small()
            train(model, 1e-3, TRAINED_STEPS, 1, before)
            save(folder / f"base-{before}", model.state_dict())
            with torch.no_grad():
                for each in model.parameters():
                    each.copy_(each.to(torch.bfloat16))  # tuned from what was published
        tuned = copy.deepcopy(bases[before])
        train(tuned, 1e-5, steps, 2, law)
        rows.append(
            {"case": name, **over_base(folder / f"base-{before}", save(folder / str(number), tuned.state_dict()))}
        )
    return rows


def over_base(base: Path, tuned: Path) -> dict[str, object]:
    """Push a model over its base into a folder, and pull it."""
    store = ArtifactStore(FileBlobs(tuned.with_name(f"{tuned.name}-store")))
    first = store.push(files_below(base), "model")
    over = store.push(files_below(tuned), "model", base=store.read(first.manifest.digest))
    back = tuned.with_name(f"{tuned.name}-back")
    store.pull(store.read(over.manifest.digest), back)
    new, old = (np.fromfile(each / "model.safetensors", np.uint8) for each in (tuned, base))
    size_bytes, new, old = new.size, new[-(1 << 24) :], old[-(1 << 24) :]
    found: dict[str, object] = {
        "equal_elements": float((new.view(np.uint16) == old.view(np.uint16)).mean()),
        "stored_ratio": over.written_bytes / size_bytes,
        "bitwise": (back / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes(),
    }
    exclusive = _planes(new ^ old, 2)
    found["exclusive_or_ratio"] = len(exclusive) / new.size
    codec, steps = encode_chunk(new.tobytes(), 2, old.tobytes())
    ways = {
        "encode": lambda: encode_chunk(new.tobytes(), 2, old.tobytes()),
        "decode": lambda: decode_chunk(steps, codec, 2, new.size, old.tobytes()),
        "exclusive_or_encode": lambda: _planes(new ^ old, 2),
        "exclusive_or_decode": lambda: decode_chunk(exclusive, "delta", 2, new.size, old.tobytes()),
    }
    for way, doing in ways.items():
        found[f"{way}_cpu_s_per_gb"] = min(timed(doing)[2] for _ in range(5)) / new.size * 1e9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weed", help="the binary of SeaweedFS")
    parser.add_argument("--large", type=int, default=256_000_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cordee-artifacts-") as name:
        folder = Path(name)
        found: dict[str, object] = {"tuned": tuned_models(folder)}
        if given.weed:
            rng = np.random.default_rng(3)
            count = given.large // 2 // 8
            weights = {f"layer.{at}": rng.normal(0, 0.02, count).astype(np.float32) for at in range(8)}
            large = save(folder / "large", {name: torch.from_numpy(each) for name, each in weights.items()})
            (folder / "weed").mkdir()
            with store(given.weed, folder / "weed") as port:
                found["link"] = over_link(port, large, folder / "back")
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for row in (*found["tuned"], found.get("link", {})):
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else str(value) for key, value in row.items()))


def over_link(port: int, large: Path, again: Path) -> dict[str, object]:
    """Push and pull a model through the link."""
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
        whole, push_s, push_cpu_s = timed(lambda: artifacts.push(files_below(large), "model"))
        link_s = whole.written_bytes / RATE
        _, pull_s, pull_cpu_s = timed(lambda: artifacts.pull(artifacts.read(whole.manifest.digest), again))
        same = all(each.read_bytes() == (large / each.name).read_bytes() for each in again.iterdir())
        link_cpu_s = cpu_s(link.pid)
        link.stdin.close()
    return {
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
