"""Gzip streams: fast where libdeflate can be trusted, right everywhere."""

from __future__ import annotations

import gzip
import zlib

import numpy as np
import pytest

from gpuqueue.volumes import inflate as module
from gpuqueue.volumes.inflate import LARGEST_RATIO, inflate, inflate_start

DATA = np.random.default_rng(0).normal(0, 40, 50_000).astype(np.int16).tobytes()
PACKED = gzip.compress(DATA)


def test_a_plain_stream_never_touches_the_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_inflate_slowly", None)
    assert inflate(PACKED, len(DATA)) == DATA


@pytest.mark.parametrize(
    "stream",
    [
        PACKED + bytes(512),  # tape padding; the last four bytes then say nothing
        gzip.compress(DATA[:60_000]) + gzip.compress(DATA[60_000:]),  # two members
        gzip.compress(DATA[:10]) + gzip.compress(DATA[10:]) + bytes(7),
        PACKED + gzip.compress(b""),  # an empty last member states a length of 0
        gzip.compress(DATA + bytes(10_000)),  # more than the header asks for
        gzip.compress(DATA + bytes(1_000_000)),
    ],
)
def test_members_padding_and_surplus_give_the_first_bytes(stream: bytes) -> None:
    assert inflate(stream, len(DATA))[: len(DATA)] == DATA
    assert inflate_start(stream, 540) == DATA[:540]


def test_streams_beyond_libdeflates_4_gib_take_the_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIBDEFLATE_END", len(DATA))
    assert inflate(PACKED, len(DATA)) == DATA


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (PACKED[: len(PACKED) // 2], EOFError),
        (PACKED[:-8] + bytes([PACKED[-8] ^ 1]) + PACKED[-7:], gzip.BadGzipFile),  # the CRC
        (PACKED[:-4] + (len(DATA) + 1).to_bytes(4, "little"), gzip.BadGzipFile),  # the length
        (PACKED[:5000] + bytes([PACKED[5000] ^ 8]) + PACKED[5001:], (gzip.BadGzipFile, zlib.error)),
        (PACKED + b"not gzip", gzip.BadGzipFile),
        (gzip.compress(DATA[:-1]), EOFError),  # shorter than the header claims
        (b"", EOFError),
    ],
)
def test_damage_is_an_error_never_other_voxels(stream: bytes, error: type[Exception]) -> None:
    """H65."""
    with pytest.raises(error):
        inflate(stream, len(DATA))


def test_no_stream_exceeds_the_largest_ratio() -> None:
    zeros = bytes(10_000_000)
    assert LARGEST_RATIO * 0.99 < len(zeros) / len(gzip.compress(zeros)) <= LARGEST_RATIO
