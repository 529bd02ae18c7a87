"""What is on the gathering device: one `Resident` per loaded volume, and the memory it lies in.

On CUDA a volume's arrays are copied from pinned memory on a copy stream into blocks that this memory owns. `ready` is
recorded there after the last copy; a consumer's stream waits for it once before its first gather. Discarding records
`free` on the consumer's stream; a block is overwritten only after that event, on the copy stream. So nothing is handed
to the caching allocator while in use, and no stream is ever synchronised in the steady state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.storage import contiguous_along_k
from gpuqueue.volumes.volume import Volume


@dataclass(eq=False)
class Resident:
    """A loaded volume: `arrays` {key: (C, I, J, K)} contiguous on the device, and what is known about it.

    `prepared` is whatever the queue's prepare step returned for it.
    """

    id: str
    arrays: dict[str, Tensor]
    scale: dict[str, NDArray[np.float64]]
    roles: dict[str, str]
    grids: dict[str, Grid]
    prepared: Any
    ready: Any = None
    blocks: list[Any] = field(default_factory=list)

    @property
    def layout(self) -> dict[str, tuple[str, int]]:
        """(role, channels) of each key: what all volumes of a data set share."""
        return {key: (self.roles[key], len(array)) for key, array in self.arrays.items()}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(array.numel() * array.element_size() for array in self.arrays.values())


class Memory(Protocol):
    """Where residents live. `load` may be called from one thread, `wait` and `release` from another."""

    def load(self, volume: Volume, prepared: Any) -> Resident:
        """Copies a volume to the device."""
        ...

    def wait(self, resident: Resident) -> None:
        """Makes the current stream wait until the resident's copy is done."""
        ...

    def release(self, resident: Resident) -> None:
        """Gives the memory back once the work queued on the current stream is done."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...


def _describe(volume: Volume, arrays: dict[str, Tensor], prepared: Any) -> Resident:
    keys = volume.arrays
    grids = {key: volume.grid(key) if volume.same_grid is False else volume.grid() for key in keys}
    return Resident(volume.id, arrays, volume.scale, volume.roles, grids, prepared)


class CpuMemory:
    """Ordinary memory: arrays contiguous along k, never in shared memory, so that a worker's descriptor is freed."""

    def load(self, volume: Volume, prepared: Any) -> Resident:
        """Copies what is shared or not contiguous; other arrays are used where they lie, and never written."""
        arrays = {
            key: contiguous_along_k(array)
            if not array.is_contiguous()
            else array.clone()
            if array.is_shared()
            else array
            for key, array in volume.arrays.items()
        }
        return _describe(volume, arrays, prepared)

    def wait(self, resident: Resident) -> None:
        """Nothing to wait for."""

    def release(self, resident: Resident) -> None:
        """Drops the arrays."""
        resident.arrays = {}

    def close(self) -> None:
        """Nothing is kept."""


@dataclass(eq=False)
class _Block:
    buffer: Tensor  # uint8
    free: Any = None  # event after which it may be overwritten


class CudaMemory:
    """Memory of one CUDA device, copied to on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._idle: list[_Block] = []

    def load(self, volume: Volume, prepared: Any) -> Resident:
        """Queues the copies on the copy stream; `resident.ready` fires after the last of them."""
        torch.cuda.set_device(self.device)  # helper threads start on device 0
        arrays: dict[str, Tensor] = {}
        blocks = []
        with torch.cuda.stream(self._stream):
            for key, array in volume.arrays.items():
                block = self._claim(array.numel() * array.element_size())
                arrays[key] = self._copy(array, block.buffer)
                blocks.append(block)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        resident = _describe(volume, arrays, prepared)
        resident.ready, resident.blocks = ready, blocks
        return resident

    def wait(self, resident: Resident) -> None:
        """The current stream waits for the copy, until that is known to be done."""
        if resident.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(resident.ready)
            if resident.ready.query():
                resident.ready = None

    def release(self, resident: Resident) -> None:
        """Blocks may be overwritten after what the current stream has queued so far."""
        free = torch.cuda.Event()
        free.record(torch.cuda.current_stream(self.device))
        for block in resident.blocks:
            block.free = free
            self._idle.append(block)
        resident.arrays, resident.blocks = {}, []

    def close(self) -> None:
        """Waits for the copies and the last gathers, then gives all blocks back to torch."""
        self._stream.synchronize()
        for block in self._idle:
            if block.free is not None:
                block.free.synchronize()
        self._idle = []

    def _claim(self, nbytes: int) -> _Block:
        """The smallest idle block that fits, after its last reader; else a new one."""
        fitting = [block for block in self._idle if nbytes <= block.buffer.numel() <= 2 * nbytes + 4096]
        if not fitting:
            return _Block(torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device))
        block = min(fitting, key=lambda b: b.buffer.numel())
        self._idle.remove(block)
        if block.free is not None:
            self._stream.wait_event(block.free)
            block.free = None
        return block

    def _copy(self, array: Tensor, buffer: Tensor) -> Tensor:
        """`array` through pinned memory into `buffer`, contiguous along k; it travels as it lies and turns there."""
        order = sorted(range(4), key=lambda axis: (-array.stride()[axis], axis))
        flat = array.permute(order).contiguous()  # no copy when the array is dense in some order, as files are
        pinned = flat.pin_memory()  # torch's pinned allocator reuses it only after the copies queued from it
        target = buffer[: flat.numel() * flat.element_size()].view(array.dtype).view(array.shape)
        if order == [0, 1, 2, 3]:
            target.copy_(pinned, non_blocking=True)
            return target
        there = torch.empty_like(flat, device=self.device)
        there.copy_(pinned, non_blocking=True)
        target.copy_(there.permute([order.index(axis) for axis in range(4)]))
        return target  # `there` was made, used and dropped on the copy stream: the allocator keeps that order


def memory_for(device: torch.device) -> Memory:
    """The memory of a device."""
    return CudaMemory(device) if device.type == "cuda" else CpuMemory()
