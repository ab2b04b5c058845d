"""The engines by name. Cheap to import: no engine's own library is."""

from collections.abc import Iterable, Mapping

from cordee.errors import InputError
from cordee.serve.engines.command import Command, CommandDialect
from cordee.serve.engines.llama_cpp import LlamaCpp, LlamaDialect
from cordee.serve.engines.port import Dialect, Engine
from cordee.serve.engines.token_ids import TokenIdDialect
from cordee.serve.engines.transformers import Transformers
from cordee.serve.engines.vllm import Vllm


def _named_engines(engines: Iterable[Engine]) -> Mapping[str, Engine]:
    return {each.name: each for each in engines}


def _named_dialects(dialects: Iterable[Dialect]) -> Mapping[str, Dialect]:
    return {each.name: each for each in dialects}


ENGINES = _named_engines((LlamaCpp(), Vllm(), Transformers(), Command()))
DIALECTS = _named_dialects(
    (LlamaDialect(), TokenIdDialect("vllm"), TokenIdDialect("transformers"), CommandDialect()),
)


def find_engine(name: str) -> Engine:
    """Return an engine's process half.

    Raises:
        InputError: no such engine.
    """
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}", hint="use " + ", ".join(ENGINES))
    return ENGINES[name]
