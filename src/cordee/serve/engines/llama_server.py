"""`llama-server` by the wheel xllamacpp, for machines without the binary: the same flags, as far as services use them.

`python -m cordee.serve.engines.llama_server --model x.gguf --port 8080`. It ends on SIGTERM at once: its wrapper has
waited until no request is open.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from functools import reduce
from typing import Any

import xllamacpp

_TRUE = ("on", "true", "1", "yes")


def _gpu_layers(text: str) -> int:
    return {"all": 999, "auto": -1}.get(text) if text in ("all", "auto") else int(text)  # type: ignore[return-value]


def _cache_type(text: str) -> Any:
    return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{text.upper()}")


def _flash(text: str) -> Any:
    name = {"on": "ENABLED", "off": "DISABLED"}.get(text, "AUTO")
    return getattr(xllamacpp.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{name}")


def _speculation(text: str) -> Any:
    kind = xllamacpp.common_speculative_type
    return [getattr(kind, f"COMMON_SPECULATIVE_TYPE_{each.upper().replace('-', '_')}") for each in text.split(",")]


def _split(text: str) -> Any:
    return getattr(xllamacpp.llama_split_mode, f"LLAMA_SPLIT_MODE_{text.upper()}")


VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--port": ("port", int),
    "--parallel": ("n_parallel", int),
    "--ctx-size": ("n_ctx", int),
    "--batch-size": ("n_batch", int),
    "--ubatch-size": ("n_ubatch", int),
    "--n-gpu-layers": ("n_gpu_layers", _gpu_layers),
    "--main-gpu": ("main_gpu", int),
    "--split-mode": ("split_mode", _split),
    "--flash-attn": ("flash_attn_type", _flash),
    "--cache-type-k": ("cache_type_k", _cache_type),
    "--cache-type-v": ("cache_type_v", _cache_type),
    "--cache-ram": ("cache_ram_mib", int),
    "--cache-reuse": ("n_cache_reuse", int),
    "--slot-save-path": ("slot_save_path", lambda text: text.rstrip("/") + "/"),
    "--spec-type": ("speculative.types", _speculation),
    "--model-draft": ("speculative.draft.mparams.path", str),
    "--spec-draft-n-max": ("speculative.draft.n_max", int),
    "--sleep-idle-seconds": ("sleep_idle_seconds", int),
    "--chat-template": ("chat_template", str),
    "--verbosity": ("verbosity", int),
    "--api-key": ("api_keys", lambda text: [text]),
}
"""Settings of llama-server with a value: the path of an attribute of xllamacpp's parameters, and how it is read."""

SWITCHES = {
    "--metrics": ("endpoint_metrics", True),
    "--props": ("endpoint_props", True),
    "--slots": ("endpoint_slots", True),
    "--embeddings": ("embedding", True),
    "--kv-unified": ("kv_unified", True),
    "--no-webui": ("ui", False),
    "--no-warmup": ("warmup", False),
    "--no-cache-prompt": ("cache_prompt", False),
    "--no-cont-batching": ("cont_batching", False),
}


def main(argv: list[str]) -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="llama_server", allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--threads", type=int, default=0)
    for name, (attribute, read) in VALUES.items():
        parser.add_argument(name, dest=attribute, type=read)
    for name, (attribute, value) in SWITCHES.items():
        parser.add_argument(name, dest=attribute, action="store_const", const=value)
    given = parser.parse_args(argv)
    # Before the engine's threads exist, so that none of them takes the signal.
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames = given.model, [given.host]
    if given.alias:
        params.model_alias = set(given.alias.split(","))
    threads = given.threads or min(os.cpu_count() or 1, len(os.sched_getaffinity(0)))
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    for path in (path for path, _ in (*VALUES.values(), *SWITCHES.values())):
        if (value := getattr(given, path)) is not None:
            *parts, attribute = path.split(".")
            setattr(reduce(getattr, parts, params), attribute, value)
    server = xllamacpp.Server(params)
    print(f"llama.cpp listens on {server.listening_address}", flush=True)
    signal.sigwait(ends)
    os._exit(0)  # The engine's own end waits for open requests.


if __name__ == "__main__":
    main(sys.argv[1:])
