"""The job that `cordee demo` runs: a small GPT learns the sources of Python's standard library, byte by byte.

An ordinary FSDP2 script for GPUs or CPUs, with two lines of Cordee in its loop. Batches and dropout draw from torch's
global generator, so a resume that lost its state would change the weights. Each rank writes the steps that it begins,
and its shard of the final weights.
"""

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from cordee.train.entry import job as cordee_job

WIDTH, HEADS, LAYERS, CONTEXT = 96, 4, 3, 96
GLOBAL_BATCH = 16  # sequences of a step, over however many ranks
VOCABULARY = 256
TEXT_BYTES = 2_000_000


class DecoderBlock(nn.Module):  # type: ignore[misc]
    """Attention and a perceptron, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, tokens, width] to the same shape."""
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):  # type: ignore[misc]
    """A language model over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map [batch, tokens] to logits [batch, tokens, vocabulary]."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def text() -> Tensor:
    """Return the first bytes of the standard library's sources, in the order of their names."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
        if len(found) >= TEXT_BYTES:
            break
    return torch.frombuffer(found[:TEXT_BYTES], dtype=torch.uint8)


def batch(corpus: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
    """Return random windows, and the same windows one byte later; each [sequences, context]."""
    starts = torch.randint(len(corpus) - CONTEXT - 1, (sequences,))
    windows = torch.stack([corpus[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return windows[:, :-1], windows[:, 1:]


def main() -> None:
    """Train for `--steps`, and write to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="a step takes so long at least")
    args = parser.parse_args()
    device = _device()
    # Gloo beside NCCL: checkpoints are planned on CPU tensors.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        train(args.steps, args.out, device, args.step_seconds)
    finally:
        dist.destroy_process_group()


def _device() -> torch.device:
    """Return this rank's GPU if there are GPUs, set up so that two runs give the same bits."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def train(steps: int, out: Path, device: torch.device, step_s: float) -> None:
    """Run the training loop."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1865)  # the same weights on every rank
    model = Gpt().to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)  # other batches on every rank
    corpus = text()
    epoch = int(os.environ.get("CORDEE_EPOCH", "1"))
    with (
        (out / f"steps-rank{rank}.jsonl").open("a", buffering=1) as steps_file,
        cordee_job({"model": model, "optimizer": optimizer}) as job,
    ):
        for step in job.steps(steps):
            begun_s = time.monotonic()
            steps_file.write(json.dumps({"epoch": epoch, "step": step}) + "\n")
            tokens, targets = (part.to(device) for part in batch(corpus, GLOBAL_BATCH // world_size))
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(max(0.0, begun_s + step_s - time.monotonic()))
            job.log(loss=loss.detach(), tokens=world_size * tokens.numel())
    (out / f"weights-rank{rank}.bin").write_bytes(shard(model))


def shard(model: nn.Module) -> bytes:
    """Return the bytes of this rank's part of every weight, in the order of their names."""
    parts = dict(model.named_parameters())
    local = [part.to_local() if isinstance(part, DTensor) else part for _, part in sorted(parts.items())]
    return b"".join(part.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in local)


if __name__ == "__main__":
    main()
