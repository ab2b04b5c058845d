"""Texts to unit vectors: by an embedder that needs no model, by the user's own function, a model's folder, or a server.

The built-in one compares words and parts of words, not meanings: TF-IDF of words, pairs of words and 4-grams of
characters, projected to 512 dimensions by sparse random signs (Achlioptas, 2003; Li, Hastie and Church, KDD 2006).
A synonym is no match for it; take a trained model where that matters.
"""

import importlib
import json
import re
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cordee.errors import InputError, MissingExtraError

Vectors = npt.NDArray[np.float32]

BUILTIN = "builtin"
HINT = f"use {BUILTIN}, MODULE:FUNCTION, a folder of a transformers model, or the URL of an OpenAI API"
DIMS = 512
_BUCKETS = 1 << 16
_SIGNS = 8  # dimensions that a feature has; more change the result little, and cost time
_PAIR, _GRAM = np.float32(0.5), np.float32(0.25)  # weights beside a word's 1
_WORD = re.compile(r"[^\W_]+")
_BATCH, _SERVER_S = 64, 60.0


class Embedder(Protocol):
    """Maker of vectors of texts; `name` says which one, so that an index is searched with the one that made it."""

    name: str

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a unit vector for each text."""


def open_embedder(name: str, state: bytes = b"") -> Embedder:
    """Return the embedder of a name; `state` is that of a fitted built-in one.

    Raises:
        InputError: there is none of this name.
        MissingExtraError: its library is not installed.
    """
    if name == BUILTIN:
        return HashedWords(state)
    if name.startswith(("http://", "https://")):
        return ServedEmbedder(name)
    if (Path(name).expanduser() / "config.json").is_file():
        return FolderEmbedder(name)
    module, colon, function = name.partition(":")
    if colon and module.replace(".", "").isidentifier() and function.isidentifier():
        return FunctionEmbedder(name, _find_function(module, function))
    raise InputError(f"there is no embedder {name!r}", hint=HINT)


class HashedWords:
    """The built-in embedder. `fit` learns how rare each word is; texts that are added later are weighed by that."""

    name = BUILTIN

    def __init__(self, state: bytes = b"") -> None:
        self._idf = np.frombuffer(state, np.float16).astype(np.float32) if state else np.ones(_BUCKETS, np.float32)
        self._of_word: dict[str, npt.NDArray[np.uint32]] = {}

    @property
    def state(self) -> bytes:
        """Return what `fit` has learned."""
        return self._idf.astype(np.float16).tobytes()

    def fit(self, texts: Iterable[str]) -> None:
        """Learn the inverse document frequencies of features, hashed to 2^16 buckets."""
        counts, number = np.zeros(_BUCKETS, np.int64), 0
        for text in texts:
            counts[np.unique(self._features(text)[0] % _BUCKETS)] += 1
            number += 1
        self._idf = np.log((1 + number) / (1 + counts)).astype(np.float32) + 1

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a unit vector for each text; that of a text without a word has one arbitrary, fixed direction."""
        out = np.zeros((len(texts), DIMS), np.float32)
        for at, text in enumerate(texts):
            hashes, weights = self._features(text)
            found, counts = _sums(hashes, weights)
            amounts = np.log1p(counts) * self._idf[found % _BUCKETS]
            places = _mix(found[:, None] + np.arange(1, _SIGNS + 1, dtype=np.uint32) * np.uint32(0x9E3779B1))
            signs = np.where(places & np.uint32(0x8000_0000), np.float32(1), np.float32(-1))
            out[at] = np.bincount((places % DIMS).ravel(), (signs * amounts[:, None]).ravel(), DIMS)
        return _unit(out)

    def _features(self, text: str) -> tuple[npt.NDArray[np.uint32], Vectors]:
        """Return the hashes of a text's features, and their weights."""
        words = _WORD.findall(text.lower())
        own = [self._parts(word) for word in words]
        pairs = [zlib.crc32(f"{one} {two}".encode()) for one, two in pairwise(words)]
        hashes = np.concatenate([*own, np.array(pairs, np.uint32)]) if own else np.zeros(0, np.uint32)
        weights = np.full(len(hashes), _GRAM)
        at = np.cumsum([0, *(len(each) for each in own)])
        weights[at[:-1]] = 1
        weights[at[-1] :] = _PAIR
        return hashes, weights

    def _parts(self, word: str) -> npt.NDArray[np.uint32]:
        """Return the hashes of a word, first, and of its 4-grams."""
        known = self._of_word.get(word)
        if known is None:
            framed = f"^{word}$"
            grams = {framed[at : at + 4] for at in range(len(framed) - 3)} if len(word) > 3 else set()
            known = np.array([zlib.crc32(each.encode()) for each in (word, *sorted(grams))], np.uint32)
            if len(self._of_word) < 200_000:
                self._of_word[word] = known
        return known


class FunctionEmbedder:
    """A user's function from a list of texts to an array with a row for each."""

    def __init__(self, name: str, function: Callable[[list[str]], Any]) -> None:
        self.name, self._function = name, function

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a unit vector for each text."""
        return _checked(self.name, self._function(list(texts)), len(texts))


class FolderEmbedder:
    """A transformers model in a folder (serve/engines/encoder.py, where torch may be imported)."""

    def __init__(self, name: str) -> None:
        try:
            encoder = importlib.import_module("cordee.serve.engines.encoder")
        except ImportError as error:
            raise MissingExtraError(f"{error.name} is not installed", hint="pip install torch transformers") from error
        self.name, self._encoder = name, encoder.Encoder(str(Path(name).expanduser()))

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a unit vector for each text."""
        return _checked(self.name, self._encoder.encode(texts), len(texts))


class ServedEmbedder:
    """A server of OpenAI's API: `http://host:port/v1`, and with `#MODEL` the name of its model."""

    def __init__(self, name: str) -> None:
        self.name = name
        base, _, self._model = name.partition("#")
        base = base.rstrip("/")
        self._url = base if base.endswith("/embeddings") else f"{base}/embeddings"

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a unit vector for each text."""
        found: list[list[float]] = []
        for at in range(0, len(texts), _BATCH):
            found += self._ask(texts[at : at + _BATCH])
        return _checked(self.name, found, len(texts))

    def _ask(self, texts: Sequence[str]) -> list[list[float]]:
        body = json.dumps({"model": self._model or "default", "input": list(texts)}).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_SERVER_S) as answer:
                rows: list[Mapping[str, Any]] = json.load(answer)["data"]
            return [each["embedding"] for each in sorted(rows, key=lambda each: each["index"])]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self._url} gives no embeddings: {error}", hint="is the server up, and its model right?"
            ) from error


def _find_function(module: str, name: str) -> Callable[[list[str]], Any]:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise InputError(f"the embedder's module {module} cannot be imported: {error}", hint=HINT) from error
    if not callable(found):
        raise InputError(f"{module} has no function {name}", hint=HINT)
    return found  # type: ignore[no-any-return]


def _checked(name: str, found: object, number: int) -> Vectors:
    """Return an embedder's answer as unit vectors.

    Raises:
        InputError: it is of another shape, or no number.
    """
    out = np.ascontiguousarray(np.asarray(found, np.float32))
    if out.ndim != 2 or len(out) != number or not out.shape[1]:
        raise InputError(
            f"the embedder {name} returned an array of {out.shape} for {number} texts", hint="a row for each"
        )
    if not np.isfinite(out).all():
        raise InputError(f"the embedder {name} returned values that are not finite")
    return _unit(out)


def _unit(rows: Vectors) -> Vectors:
    norms = np.linalg.norm(rows, axis=1, keepdims=True).astype(np.float32)
    rows[norms[:, 0] == 0, 0] = 1
    return np.divide(rows, np.where(norms == 0, np.float32(1), norms), dtype=np.float32)


def _sums(hashes: npt.NDArray[np.uint32], weights: Vectors) -> tuple[npt.NDArray[np.uint32], Vectors]:
    """Return each hash once, with the sum of its weights."""
    found, places = np.unique(hashes, return_inverse=True)
    return found, np.bincount(places, weights, len(found)).astype(np.float32)


def _mix(values: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return well mixed bits (the finaliser of MurmurHash3)."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EB_CA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2_AE35)
    return values ^ (values >> np.uint32(16))
