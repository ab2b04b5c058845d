"""`cordee plan --trace`: a small model's memory beside its plan, in a terminal and as JSON, and its refusals."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import forks
from cordee.cli.main import main
from cordee.train.trace_memory import comparison
from cordee.train.trace_memory.comparison import ask_process
from cordee.train.trace_memory.question import Question

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 768, "vocab_size": 4096, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces are forked where torch has been imported: each import would take longer than the trace."""
    monkeypatch.setattr(
        comparison, "subprocess", SimpleNamespace(Popen=forks.Asked, PIPE=None, TimeoutExpired=TimeoutError)
    )


def _run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return left.value.code


def test_a_trace_stands_beside_the_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", model, "--gpus", "8xH100", "--layout", "fsdp=8", "--recompute", "none", "--seq", "1024")
    assert not _run(*words, "--batch", "8", "--trace", "--json")
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {
        "model", "gpu", "gpus", "layout", "first", "why_not_first", "question", "traced", "eager", "planned",
        "needed_bytes", "fits",
    }  # fmt: skip
    assert (found["layout"], found["question"]["fsdp"], found["question"]["code"]) == ("fsdp8", 8, "torchtitan")
    traced, planned = found["traced"], found["planned"]
    assert [moment["phase"] for moment in traced["moments"]] == list(planned["moments"])
    assert traced["allocated_bytes"] == max(sum(moment["parts"].values()) for moment in traced["moments"])
    assert found["fits"] and traced["allocated_bytes"] <= traced["reserve"]["needed_bytes"] < found["needed_bytes"]
    assert traced["parameters"] == 2 * (256 * 512 + 256 * 256 + 3 * 256 * 768 + 512) + 2 * 4096 * 256 + 256


@pytest.mark.soak
def test_compiled_layers_stand_beside_eager_ones(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", model, "--gpus", "8xH100", "--layout", "fsdp=8", "--recompute", "none", "--seq", "1024")
    assert not _run(*words, "--batch", "8", "--trace", "--compile", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["question"]["compiled"] and found["planned"]["parts"]["loss"] == 4 * 1024 * 4096
    kept = [
        next(moment["parts"]["activations"] for moment in found[each]["moments"] if moment["phase"] == "loss")
        for each in ("eager", "traced")
    ]
    assert kept[1] < kept[0]
    assert not _run(*words, "--batch", "8", "--trace", "--compile")
    assert "eager   compiled" in " ".join(capsys.readouterr().out.split("\n"))


def test_compiled_layers_are_not_traced_with_tensor_parallelism(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", model, "--gpus", "8xH100", "--layout", "tp=2,fsdp=4", "--recompute", "none", "--seq", "256")
    assert _run(*words, "--batch", "8", "--trace", "--compile") == 10
    assert "compiled layers are not traced with tensor parallelism" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "asked"),
    [
        ("tp=2,fsdp=4", {"tp": 2, "fsdp": 4, "zero": 3, "weights": "mixed"}),
        ("dp=8,zero=0", {"tp": 1, "fsdp": 1, "replicas": 8, "zero": 0, "weights": "autocast"}),
        ("dp=8,zero=1", {"fsdp": 1, "replicas": 8, "zero": 1}),
        ("dp=8,zero=2", {"fsdp": 8, "replicas": 1, "zero": 2, "weights": "mixed"}),
    ],
)
def test_each_way_to_divide_is_traced(
    model: str, layout: str, asked: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", model, "--gpus", "8xH100", "--layout", layout, "--recompute", "none", "--seq", "256")
    assert not _run(*words, "--batch", "8", "--micro-batch", "1", "--trace", "--json")
    found = json.loads(capsys.readouterr().out)
    assert asked.items() <= found["question"].items()
    assert found["fits"] and found["planned"]["allocated_bytes"] > 0 < found["traced"]["allocated_bytes"]


@pytest.mark.soak
def test_adapters_are_traced(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", model, "--gpus", "1xH100", "--train", "qlora", "--rank", "4", "--seq", "256", "--batch", "1")
    assert not _run(*words, "--trace", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["question"]["code"] == "hf"  # what peft goes around is planned
    assert found["question"]["adapters"]["base"]["name"] == "nf4"
    linears = ((256, 256), (256, 128), (256, 128), (256, 256), (256, 768), (256, 768), (768, 256))
    assert found["traced"]["trained_parameters"] == 2 * 4 * sum(map(sum, linears))


PHI = {
    "model_type": "phi3", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 3072, "vocab_size": 8192, "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param("--train lora", id="phi3-lora", marks=pytest.mark.soak),
        pytest.param("--train full", id="phi3-full", marks=pytest.mark.soak),
        pytest.param("--train qlora", id="phi3-prepared"),
        pytest.param("--train lora --base-bits 8", id="phi3-int8", marks=pytest.mark.soak),
        pytest.param("--train dora --base-bits 4", id="phi3-dora-prepared", marks=pytest.mark.soak),
        pytest.param("--train qlora --quantize-head --dequantized 2", id="phi3-qlora", marks=pytest.mark.soak),
        pytest.param("--train dora", id="phi3-dora", marks=pytest.mark.soak),
    ],
)
def test_matrices_that_are_one_are_planned_as_they_are_traced(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PHI))
    words = ("plan", str(tmp_path), "--gpus", "1xH100", "--layout", "dp=1", "--micro-batch", "1", "--batch", "1")
    assert not _run(
        *words, "--recompute", "none", "--seq", "2048", *asked.split(), "--trace", "--model-code", "hf", "--json"
    )
    found = json.loads(capsys.readouterr().out)
    traced, planned = found["traced"], found["planned"]
    off = planned["allocated_bytes"] / traced["allocated_bytes"] - 1
    said = "\n".join(f"{each['phase']}: {each['parts']}" for each in traced["moments"])
    assert off == pytest.approx(0, abs=0.02), f"{off:+.2%}; traced {said}; planned {planned}"


WIDE = CONFIG | {
    "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4,
    "intermediate_size": 3072, "vocab_size": 65_536,
}  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(not find_spec("transformers"), reason="the traced process needs transformers")
@pytest.mark.parametrize(
    "asked",
    [
        pytest.param("--train qlora --recompute full --seq 512", id="nf4-recomputed"),
        pytest.param("--train lora --recompute none --seq 2048", id="bf16", marks=pytest.mark.soak),
    ],
)
def test_sharded_adapters_are_planned_as_they_are_traced(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At each moment as well as at the fullest: the embedding is larger than all that layers hold."""
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    words = ("plan", str(tmp_path), "--gpus", "8xH100", "--layout", "fsdp=8", "--micro-batch", "1", "--batch", "16")
    assert not _run(*words, *asked.split(), "--trace", "--json")
    found = json.loads(capsys.readouterr().out)
    traced, planned = found["traced"], found["planned"]
    off = {
        each["phase"]: planned["moments"][each["phase"]] / sum(each["parts"].values()) - 1
        for each in traced["moments"]
        if each["phase"] in planned["moments"]
    }
    off["with room"] = planned["reserved_bytes"] / traced["reserve"]["reserved_bytes"] - 1
    off["at least"] = planned["needed_bytes"] / traced["reserve"]["needed_bytes"] - 1
    assert all(abs(each) < 0.05 for each in off.values()), off
    assert planned["allocated_bytes"] == pytest.approx(traced["allocated_bytes"], rel=0.01)


MIXTURE = {
    "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "num_local_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(not find_spec("transformers"), reason="the traced process needs transformers")
@pytest.mark.parametrize(("ranks", "recompute"), [(16, "none"), pytest.param(6, "full", marks=pytest.mark.soak)])
def test_experts_on_ranks_that_do_not_divide_them_are_planned_as_they_are_traced(
    ranks: int, recompute: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 16 ranks four hold an expert each, and what is gathered and reduced has one for every rank."""
    wide = MIXTURE | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(wide))
    words = ("plan", str(tmp_path), "--gpus", f"{ranks}xH100", "--layout", f"fsdp={ranks},ep=1", "--seq", "512")
    assert not _run(*words, "--recompute", recompute, "--micro-batch", "1", "--batch", str(ranks), "--trace", "--json")
    found = json.loads(capsys.readouterr().out)
    traced, planned = found["traced"], found["planned"]
    assert found["question"]["code"] == "hf" and found["question"]["fsdp"] == ranks
    assert planned["allocated_bytes"] == pytest.approx(traced["allocated_bytes"], rel=0.005)
    weights = {each["phase"]: each["parts"]["weights"] for each in traced["moments"]}["states"]
    assert planned["parts"]["weights"] == pytest.approx(weights, rel=0.01)


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(not find_spec("transformers"), reason="the traced process needs transformers")
def test_tp_that_is_asked_for_and_that_the_code_has_no_styles_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    words = ("plan", str(tmp_path), "--gpus", "2xH100", "--recompute", "none", "--seq", "256", "--batch", "1")
    assert _run(*words, "--trace", "--layout", "tp=2") == 15
    assert "moe_tp_experts" in capsys.readouterr().err


@pytest.mark.soak
@pytest.mark.skipif(not find_spec("transformers"), reason="the traced process needs transformers")
def test_tp_that_nobody_asked_for_is_left_out_where_the_code_has_no_styles_for_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _run("plan", "mixtral-8x7b", "--gpus", "8xH100", "--seq", "4096", "--trace", "--json") == 21
    found = json.loads(capsys.readouterr().out)
    assert "tp4" in found["first"] and "moe_tp_experts" in found["why_not_first"]
    assert found["layout"].startswith("fsdp8") and found["question"]["tp"] == 1


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(not find_spec("transformers"), reason="the traced process needs transformers")
def test_a_model_of_images_has_no_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "vit", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not _run("plan", str(tmp_path), "--gpus", "1xH100", "--batch", "64", "--trace")
    said = capsys.readouterr().out
    assert "micro-batches of 1" in said and "tokens" not in said


@pytest.mark.soak
def test_a_model_without_formulas_is_traced_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not _run("plan", str(tmp_path), "--gpus", "4xH100", "--seq", "256", "--trace")
    said = capsys.readouterr().out
    assert "transformers' model code" in said and "rank 0 of fsdp4" in said
    assert "plan" not in said.replace("plan is off", "") and "It needs" in said


T5 = {
    "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 2048,
}  # fmt: skip


@pytest.mark.usefixtures("forked")
def test_an_embedding_of_several_modules_is_sharded_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """T5's encoder, decoder and head hold one matrix, which FSDP2 takes in one group only."""
    (tmp_path / "config.json").write_text(json.dumps(T5))
    words = ("plan", str(tmp_path), "--gpus", "4xH100", "--layout", "fsdp=4", "--recompute", "none", "--seq", "128")
    assert not _run(*words, "--batch", "4", "--trace", "--model-code", "hf", "--json")
    traced = json.loads(capsys.readouterr().out)["traced"]
    states, *_, step = traced["moments"]
    assert traced["parameters"] > 2048 * 64
    for moment, part, each in ((states, "weights", 4), (states, "optimizer", 8), (step, "gradients", 4)):
        assert moment["parts"][part] == pytest.approx(each * traced["parameters"] / 4, rel=0.1)


GPT2 = {
    "model_type": "gpt2", "n_embd": 512, "n_layer": 3, "n_head": 8, "n_positions": 1024, "vocab_size": 2000,
}  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("gpus", "layout", "asked"),
    [
        pytest.param(1, "dp=1", "", id="gpt2-autocast"),
        pytest.param(1, "dp=1", "--train lora", id="gpt2-lora"),
        pytest.param(1, "dp=1", "--train qlora", id="gpt2-prepared", marks=pytest.mark.soak),
        pytest.param(8, "fsdp=8", "", id="gpt2-fsdp", marks=pytest.mark.soak),
    ],
)
def test_a_gelu_that_is_written_out_is_planned_as_it_is_traced(
    gpus: int, layout: str, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight operations keep four inner tensors, three of them fp32 under autocast; dropout keeps masks."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    words = ("plan", str(tmp_path), "--gpus", f"{gpus}xH100", "--layout", layout, "--micro-batch", "4")
    words = (*words, "--batch", str(4 * gpus), "--recompute", "none", "--seq", "1024", *asked.split())
    assert not _run(*words, "--trace", "--model-code", "hf", "--json")
    found = json.loads(capsys.readouterr().out)
    off = found["planned"]["allocated_bytes"] / found["traced"]["allocated_bytes"] - 1
    assert abs(off) < 0.02, f"{off:+.2%}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model-code", "megatron"), "Megatron-LM's code cannot be traced"),
        (("--model-code", "jax"), "unknown model code 'jax'"),
        (("--optimizer", "muon"), "muon is no optimizer of torch's own"),
        (("--precision", "fp8"), "fp8 cannot be traced"),
        (("--layout", "tp=2,pp=2,dp=2"), "can be traced"),
        (("--layout", "tp=2,dp=4,zero=0"), "can be traced"),
        (("--loss", "chunked"), "a chunked loss is none of the model's own code"),
    ],
)
def test_a_refusal_says_why(model: str, words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("plan", model, "--gpus", "8xH100", "--seq", "256", "--batch", "8", "--trace", *words)
    assert says in capsys.readouterr().err


GEMMA: dict[str, object] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512, "sliding_window": 64,
}  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(not find_spec("transformers"), reason="the traced process needs transformers")
@pytest.mark.parametrize("family", [pytest.param("gemma2", marks=pytest.mark.soak), "gemma3_text"])
def test_a_model_that_is_planned_for_serving_alone_is_traced(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | GEMMA))
    assert not _run("plan", str(tmp_path), "--gpus", "2xH100", "--seq", "128", "--trace", "--json")
    found = json.loads(capsys.readouterr().out)
    assert found["planned"] is None and found["layout"] == "fsdp2" and found["traced"]["layers"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model-code hff", "did you mean hf?"),
        ("--model-code megatron", "use --framework megatron"),
        ("--autocast", "add --trace"),
        ("--trace --stage dpo", "--stage does not work with --trace"),
        ("--trace --launch trainer", "--launch does not work with --trace"),
    ],
)
def test_flags_that_would_be_dropped_are_refused(
    words: str, message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("plan", model, "--gpus", "8xH100", *words.split()) == 10
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("gpus", "says"),
    [((), "a trace needs --gpus"), (("--gpus", "1..8xH100"), "a trace needs one number of GPUs, not 1..8xH100")],
)
def test_a_trace_is_of_one_number_of_gpus(
    gpus: tuple[str, ...], says: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("plan", model, *gpus, "--trace") == 10
    assert says in capsys.readouterr().err


FINE = {
    "hidden_size": 512, "num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 1024, "moe_intermediate_size": 256, "vocab_size": 4096, "max_position_embeddings": 4096,
    "num_experts_per_tok": 4, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURES = {
    "mixtral": MIXTURE | {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16, "head_dim": 128},
    "qwen3_moe": FINE | {"model_type": "qwen3_moe", "num_experts": 16, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": FINE | {
        "model_type": "deepseek_v3", "num_key_value_heads": 8, "n_routed_experts": 16, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 192, "kv_lora_rank": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 32, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    },
}  # fmt: skip


@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(not find_spec("transformers"), reason="the traced process needs transformers")
@pytest.mark.parametrize(
    ("family", "asked"),
    [
        ("mixtral", "--train lora --targets attention --recompute none --layout fsdp=8"),
        ("mixtral", "--train lora --targets all --recompute none --layout fsdp=8"),
        pytest.param("mixtral", "--train qlora --targets q,v,router --layout fsdp=8", marks=pytest.mark.soak),
        pytest.param("mixtral", "--train lora --layout fsdp=16", marks=pytest.mark.soak),
        pytest.param("qwen3_moe", "--train lora --targets attention --layout fsdp=8", marks=pytest.mark.soak),
        pytest.param("deepseek_v3", "--train qlora --targets attention --layout fsdp=8", marks=pytest.mark.soak),
    ],
)  # fmt: skip
def test_adapters_of_mixtures_are_planned_as_they_are_traced(
    family: str, asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURES[family]))
    gpus = "16" if "=16" in asked else "8"
    asked += "" if "--recompute" in asked else " --recompute none"
    words = ("plan", str(tmp_path), "--gpus", f"{gpus}xH100", "--seq", "2048", "--micro-batch", "1", "--batch", gpus)
    assert not _run(*words, *asked.split(), "--trace", "--json")
    found = json.loads(capsys.readouterr().out)
    traced, planned = found["traced"], found["planned"]
    assert planned["allocated_bytes"] == pytest.approx(traced["allocated_bytes"], rel=0.005)
    weights = {each["phase"]: each["parts"]["weights"] for each in traced["moments"]}["states"]
    assert planned["parts"]["weights"] == pytest.approx(weights, rel=0.01)


@pytest.mark.usefixtures("forked")
def test_a_function_is_traced_by_its_file_and_said_to_have_no_formulas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "import torch\ndef net():\n    model = torch.nn.Linear(8, 4)\n"
    (tmp_path / "own_net.py").write_text(code + "    return model, lambda: model(torch.zeros(2, 8)).sum()\n")
    name = f"{tmp_path / 'own_net.py'}:net"
    assert _run("plan", name, "--gpus", "1xH100") == 14
    assert f"cordee plan {name} --gpus 8xH100 --trace" in " ".join(capsys.readouterr().err.split())
    assert not _run("plan", name, "--gpus", "1xH100", "--trace", "--json")
    assert json.loads(capsys.readouterr().out)["traced"]["parameters"] == 36
    assert _run("plan", name + "s", "--gpus", "1xH100", "--trace") == 16
    assert "folder/file.py:function" in capsys.readouterr().err


def test_who_waits_longer_than_a_minute_hears_what_helps(model: str) -> None:
    said: list[str] = []
    answer = ask_process(Question(config=CONFIG, code="torchtitan", seq_tokens=64), lambda: said.append("slow"), 1e-3)
    assert said == ["slow"] and answer.parameters > 0
