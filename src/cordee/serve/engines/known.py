"""The engines by name. Cheap to import: no engine's own library is."""

from collections.abc import Mapping

from cordee.errors import InputError
from cordee.serve.engines.llama_cpp import LlamaCpp, LlamaDialect
from cordee.serve.engines.port import Dialect, Engine

ENGINES: Mapping[str, Engine] = {each.name: each for each in (LlamaCpp(),)}
DIALECTS: Mapping[str, Dialect] = {each.name: each for each in (LlamaDialect(),)}


def find_engine(name: str) -> Engine:
    """Return an engine's process half.

    Raises:
        InputError: no such engine.
    """
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}", hint="use " + ", ".join(ENGINES))
    return ENGINES[name]
