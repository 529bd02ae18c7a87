"""Counter-based random numbers: every draw is a pure function of its key.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). A key is a 64-bit hash
of (seed, epoch, volume id, patch or visit, stage); the counter counts blocks of four words. Kernels that draw noise per
voxel use the same words: counter (block low, block high, 0, 0), key (low, high).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def hash_id(volume_id: str) -> int:
    """A 64-bit hash of a volume's id, the same in every process.

    >>> hash_id("case1") == hash_id("case1"), hash_id("case1") == hash_id("case2")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(volume_id.encode(), digest_size=8).digest(), "little")


def make_key(seed: int, epoch: int, id_hash: int, turn: str, stage: str) -> int:
    """The 64-bit key of one stage of one patch (`turn` "k3") or of one load (`turn` "visit0")."""
    text = f"{seed} {epoch} {id_hash} {turn} {stage}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def philox(keys: NDArray[np.uint64], first_block: int, num_blocks: int) -> NDArray[np.uint32]:
    """Words of blocks `first_block` .. `first_block + num_blocks - 1` for each key: (*keys.shape, num_blocks, 4)."""
    blocks = np.arange(first_block, first_block + num_blocks, dtype=np.uint64)
    shape = (*keys.shape, num_blocks)
    zero = np.zeros(shape, np.uint64)
    x0, x1, x2, x3 = zero + (blocks & _LOW), zero + (blocks >> _SHIFT), zero, zero
    k0, k1 = (keys & _LOW)[..., None], (keys >> _SHIFT)[..., None]
    for _ in range(10):
        p0, p1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1, x2, x3 = (p1 >> _SHIFT) ^ x1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ x3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(_KEY_STEPS[0])) & _LOW, (k1 + np.uint64(_KEY_STEPS[1])) & _LOW
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)


class Random:
    """A stream of draws for one key, or for a batch of keys at once (then every draw has a leading batch axis).

    >>> Random(7).uniform(3).shape, Random([7, 8]).uniform(3).shape
    ((3,), (2, 3))
    >>> bool((Random([7, 8]).uniform(3)[0] == Random(7).uniform(3)).all())
    True
    """

    def __init__(self, keys: int | Sequence[int]) -> None:
        self.keys = np.asarray(keys, dtype=np.uint64)
        self._block = 0

    def _words(self, count: int) -> NDArray[np.uint32]:
        num_blocks = -(-count // 4)
        words = philox(self.keys, self._block, num_blocks)
        self._block += num_blocks
        return words.reshape(*self.keys.shape, num_blocks * 4)[..., :count]

    def uniform(self, shape: int | tuple[int, ...] = (), low: float = 0.0, high: float = 1.0) -> NDArray[np.float64]:
        """Uniform in [low, high), 53 random bits each, shape (*keys.shape, *shape)."""
        shape = (shape,) if isinstance(shape, int) else shape
        words = self._words(2 * int(np.prod(shape))).astype(np.float64)
        unit = (np.floor(words[..., 0::2] / 32) * 2.0**26 + np.floor(words[..., 1::2] / 64)) / 2.0**53
        return np.asarray(low + (high - low) * unit).reshape((*self.keys.shape, *shape))

    def normal(self, shape: int | tuple[int, ...] = ()) -> NDArray[np.float64]:
        """Standard normal numbers (Box and Muller 1958), shape (*keys.shape, *shape)."""
        shape = (shape,) if isinstance(shape, int) else shape
        unit = self.uniform((*shape, 2))
        radius = np.sqrt(-2 * np.log1p(-unit[..., 0]))
        return np.asarray(radius * np.cos(2 * np.pi * unit[..., 1]))

    def integers(self, low: int | NDArray[np.int64], high: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Uniform whole numbers in [low, high), `low` and `high` broadcast over (*keys.shape, ...)."""
        low, high = np.broadcast_arrays(np.asarray(low, np.int64), np.asarray(high, np.int64))
        unit = self.uniform(low.shape[self.keys.ndim :] if low.ndim >= self.keys.ndim else low.shape)
        return np.minimum(low + np.floor(unit * (high - low)).astype(np.int64), high - 1)
