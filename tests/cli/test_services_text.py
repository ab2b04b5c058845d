"""Services on a terminal, and the flags of their verbs: nothing runs here."""

from typing import Any

import pytest
from rich.console import Console
from verbs import run

from cordee.answers.services import ModelView, ReplicaView, ServedView, ServiceView
from cordee.cli import terminal
from cordee.cli.services import changed, service_name
from cordee.cli.services_text import print_list, print_service, print_urls, progress_line
from cordee.errors import InputError, SpecError
from cordee.workload.service import Slo
from cordee.workload.spec import JobSpec, parse_spec

CHAT = parse_spec(
    "{name: chat, gpus: 2xH100, service: {model: /models/llama-3-8b, engine: vllm, replicas: 1..4, "
    "slo: {ttft: 500ms}, flags: {max-num-seqs: 64}}}"
)


def replica(state: str, number: int, **others: Any) -> ReplicaView:
    known: dict[str, Any] = {"address": None, "node": None, "engine": None, "model": None} | others
    return ReplicaView.model_validate(
        {"job_id": f"chat-abcde{number}", "epoch": 1, "revision": 3, "state": state, "kv_tokens": None, "slots": None}
        | {"since_us": 0}
        | known
    )


def service(*replicas: ReplicaView, **others: Any) -> ServiceView:
    known: dict[str, Any] = {"state": "ready", "wanted": 2, "why": "", "urls": ["http://head:8480"]}
    known |= {"measured": ServedView(), "estimate": None, "compared": []} | others
    return ServiceView.model_validate(
        {"name": "chat", "owner": "ada", "revision": 3, "min": 1, "max": 4, "standby": 0, "declared_us": 0}
        | {"replicas": list(replicas), "spec": CHAT.model_dump(mode="json")}
        | known
    )


READY = replica("ready", 2, address="http://10.0.0.7:4711", node="gpu-7", engine="vllm", kv_tokens=430_000, slots=64)
LOADING = replica("loading", 3, node="gpu-8")
BUSY = ServedView(queued=3, running=17, ttft_p99_us=412_000, tpot_p99_us=31_000, requests_per_s=8.25, kv_fraction=0.61)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (service(state="starting"), "0 of 2 replicas ready: no replica yet"),
        (service(READY, LOADING, state="updating"), "1 of 2 replicas ready: 1 loads"),
        (service(READY, READY), "2 of 2 replicas ready"),
        (service(READY, READY, READY, replica("draining", 1)), "2 of 2 replicas ready: 1 drains"),
        (service(state="idle", wanted=0), "none runs until a request comes"),
        (service(state="ended", wanted=0), "no replica is left"),
        (
            service(replica("waiting", 1), replica("waiting", 2), state="starting", why="it needs 4 GPUs"),
            "0 of 2 replicas ready: 2 wait for GPUs: it needs 4 GPUs",
        ),
    ],
)
def test_progress_is_one_line(found: ServiceView, said: str) -> None:
    assert progress_line(found) == said


@pytest.mark.parametrize("columns", [80, 120])
def test_a_service_and_the_list_fit_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "stdout", lambda: Console(width=columns))
    found = service(READY, LOADING, measured=BUSY, why="24 requests are open")
    print_list([found])
    listed = capsys.readouterr().out
    print_service(found)
    shown = capsys.readouterr().out
    assert max(map(len, (listed + shown).splitlines())) <= columns
    for word in ("chat", "ready", "1/2", "8.2", "412 ms"):
        assert word in listed
    for word in ("1 of 2 ready, scales from 1 to 4", "vllm (max-num-seqs=64)", "2 x H100 a replica", "TTFT 500 ms"):
        assert word in shown
    for word in ("17 requests open, 3 queued", "61% of the KV cache", "http://head:8480/v1", "430,000", "gpu-8"):
        assert word in shown
    assert ("http://10.0.0.7:4711" in shown) == (columns == 120)


def test_a_service_of_several_models_says_which_replica_holds_which(capsys: pytest.CaptureFixture[str]) -> None:
    swapping = replica("loading", 3, node="gpu-8", model="./code", why="2 requests wait for ./code")
    models = [
        ModelView(name="./general", replicas=1, queued=0, load_us=21_500_000),
        ModelView(name="./code", replicas=0, queued=2, load_us=None, why="it did not load: exit code 1"),
    ]
    print_service(service(READY.model_copy(update={"model": "./general"}), swapping, models=models))
    shown = capsys.readouterr().out
    for word in ("MODEL", "./general: 1 replica, loads in 21.5 s", "./code: none, 2 queued, it did not load: exit"):
        assert word in shown
    print_list([service(READY, models=models)])
    assert "llama-3-8b +1" in capsys.readouterr().out
    print_service(service(READY))
    assert "MODEL" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"model": "job:gpt", "steps": {"job:gpt": 4000}}, "job:gpt, step 4,000"),
        (
            {"model": "artifact:gpt:best", "versions": {"artifact:gpt:best": {"ref": "gpt:3", "digest": "0" * 64}}},
            "artifact:gpt:best, gpt:3",
        ),
    ],
)
def test_a_service_says_which_weights_it_has(
    section: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = JobSpec.model_validate(CHAT.model_dump() | {"service": section})
    print_service(service(READY, spec=spec.model_dump(mode="json")))
    assert said in capsys.readouterr().out


def test_a_service_says_what_it_costs_and_the_most_that_it_may(capsys: pytest.CaptureFixture[str]) -> None:
    spec = changed(CHAT, {"max_price": "$12/h"}, None, {}).model_dump(mode="json")
    print_service(service(READY, LOADING, spec=spec, micro_usd_per_hour=5_980_000))
    assert "$5.98/h a replica, $11.96/h now, at most $12.00/h" in capsys.readouterr().out
    print_service(service(READY))
    assert "price" not in capsys.readouterr().out, "none is known"
    with pytest.raises(SpecError, match="'12' is not a price"):
        changed(CHAT, {"max_price": "12"}, None, {})


def test_the_url_is_the_answer_and_how_to_use_it_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_urls(service(READY))
    printed = capsys.readouterr()
    assert printed.out == "http://head:8480/v1\n"
    assert '"model": "chat"' in printed.err
    print_urls(service(READY, urls=[]))
    printed = capsys.readouterr()
    assert printed.out == "http://10.0.0.7:4711/v1\n"
    assert "cordee up --gateway auto" in printed.err


def test_an_update_changes_what_was_given_and_nothing_else() -> None:
    after = changed(CHAT, {"context": 8192, "slo": {"tpot": "50ms"}, "flags": {"seed": 1}, "drain": "1m"}, None, {})
    assert CHAT.service is not None and after.service is not None
    kept = {"slo": Slo(ttft_s=0.5, tpot_s=0.05), "flags": {"max-num-seqs": 64, "seed": 1}, "drain_s": 60.0}
    assert after.service == CHAT.service.model_copy(update={"context": 8192} | kept)
    assert after.on_preempt.grace_s == 60.0
    several = changed(CHAT, {"models": ["./code"]}, None, {})
    assert several.service == CHAT.service.model_copy(update={"models": ("./code",)})
    assert changed(CHAT, {}, "4xH200", {"A": "1"}) == JobSpec.model_validate(
        CHAT.model_dump() | {"gpus": 4, "gpu": "H200", "env": {"A": "1"}}
    )


def test_an_update_without_a_change_takes_the_newest_checkpoint_of_a_training_job() -> None:
    with pytest.raises(InputError, match="nothing to change was given"):
        changed(CHAT, {}, None, {})
    section = {"model": "job:gpt", "like": "./base", "steps": {"job:gpt": 400}}
    gpt = JobSpec.model_validate({"name": "gpt", "gpus": 1, "service": section})
    found = changed(gpt, {}, None, {}).service
    assert found is not None and (found.model, found.like, found.steps) == ("job:gpt", "./base", {})
    section = {"model": "artifact:gpt:best", "versions": {"artifact:gpt:best": {"ref": "gpt:3", "digest": "0" * 64}}}
    kept = changed(JobSpec.model_validate(CHAT.model_dump() | {"service": section}), {}, None, {}).service
    assert kept is not None and (kept.model, kept.versions) == ("artifact:gpt:best", {}), "the server says which"
    other = changed(gpt, {"model": "./tiny"}, None, {}).service
    assert other is not None and (other.model, other.like, other.steps) == ("./tiny", None, {})


def test_a_service_is_named_after_its_model() -> None:
    assert service_name("/models/Llama 3.1!") == "llama-3-1"
    assert service_name("...") == "service"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("serve run", InputError.exit_code, "no model was given"),
        ("serve run ./tiny --from-job gpt", InputError.exit_code, "a model and --from-job were given"),
        ("serve run ./tiny --replicas 4..1", SpecError.exit_code, "the fewest are more than the most"),
        ("serve run ./tiny --engine vlm", SpecError.exit_code, "did you mean vllm"),
        ("serve run ./tiny --flag seed", SpecError.exit_code, "--flag seed is not NAME=VALUE"),
        ("serve run --engine vllm -- python web.py", SpecError.exit_code, "the engine vllm needs a model"),
        (
            "serve run --also ./b -- python web.py",
            SpecError.exit_code,
            "service.models are models beside service.model",
        ),
        ("serve run none.yaml --also ./b", InputError.exit_code, "--also cannot be combined with a job file"),
        ("serve run none.yaml", SpecError.exit_code, "none.yaml cannot be read"),
        ("serve run none.yaml --replicas 2", InputError.exit_code, "--replicas cannot be combined with a job file"),
    ],
)
def test_a_wrong_service_is_refused_here(
    words: str, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORDEE_HOME", "/nowhere")
    found, _, printed = run(capsys, *words.split())
    assert (found, said in printed) == (code, True), printed
