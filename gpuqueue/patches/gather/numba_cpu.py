"""Backend "numba": the gather on the CPU, compiled, on a small thread pool of its own.

A patch is one task, or several along its first axis where a batch has fewer patches than the machine has cores. The
pool's threads and the caller take tasks from one list, so the caller never waits for a busy pool. (numba's own parallel
loops are not used: their threading layers break after a fork and under concurrent callers.)
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuqueue.patches.gather.contract import Mode, PullBack, Reads, Size, Source
from gpuqueue.patches.gather.copies import copy_patch, is_copy

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float32,
)  # fmt: skip


def gather(reads: Reads, modes: Mapping[str, Mode], size: Size, out: dict[str, Tensor]) -> None:
    """Fills `out[key]` (B, C, *size) on the CPU; see `contract.gather`."""
    groups: list[Group] = []
    for b in range(len(next(iter(reads.values())))):
        by_map: dict[tuple[int, torch.Size], Group] = {}
        for key, patches in reads.items():
            source, pull_back = patches[b].source, patches[b].pull_back
            if is_copy(pull_back):
                copy_patch(patches[b], modes[key], out[key][b])
                continue
            same = (id(pull_back), source.data.shape[1:])
            by_map.setdefault(same, Group(pull_back, [])).keys.append((source, modes[key], out[key][b]))
        groups += by_map.values()
    if groups:
        run_all(tasks(groups, size))


@dataclass(frozen=True)
class Group:
    """The keys of one patch that share a map and a shape: (source, mode, output (C, I, J, K)) each."""

    pull_back: PullBack
    keys: list[tuple[Source, Mode, Tensor]]


def tasks(groups: list[Group], size: Size) -> list[Callable[[], None]]:
    """Calls that together fill the groups, at least two for each thread where planes allow."""
    parts = min(size[0], math.ceil(2 * num_threads() / len(groups))) if len(groups) < 2 * num_threads() else 1
    edges = np.linspace(0, size[0], parts + 1).astype(int).tolist()
    calls = []
    for group in groups:
        arguments = kernel_arguments(group, size)
        calls += [functools.partial(fill_planes, rows, *arguments) for rows in zip(edges, edges[1:])]
    return calls


def kernel_arguments(group: Group, size: Size) -> tuple[Any, ...]:
    """What `numba_kernels.fill` takes after `rows`, and the scratch memory that each call needs."""
    from gpuqueue.patches.gather import numba_kernels as kernels

    pull_back, spline = group.pull_back, group.pull_back.spline
    channels = max(source.data.shape[0] for source, _, _ in group.keys)
    fields = np.zeros((len(group.keys), kernels.FIELDS), np.int64)
    values = np.zeros((len(group.keys), channels, kernels.VALUES))
    for n, (source, mode, out) in enumerate(group.keys):
        data = source.data
        fields[n,:8] = (data.data_ptr(), reader_address(mode, data.dtype), out.data_ptr(), data.shape[0], *data.stride())
        values[n, : data.shape[0], :2], values[n, : data.shape[0], 2] = source.scale, source.pad
    none: NDArray[np.float64] = np.zeros((3, 0, 0, 0))
    coefficients, start, extent = (none, size, size) if spline is None else (
        np.ascontiguousarray(spline.coefficients), spline.start, spline.extent
    )
    return (
        size, np.ascontiguousarray(pull_back.matrix), pull_back.rest, pull_back.base, coefficients, start, extent,
        np.array(group.keys[0][0].data.shape[1:]), fields, values,
    )  # fmt: skip


def fill_planes(rows: tuple[int, int], size: Size, *arguments: Any) -> None:
    """Runs the driver over some planes of a patch, with scratch memory of its own."""
    from gpuqueue.patches.gather import numba_kernels as kernels

    width = (size[2] + 7) // 8 * 8
    scratch = np.empty(3 * kernels.TILE_K * (1 + kernels.TILE_J) + width, np.float32)
    kernels.fill(rows, size, *arguments, scratch, np.empty(kernels.TILE_K, np.int32))


# Compilation ---------------------------------------------------------------------------------------------------------


def reader_address(mode: Mode, dtype: torch.dtype) -> int:
    """Address of the compiled reader of a mode and stored dtype."""
    return int(_reader(mode, dtype).address)


@functools.cache
def _reader(mode: Mode, dtype: torch.dtype) -> Any:
    from numba import types

    from gpuqueue.patches.gather import numba_cache, numba_instructions
    from gpuqueue.patches.gather import numba_kernels as kernels

    special = {torch.float16: numba_instructions.HALF, torch.bfloat16: numba_instructions.BFLOAT16}
    stored = special.get(dtype) or getattr(types, str(dtype).removeprefix("torch."))
    floats, ints = types.CPointer(types.float32), types.CPointer(types.int64)
    signature = types.void(
        types.CPointer(stored), floats, ints, ints, ints, ints, types.CPointer(types.float64), floats,
        types.CPointer(types.int32), *[types.int64] * 5,
    )  # fmt: skip
    function = {"linear": kernels.read_linear, "nearest": kernels.read_nearest}[mode]
    return numba_cache.c_function(signature, function)


def warm_up(pairs: Iterable[tuple[Mode, torch.dtype]]) -> None:
    """Compiles, or loads from disk, the driver and the readers of these modes and stored dtypes."""
    for mode, dtype in pairs:
        _reader(mode, dtype)


# Threads -------------------------------------------------------------------------------------------------------------


def run_all(calls: list[Callable[[], None]]) -> None:
    """Runs the calls on the pool and in this thread; returns when all are done, or raises the first error."""
    waiting = deque(calls)

    def work() -> None:
        while waiting:
            try:
                call = waiting.popleft()
            except IndexError:
                return
            call()

    helpers = min(num_threads(), len(calls)) - 1
    futures = [_pool(os.getpid()).submit(work) for _ in range(helpers)]
    try:
        work()
    finally:
        waiting.clear()
        for future in futures:
            if not future.cancel():
                future.result()


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The pool of a process; a forked child makes its own."""
    return ThreadPoolExecutor(max(1, num_threads() - 1), thread_name_prefix="gpuqueue-gather")


@functools.cache
def num_threads() -> int:
    """Cores that this process may use: its affinity, and its control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = pathlib.Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
