"""The stored form of chunks: every form gives back the bytes, and altered forms are found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.storage.registry.planes import decode_chunk, encode_chunk
from cordee.storage.sealed import Damaged


@given(st.binary(max_size=300), st.integers(1, 16), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_form_gives_back_the_bytes(data: bytes, width: int, has_base: bool, seed: int) -> None:
    base = np.random.default_rng(seed).integers(0, 256, len(data), np.uint8).tobytes() if has_base else None
    codec, stored = encode_chunk(data, width, base)
    assert decode_chunk(stored, codec, width, len(data), base) == data


def test_weights_that_were_tuned_are_stored_as_few_bits() -> None:
    """A bf16 model after small updates: the exclusive or has empty high bits, as measured on real fine-tunes."""
    rng = np.random.default_rng(0)
    before = rng.normal(0, 0.02, 1 << 20).astype(np.float32)
    after = before + rng.normal(0, 2e-5, before.size).astype(np.float32)
    base, tuned = (_bf16(each) for each in (before, after))
    codec, stored = encode_chunk(tuned, 2, base)
    assert codec == "delta"
    assert len(stored) < 0.25 * len(tuned)
    alone = len(encode_chunk(tuned, 2)[1])
    assert len(stored) < alone < 0.8 * len(tuned)
    assert decode_chunk(stored, codec, 2, len(tuned), base) == tuned


def test_noise_is_stored_as_it_is() -> None:
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8).tobytes()
    assert encode_chunk(noise, 4) == ("raw", noise)
    assert encode_chunk(noise, 4, base=noise[::-1])[0] == "raw"


def test_a_base_of_another_length_is_not_used() -> None:
    data = bytes(10_000)
    assert encode_chunk(data, 2, base=bytes(9_999))[0] == "planes"
    codec, stored = encode_chunk(data, 2, base=data)
    with pytest.raises(Damaged, match="no base of that length"):
        decode_chunk(stored, codec, 2, len(data), base=data[:-1])


@pytest.mark.parametrize("cut", [0, 1, 8, 20, -1])
def test_a_form_that_was_cut_off_is_found(cut: int) -> None:
    codec, stored = encode_chunk(bytes(50_000), 2)
    assert codec == "planes"
    with pytest.raises(Damaged):
        decode_chunk(stored[:cut], codec, 2, 50_000)


def test_flipped_bits_never_pass_for_more_than_the_digest_sees() -> None:
    """A flip is found here, or gives other bytes, which the digest of the content finds."""
    data = np.random.default_rng(2).normal(0, 1, 5_000).astype(np.float32).tobytes()
    codec, stored = encode_chunk(data, 4)
    assert codec == "planes"
    for at in range(0, len(stored), 97):
        flipped = stored[:at] + bytes([stored[at] ^ 0x10]) + stored[at + 1 :]
        try:
            assert decode_chunk(flipped, codec, 4, len(data)) != data
        except Damaged:
            pass


def _bf16(values: np.ndarray) -> bytes:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
