"""Jobs that run on a real server: what they measure stands beside their plan."""

import json
import re
import sys
from pathlib import Path

import pytest
from verbs import Verb, code_of

from cordee.client import Client
from cordee.control.admission import admit
from cordee.control.store.sql import SqlStore
from cordee.events import JobSubmitted, Node
from cordee.hardware.load import load_catalogue
from cordee.ids import JobId
from cordee.plan import Settings
from cordee.plan.states import adapter_parameters, flop_per_token
from cordee.plan.survive import checkpoint_bytes
from cordee.schedule.quota.quotas import Quotas
from cordee.workload.load import load_shape
from cordee.workload.spec import JobSpec
from kineto import Kineto

MEASURED = """\
import torch, torch.distributed as dist
import cordee

dist.init_process_group("gloo")
torch.manual_seed(0)  # the same weights on both ranks
with cordee.job({"model": torch.nn.Linear(8, 8)}) as job:
    print("mesh", job.mesh().mesh_dim_names, tuple(job.mesh().shape), "of", job.layout, flush=True)
    for step in job.steps(20):
        job.log(tokens=64)
dist.destroy_process_group()
"""


@pytest.mark.gang
def test_measured_values_stand_beside_the_plan(verb: Verb, home: Path, tmp_path: Path) -> None:
    small = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    small |= {"num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(small))
    (tmp_path / "train.py").write_text(MEASURED)
    (tmp_path / "job.yaml").write_text(
        f"run: [{sys.executable}, train.py]\ngpus: 2\ncwd: {tmp_path}\ncheckpoint: {{to: {tmp_path / 'ck'}}}\n"
        "model: {config: config.json, global_batch: 2, layout: fsdp2}\nenv: {OMP_NUM_THREADS: '1'}\n"
    )
    job_id = verb("run", str(tmp_path / "job.yaml")).split()[0]
    with Client(home) as client:
        lines = list(client.logs(job_id, follow=True))
        job = client.job(job_id)
    assert job.state == "done", lines
    assert any("mesh ('dp',) (2,) of fsdp2" in line for line in lines)
    rows = {row.quantity: row for row in job.measured}
    assert list(rows) == ["peak memory", "step time", "save", "restart"], "slots have no FLOPs to hold MFU against"
    assert (rows["peak memory"].measured or 0) > 50e6, "the process has imported torch"
    for name in ("save", "restart"):
        planned, measured = rows[name].planned, rows[name].measured
        assert planned and measured and rows[name].off_by == pytest.approx(measured / planned - 1)
    assert rows["step time"].planned is None and (rows["step time"].measured or 0) > 0
    shown = verb("jobs", job_id)
    assert re.search(r"layout +fsdp2", shown)
    assert re.search(r"PLANNED +MEASURED +OFF BY", shown) and re.search(r"restart +\S+( s)? +\S+ m?s +-\d+ %", shown)
    assert "PLANNED" in verb("why", job_id) and job.estimate_missed == []
    assert re.search(rf"{job_id} +save +\S+", verb("cost"))


TUNED = """\
import torch
from torch import nn
import cordee

torch.manual_seed(0)
H, F, KV, RANK, LAYERS = 64, 128, 32, 4, 2
SIZES = {"q": (H, H), "k": (H, KV), "v": (H, KV), "o": (H, H), "gate": (H, F), "up": (H, F), "down": (F, H)}


class Adapted(nn.Module):
    \"\"\"A frozen matrix with an adapter: fp32, as peft keeps it.\"\"\"

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(inputs, RANK) / 8), nn.Parameter(torch.zeros(RANK, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + ((x.float() @ self.a) @ self.b).to(x.dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of = nn.ModuleDict({name: Adapted(*size) for name, size in SIZES.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of = self.of
        q, k, v = (each.unflatten(-1, (-1, 16)).transpose(1, 2) for each in (of["q"](x), of["k"](x), of["v"](x)))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + of["o"](seen.transpose(1, 2).flatten(2))
        return x + of["down"](nn.functional.silu(of["gate"](x)) * of["up"](x))


model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, fused=False, foreach=False)
print("trained", sum(each.numel() for each in trained.values()), flush=True)
adapters = nn.ParameterDict({name.replace(".", "-"): each for name, each in trained.items()})
target = torch.randn(2, 16, H, dtype=torch.bfloat16)
with cordee.job({"adapters": adapters, "optimizer": optimizer}) as job:
    for step in job.steps(15):
        x = torch.randn(2, 16, H, dtype=torch.bfloat16)
        loss = nn.functional.mse_loss(model(x).float(), target.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.log(loss=loss.item(), tokens=32)
"""


def test_a_real_run_of_adapters_stands_beside_its_plan(verb: Verb, home: Path, tmp_path: Path) -> None:
    """What the script trains and what its checkpoint holds are the plan's adapters; times stand beside each other."""
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tune.py").write_text(TUNED)
    (tmp_path / "job.yaml").write_text(
        f"run: [{sys.executable}, tune.py]\ngpus: 1\ncwd: {tmp_path}\ncheckpoint: {{to: {tmp_path / 'ck'}}}\n"
        "model: {config: config.json, seq: 16, global_batch: 2, tune: {train: lora, rank: 4}}\n"
        "env: {OMP_NUM_THREADS: '1'}\n"
    )
    job_id = verb("run", str(tmp_path / "job.yaml")).split()[0]
    with Client(home) as client:
        lines = list(client.logs(job_id, follow=True))
        job = client.job(job_id)
    assert job.state == "done" and job.estimate is not None, lines
    shape, settings = load_shape(str(tmp_path / "config.json")), {"seq_tokens": 16, "global_batch": 2}
    training = Settings(**settings, train="lora", rank=4).training(shape, 1)  # type: ignore[arg-type]
    assert training.adapters is not None
    adapters = shape.layers * adapter_parameters(shape, training.adapters)
    assert any(f"trained {adapters}" in line for line in lines), lines
    stored = sum(path.stat().st_size for path in (tmp_path / "ck").rglob("*") if path.is_file())
    planned = checkpoint_bytes(shape, training)
    assert planned == 12 * adapters <= stored, "fp32 weights and two moments of the adapters"
    # Each kept generation has its own, and the base of the model is in none of them.
    in_full = checkpoint_bytes(shape, Settings(**settings).training(shape, 1))  # type: ignore[arg-type]
    assert stored < 3 * planned + 200_000 and in_full > 10 * planned
    assert job.estimate.flop_per_token == pytest.approx(flop_per_token(shape, training))
    rows = {row.quantity: row for row in job.measured}
    for name in ("save", "restart"):
        assert rows[name].planned and rows[name].measured and rows[name].off_by is not None
    assert (rows["step time"].measured or 0) > 0 and (rows["peak memory"].measured or 0) > 0
    shown = verb("jobs", job_id)
    assert re.search(r"PLANNED +MEASURED +OFF BY", shown) and re.search(r"save +\S+", shown)


def test_a_profile_is_compared_with_the_plan_that_the_server_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job was admitted to eight H100s; the server that answers has come up without them."""
    home = tmp_path / "home"
    home.mkdir()
    wanted = JobSpec.model_validate(
        {
            "name": "gpt",
            "run": ["true"],
            "gpus": 8,
            "gpu": "H100",
            "cwd": str(tmp_path),
            "checkpoint": {"to": str(tmp_path)},
        }
        | {"model": {"name": "llama-3-8b", "global_batch": 8}}
    )
    node = Node(name="a", epoch=1, gpu_name="NVIDIA H100 80GB HBM3", gpus=8)
    job = admit(
        wanted, job_id=JobId("gpt-abcdef"), owner="ada", nodes=[node], catalogue=load_catalogue(), quotas=Quotas(())
    ).job
    store = SqlStore(f"sqlite:///{home / 'cordee.db'}")
    store.commit([JobSubmitted(at_us=1, job=job, spec=wanted.model_dump_json())])
    store.close()
    Kineto().kernel("gemm", 0, 1000).write(tmp_path / "rank0.json")
    assert code_of("up", "--home", str(home), "--slots", "2") == 0
    capsys.readouterr()
    code = code_of("profile", "--job", "gpt", "--json", "--home", str(home))
    said = capsys.readouterr()
    assert code_of("down", "--home", str(home)) == 0
    assert code == 0, said.err
    found = json.loads(said.out)
    plan = {key: found["plan"][key] for key in ("job", "model", "gpus", "gpu", "layout")}
    assert plan == {
        "job": "gpt-abcdef", "model": "llama-3-8b", "gpus": 8, "gpu": "H100", "layout": job.estimates[0].layout
    }  # fmt: skip
    assert [rank["file"] for rank in found["ranks"]] == ["rank0.json"], "the profile lies in the job's folder"
