"""The stored form of chunks: every form gives back the bytes, and altered forms are found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.storage.registry.planes import _part, _planes, decode_chunk, encode_chunk
from cordee.storage.registry.steps import step_parts
from cordee.storage.sealed import Damaged


@given(st.binary(max_size=300), st.integers(1, 16), st.booleans(), st.integers(0, 2**32 - 1))
def test_every_form_gives_back_the_bytes(data: bytes, width: int, has_base: bool, seed: int) -> None:
    base = np.random.default_rng(seed).integers(0, 256, len(data), np.uint8).tobytes() if has_base else None
    codec, stored = encode_chunk(data, width, base)
    assert decode_chunk(stored, codec, width, len(data), base) == data


@pytest.mark.parametrize(
    ("moved", "in_order", "most"), [(4.5e-5, False, 0.17), (2e-4, True, 0.21)], ids=["by noise", "all the same way"]
)
def test_weights_that_were_tuned_are_stored_as_few_steps(moved: float, in_order: bool, most: float) -> None:
    """A bf16 model after small updates, noise or equal ones; the exclusive or takes 21 % and 34 %."""
    rng = np.random.default_rng(0)
    before = _bf16(rng.normal(0, 0.02, (1 << 20) + 1).astype(np.float32))
    values = (before.astype(np.uint32) << 16).view(np.float32)
    sizes = rng.uniform(0.6, 1, values.size) * np.sign(rng.normal(size=values.size)) if in_order else None
    updates = moved * (rng.normal(size=values.size) if sizes is None else sizes)
    base, tuned = before.tobytes(), _bf16((values + updates).astype(np.float32)).tobytes()
    codec, stored = encode_chunk(tuned, 2, base)
    assert (codec, stored[9] & 1) == ("steps", in_order)
    assert len(stored) < most * len(tuned)
    alone = len(encode_chunk(tuned, 2)[1])
    assert 3 * len(stored) < alone < 0.8 * len(tuned)
    assert decode_chunk(stored, codec, 2, len(tuned), base) == tuned
    for at in range(0, len(stored), len(stored) // 50):
        flipped = stored[:at] + bytes([stored[at] ^ 0x10]) + stored[at + 1 :]
        try:
            assert decode_chunk(flipped, codec, 2, len(tuned), base) != tuned
        except Damaged:
            pass


def test_every_pattern_steps_to_every_other() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)  # among them both zeros, infinities and all that are no numbers
    for seed in range(4):
        base = np.random.default_rng(seed).permutation(every).tobytes()
        stored = b"".join(map(_part, step_parts(*(np.frombuffer(each, np.uint8) for each in (every.tobytes(), base)))))
        assert decode_chunk(stored, "steps", 2, len(base), base) == every.tobytes()


def test_a_difference_that_an_earlier_version_has_stored_is_read() -> None:
    one, other = (np.random.default_rng(seed).integers(0, 256, 4_000, np.uint8) for seed in range(2))
    assert decode_chunk(_planes(one ^ other, 2), "delta", 2, 4_000, other.tobytes()) == one.tobytes()


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


def _bf16(values: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
