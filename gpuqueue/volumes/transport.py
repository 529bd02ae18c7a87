"""How a volume travels from a worker: all its bytes in one new block of shared memory, which is one descriptor.

Filled inside the dataset's call, where a failure (no space, something that cannot be pickled) is an ordinary exception;
in the queue's feeder thread it would be lost and the consumer wait for ever. The dataset's own tensors are never moved:
a volume that it keeps would stay in shared memory as long as the worker.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuqueue.volumes.volume import Volume

_ALIGNMENT = 64  # bytes, as vectorised reads like it


@dataclass(frozen=True, eq=False)
class Parcel:
    """A volume and what was prepared for it, on their way; `rest` holds everything but the arrays, pickled."""

    arrays: dict[str, Tensor]
    rest: Tensor

    def opened(self) -> tuple[Volume, Any]:
        """The volume, its arrays still in shared memory, and what was prepared, in ordinary memory."""
        volume, prepared = pickle.loads(self.rest.numpy().data)
        volume.arrays = self.arrays
        return volume, prepared


def packed(volume: Volume, prepared: Any) -> Parcel:
    """Copies both into shared memory. Raises what sharing or pickling raises.

    >>> volume, prepared = packed(Volume("a", {"image": np.ones((2, 3, 4), np.int16)}), {"mean": 1.0}).opened()
    >>> volume, volume.arrays["image"].is_shared(), prepared
    (Volume('a', image (1, 2, 3, 4) int16, spacing 1 x 1 x 1 mm), True, {'mean': 1.0})
    """
    bare = copy.copy(volume)
    bare.arrays = {}
    rest = torch.from_numpy(np.frombuffer(bytearray(pickle.dumps((bare, prepared))), np.uint8))
    *arrays, rest = shared_copies([*volume.arrays.values(), rest])
    return Parcel(dict(zip(volume.arrays, arrays)), rest)


def with_shared_arrays(volume: Volume) -> Volume:
    """A copy of the volume whose arrays lie in shared memory."""
    shared = copy.copy(volume)
    shared.arrays = dict(zip(volume.arrays, shared_copies(list(volume.arrays.values()))))
    return shared


def shared_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of CPU tensors, each in the memory order of its own, in one block of shared memory."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    starts = np.cumsum([0, *(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]).tolist()
    block = torch.empty(starts[-1], dtype=torch.uint8).share_memory_()
    return [_copied(tensor, block[start : start + size]) for tensor, start, size in zip(tensors, starts, sizes)]


def _copied(tensor: Tensor, place: Tensor) -> Tensor:
    order = sorted(range(tensor.ndim), key=lambda axis: (-tensor.stride()[axis], axis))
    turned = tensor.permute(order)
    target = place.view(tensor.dtype).view(turned.shape)
    target.copy_(turned)
    return target.permute([order.index(axis) for axis in range(tensor.ndim)])
