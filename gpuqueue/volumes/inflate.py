"""A gzip stream becomes bytes: fast through libdeflate, and always with its CRC and length checked.

libdeflate reads one member of less than 4 GiB. Anything else (several members, zero padding, 4 GiB and more, damage)
is read by Python's gzip module, which knows them all and words its errors. Sizes that a header claims are believed only
as far as the stream can hold them: deflate never packs more than 1032 bytes into one.
"""

from __future__ import annotations

import gzip
import io
import zlib

MAGIC = b"\x1f\x8b"
LARGEST_RATIO = 1032  # bytes that one byte of a deflate stream can stand for (258 bytes from two bits)
_SPARE = 1 << 18  # bytes that a stream may hold beyond what is needed, on the fast path, and a piece of the slow one
_LIBDEFLATE_END = 1 << 32


def inflate_start(compressed: bytes, size: int) -> bytes:
    """At most the first `size` bytes of the stream, from at least its first few kilobytes; unchecked.

    >>> inflate_start(gzip.compress(b"header and data"), 6)
    b'header'
    """
    data = b""
    while compressed.startswith(MAGIC) and len(data) < size:
        member = zlib.decompressobj(wbits=31)
        data += member.decompress(compressed, size - len(data))
        compressed = member.unused_data  # the next member, once this one has ended
    return data


def inflate(compressed: bytes, needed: int) -> bytearray:
    """The stream's bytes, `needed` or a few more of them, after the whole stream has been checked.

    Raises EOFError, gzip.BadGzipFile (an OSError) or zlib.error when it is damaged, or holds fewer.

    >>> bytes(inflate(gzip.compress(b"header and data"), 15))
    b'header and data'
    """
    from deflate import DeflateError, gzip_decompress

    stated = int.from_bytes(compressed[-4:], "little")  # of the last member, modulo 4 GiB
    if needed <= stated <= needed + _SPARE and stated < _LIBDEFLATE_END:
        try:
            data: bytearray = gzip_decompress(compressed, stated)
        except (DeflateError, ValueError):
            return _inflate_slowly(compressed, needed)
        if len(data) >= needed:
            return data
    return _inflate_slowly(compressed, needed)


def _inflate_slowly(compressed: bytes, needed: int) -> bytearray:
    """Grown as bytes arrive, so that memory follows what is there, not what is claimed."""
    data = bytearray()
    with gzip.GzipFile(fileobj=io.BytesIO(compressed)) as stream:
        while len(data) < needed and (piece := stream.read(min(_SPARE, needed - len(data)))):
            data += piece
        if len(data) < needed:
            raise EOFError(f"the stream holds {len(data)} bytes, the header asks for {needed}")
        while stream.read(_SPARE):  # to the end, where the check sums are
            pass
    return data
