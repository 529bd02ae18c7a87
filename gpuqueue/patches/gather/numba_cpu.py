"""Backend "numba": the gather on the CPU, compiled, on a small thread pool of its own.

A patch is one task, or several along its first axis where a batch has fewer patches than the machine has cores. The
pool's threads and the caller take tasks from one list, so the caller never waits for a busy pool. (numba's own parallel
loops are not used: their threading layers break after a fork and under concurrent callers.)
"""

from __future__ import annotations

import functools
import itertools
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
from gpuqueue.patches.gather.copies import check_whole, copy_patch, is_copy


def gather(reads: Reads, modes: Mapping[str, Mode], size: Size, out: dict[str, Tensor]) -> None:
    """Fills `out[key]` (B, C, *size) on the CPU; see `contract.gather`."""
    calls: list[Callable[[], None]] = []
    groups: list[Group] = []
    for b in range(len(next(iter(reads.values())))):
        by_map: dict[tuple[int, torch.Size], Group] = {}
        for key, patches in reads.items():
            source, pull_back = patches[b].source, patches[b].pull_back
            if is_copy(pull_back):
                calls.append(functools.partial(copy_patch, patches[b], modes[key], out[key][b]))
                continue
            same = (id(pull_back), source.data.shape[1:])
            by_map.setdefault(same, Group(pull_back, [])).keys.append((source, modes[key], out[key][b]))
        groups += by_map.values()
    run_all(calls + tasks(groups, size))


@dataclass(frozen=True)
class Group:
    """The keys of one patch that share a map and a shape: (source, mode, output (C, I, J, K)) each."""

    pull_back: PullBack
    keys: list[tuple[Source, Mode, Tensor]]


@dataclass(frozen=True)
class Job:
    """What `numba_kernels.fill` takes for one group; `keep` holds the tensors whose addresses are in `keys`."""

    size: Size
    pull_back: tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
    spline: tuple[NDArray[np.float64], Size, Size]
    shape: tuple[int, ...]
    keys: NDArray[np.int64]
    values: NDArray[np.float64]
    keep: Group


def tasks(groups: list[Group], size: Size) -> list[Callable[[], None]]:
    """Calls that together fill the groups: one a group, or at least two for each thread where planes allow."""
    parts = min(size[0], math.ceil(2 * num_threads() / max(1, len(groups))))
    edges = [size[0] * part // parts for part in range(parts + 1)]
    calls: list[Callable[[], None]] = []
    for group in groups:
        job = make_job(group, size)
        calls += [functools.partial(fill_planes, job, planes) for planes in itertools.pairwise(edges)]
    return calls


def make_job(group: Group, size: Size) -> Job:
    """The numbers and addresses of a group, as the kernels take them."""
    from gpuqueue.patches.gather import numba_readers as readers

    pull_back, spline = group.pull_back, group.pull_back.spline
    channels = max((source.data.shape[0] for source, _, _ in group.keys), default=1)
    shape = group.keys[0][0].data.shape[1:] if group.keys else size
    keys = np.zeros((len(group.keys), readers.KEY_FIELDS), np.int64)
    values = np.zeros((len(group.keys), channels, readers.VALUES))
    for n, (source, mode, out) in enumerate(group.keys):
        data = source.data
        if mode != "linear":
            check_whole(source)
        assert data.device.type == out.device.type == "cpu"
        keys[n] = (data.data_ptr(), reader_address(mode, data.dtype), out.data_ptr(), data.shape[0], *data.stride())
        values[n, : data.shape[0], :2], values[n, : data.shape[0], 2] = source.scale, source.pad
    curve: tuple[NDArray[np.float64], Size, Size] = (np.zeros((3, 0, 0, 0)), size, size)
    if spline is not None:
        curve = (np.array(spline.coefficients, np.float64), spline.start, spline.extent)
    # copies: kernels are compiled for writable, contiguous arrays, and again for any other kind
    affine = (np.array(pull_back.matrix, np.float64), np.array(pull_back.rest, np.float64), np.array(pull_back.base))
    return Job(size, affine, curve, tuple(shape), keys, values, group)


def fill_planes(job: Job, planes: tuple[int, int]) -> None:
    """Runs the driver over some planes of a patch, with scratch memory of its own."""
    from gpuqueue.patches.gather import numba_kernels, numba_readers

    scratch = np.empty(3 * numba_readers.TILE_K * (1 + numba_readers.TILE_J) + job.size[2] + 7, np.float32)
    indices = np.empty(numba_readers.TILE_K, np.int32)
    numba_kernels.fill(planes, job.size, job.pull_back, job.spline, job.shape, job.keys, job.values, scratch, indices)


# Compilation ---------------------------------------------------------------------------------------------------------


def reader_address(mode: Mode, dtype: torch.dtype) -> int:
    """Address of the compiled reader of a mode and stored dtype."""
    return int(_reader(mode, dtype).address)


@functools.cache
def _reader(mode: Mode, dtype: torch.dtype) -> Any:
    from numba import types

    from gpuqueue.patches.gather import numba_cache, numba_instructions
    from gpuqueue.patches.gather import numba_readers as readers

    special = {torch.float16: numba_instructions.HALF, torch.bfloat16: numba_instructions.BFLOAT16}
    stored = special.get(dtype) or getattr(types, str(dtype).removeprefix("torch."))
    floats, ints = types.CPointer(types.float32), types.CPointer(types.int64)
    signature = types.void(
        types.CPointer(stored), floats, ints, ints, ints, ints, types.CPointer(types.float64), floats,
        types.CPointer(types.int32),
    )  # fmt: skip
    function = {"linear": readers.read_linear, "nearest": readers.read_nearest, "vote": readers.read_vote}[mode]
    return numba_cache.c_function(signature, function)


def warm_up(pairs: Iterable[tuple[Mode, torch.dtype]]) -> None:
    """Compiles, or loads from disk, the driver and the readers of these modes and stored dtypes."""
    for mode, dtype in pairs:
        reader_address(mode, dtype)
    nowhere = PullBack(np.eye(3), np.zeros(3, np.int64), np.zeros(3))
    fill_planes(make_job(Group(nowhere, []), (1, 1, 1)), (0, 0))


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
