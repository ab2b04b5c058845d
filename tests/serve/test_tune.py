"""`cordee serve tune` on a real server with llama.cpp; and that speculation changes no answer of llama.cpp."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines_world import CONTEXT, FLAGS, RunningEngine, follow, running, seen

from cordee.answers.services import ServiceView
from cordee.cli.main import main
from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.plan.serving.request import Traffic
from cordee.plan.serving.tuning import TuningBase, changes
from cordee.serve.engines.llama_cpp import LlamaCpp, LlamaDialect
from cordee.serve.engines.openai import CHAT
from cordee.serve.engines.port import EngineLaunch
from cordee.telemetry.host import free_port
from cordee.workload.spec import JobSpec


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Return the home of a server with two slots and no gateway."""
    folder = tmp_path / "home"
    start_server(folder, slots="2")
    yield folder
    with Client(folder) as client:
        client.down()
    until(lambda: not (folder / "server.json").exists(), "the server ends")


def until(holds: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def ready(client: Client) -> ServiceView:
    """Wait until the service is ready, and return it."""
    until(lambda: client.service("web").state == "ready", "the service is ready")
    return client.service("web")


def test_a_service_is_tuned_beside_its_replica_and_updated_to_what_pays(
    home: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {
        **{name.lstrip("-"): value or True for name, value in FLAGS.items()},
        "parallel": 2,
        "no-cache-prompt": True,
    }
    flags |= {"cache-type-k": "f16", "cache-type-v": "f16"}
    section = {
        "model": str(tiny_folder / "tiny.gguf"),
        "engine": "llama.cpp",
        "context": 512,
        "drain": "1s",
        "flags": flags,
    }
    spec = JobSpec.from_flags(run=(), gpus="1", name="web", service=section)
    with Client(home) as client:
        client.declare(spec.model_dump(mode="json") | {"cwd": str(tiny_folder)})
        before = ready(client)
        words = ["--json", "--requests", "2", "--concurrency", "2", "--rounds", "3"]
        with pytest.raises(SystemExit) as end:
            main(["serve", "tune", "web", "--home", str(home), *words])
        assert end.value.code == 0
        found = json.loads(capsys.readouterr().out)
        after, beside = client.service("web"), client.service("web-tune")
        assert (beside.state, beside.replicas) == ("ended", []), "its replica has left"
        prefix, cache, look_up = found["trials"]
        # The prefix cache was off, and llama.cpp computes the same with it.
        assert prefix["flags"] == {"--no-cache-prompt": False} and prefix["identical"] == found["noise"] == 1.0
        assert found["unchanged"]["output_tokens_per_s"] > 0 and prefix["measured"]["ttft_p99_s"] > 0
        assert found["unchanged"]["kv_tokens"] == 2 * 512 and found["unchanged"]["failed"] == 0
        # Its heads of 16 have no cache in blocks of 32: the reason is the engine's own.
        assert cache["change"] == "KV cache in q8_0" and "block size 32 does not divide" in cache["why"]
        assert not look_up["kept"] and "give --prompts" in look_up["why"]
        # On a busy machine the gain may drown in the noise; then the service is what it was.
        if found["flags"]:
            assert found["gain"]["low"] > 0 and found["revision"] == after.revision == 2
            assert "no-cache-prompt" not in after.spec["service"]["flags"]
            ready(client)
        else:
            assert found["revision"] is None and after.revision == 1 and after.spec == before.spec
            assert [each.job_id for each in after.replicas] == [each.job_id for each in before.replicas]


def test_speculation_changes_no_answer(llama: RunningEngine, tiny_folder: Path) -> None:
    model = str(tiny_folder / "tiny.gguf")
    base = TuningBase("llama.cpp", {}, Traffic(concurrency=1), slots=4, draft=model, real_prompts=True)
    offered = {each.name: dict(each.flags) for each in changes(base)}
    body = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 40}
    body |= {"messages": [{"role": "user", "content": "hello world hello world"}]}
    expected = seen(follow(LlamaDialect(), [llama], CHAT, body)[1]).text
    for name in ("n-gram look-up", "draft model"):
        launch = EngineLaunch(
            model=model, served_names=("tiny",), host="127.0.0.1", port=free_port(), context=CONTEXT,
            flags={**FLAGS, **offered[name]},
        )  # fmt: skip
        with running(LlamaCpp().command(launch), launch.port) as engine:
            assert seen(follow(LlamaDialect(), [engine], CHAT, body)[1]).text == expected, name
