"""The part of an engine's whole answer that the gateway reads; the rest is skipped, not parsed into objects."""

import msgspec

from cordee.serve.engines.port import Usage


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    retrieval_us: int | None = None
    generation_us: int | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_DECODER = msgspec.json.Decoder(_Answer)


def read_usage(body: bytes) -> Usage | None:
    """Return what an answer used; None: it does not say.

    Raises:
        MsgspecError: it is no JSON document.

    >>> read_usage(b'{"usage": {"prompt_tokens": 9, "completion_tokens": 2}}')
    Usage(input_tokens=9, cached_tokens=0, output_tokens=2, retrieval_us=0, generation_us=0)
    """
    found = _DECODER.decode(body).usage
    if found is None:
        return None
    cached = found.prompt_tokens_details.cached_tokens if found.prompt_tokens_details is not None else 0
    times = found.retrieval_us or 0, found.generation_us or 0
    return Usage(found.prompt_tokens or 0, cached or 0, found.completion_tokens or 0, *times)
