"""transformers, behind a server of our own around its continuous batching. Its dialect is that of `token_ids`.

`transformers serve` has no limit of length, no metrics and no token ids, sizes its cache by the free memory, and sees a
cancelled request seconds later; its continuous batching has what these need.
"""

import importlib.util
import json
import sys

from cordee.errors import InputError, MissingExtraError
from cordee.serve.engines.port import EngineCapacity, EngineCommand, EngineLaunch, EngineLoad
from cordee.serve.engines.words import words


class Transformers:
    """The process half of transformers (`port.Engine`)."""

    name = "transformers"
    spans_nodes = False
    size_path = load_path = "/load"
    sessions = None

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Return how to start the engine.

        Raises:
            MissingExtraError: it is not installed.
            InputError: several GPUs.
        """
        missing = [name for name in ("torch", "transformers", "aiohttp") if importlib.util.find_spec(name) is None]
        if missing:
            raise MissingExtraError(
                f"the engine transformers needs {', '.join(missing)}, which this interpreter does not have",
                hint="pip install 'cordee[serve,huggingface]' torch",
            )
        if launch.gpus > 1:
            raise InputError(
                f"the engine transformers serves on one GPU, and a replica has {launch.gpus}",
                hint="use engine: vllm, or gpus: 1",
            )
        settings = {
            "--model": launch.model,
            "--names": ",".join(launch.served_names),
            "--host": launch.host,
            "--port": launch.port,
            "--context": launch.context,
            **launch.flags,
        }
        program = (sys.executable, "-m", "cordee.serve.engines.transformers_server")
        return EngineCommand((*program, *words(settings)), {"TOKENIZERS_PARALLELISM": "false"})

    def capacity(self, answer: bytes) -> EngineCapacity:
        """Return the engine's size as it says itself."""
        size = json.loads(answer)
        return EngineCapacity(size["kv_tokens"], size["slots"], size["context"])

    def load(self, answer: bytes) -> EngineLoad | None:
        """Return the requests inside the engine; None: it does not say."""
        load = json.loads(answer)
        return EngineLoad(load["open"], load["tokens"])
