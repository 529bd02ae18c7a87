"""Backend "triton": the gather on CUDA, one launch for a batch of volumes of different shapes.

The host packs what every patch needs, float64 narrowed to float32 only where it is small, into one pinned buffer, sends
it in one copy, and launches; nothing waits for the device. Patches whose keys have other dtypes, or some with and some
without a spline, take a launch for each kind. In Triton's interpreter (TRITON_INTERPRET=1, before the first import) the
same kernels run on CPU tensors, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuqueue.patches.gather import triton_kernels as kernels
from gpuqueue.patches.gather.contract import Mode, Reads, Size
from gpuqueue.patches.gather.copies import copy_patch, is_copy
from gpuqueue.patches.gather.triton_records import Group, describe_spline, float32, pack, spline_records, upload

TILE: Size = (2, 8, 32)  # four voxels a thread
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}  # fusion's default changes in Triton 3.10
CONTRACT_BLOCK = 256


def gather(
    reads: Reads, modes: Mapping[str, Mode], size: Size, out: dict[str, Tensor], tile: Size | None = None
) -> None:
    """Fills `out[key]` (B, C, *size); see `contract.gather`. `tile`: voxels of a brick, powers of 2, at least 2 2 8.

    Raises ValueError for CUDA tensors in Triton's interpreter, which would read device addresses on the host, and for
    CPU tensors outside it.
    """
    device = next(iter(out.values())).device
    if is_interpreted() and device.type == "cuda":
        raise ValueError("TRITON_INTERPRET is set: the interpreter cannot read CUDA memory; unset it")
    if not is_interpreted() and device.type != "cuda":
        raise ValueError(f"backend='triton' gathers on CUDA, not on {device}; write backend='auto'")
    tile = tile or (interpreter_tile(size) if is_interpreted() else TILE)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for groups in by_kind(groups_of(reads, modes, out)):
            prepare(groups, size, device).run(size, tile)


def by_kind(groups: list[Group]) -> list[list[Group]]:
    """The groups that one launch can take, together."""
    kinds: dict[tuple[Any, ...], list[Group]] = {}
    for group in groups:
        kinds.setdefault(group.kind(), []).append(group)
    return list(kinds.values())


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter."""
    return not hasattr(kernels.gather_kernel, "cache_key")


def interpreter_tile(size: Size) -> Size:
    """Large bricks: the interpreter's time goes by programs, not by voxels."""
    i, j, k = (min(64, 2 ** math.ceil(math.log2(max(n, 1)))) for n in size)
    return max(i, 2), max(j, 2), max(k, 8)


def groups_of(reads: Reads, modes: Mapping[str, Mode], out: dict[str, Tensor]) -> list[Group]:
    """Patches by map and shape; those that only move whole voxels are copied here and now."""
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
    return groups


# Launching -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """What a launch over patches of one kind needs, on the device; `run` can be captured in a CUDA graph."""

    patches: Tensor
    numbers: Tensor
    curves: Tensor
    curve_numbers: Tensor
    points: Tensor
    table: Tensor
    codes: tuple[tuple[int, int], ...]
    count: int
    has_spline: bool

    def run(self, size: Size, tile: Size, path: int = 0) -> None:
        """Contracts the splines, then gathers."""
        if self.has_spline:
            kernels.contract_kernel[(self.count, size[0])](
                self.curves, self.curve_numbers, self.points, self.table, SIZE_J=size[1], BLOCK=CONTRACT_BLOCK,
                **OPTIONS,
            )  # fmt: skip
        bricks = math.prod(-(-n // t) for n, t in zip(size, tile))
        fixed = constants(self.codes, self.has_spline, size, tile, path)
        kernels.gather_kernel[(bricks * self.count,)](
            self.patches, self.numbers, self.table, **fixed, **options(self.codes)
        )


def prepare(groups: list[Group], size: Size, device: torch.device) -> Launch:
    """Packs patches of one kind and sends them to the device."""
    codes, has_spline = groups[0].kind()
    splines = [describe_spline(g.pull_back.spline, size) for g in groups if g.pull_back.spline is not None]
    ints, floats = pack(groups, splines)
    spline_ints, spline_floats = spline_records(splines)
    points = [np.zeros(1, np.float32), *(seen.coefficients.ravel() for seen in splines)]
    on_device = upload(
        [np.array(ints, np.int64), np.array(spline_ints, np.int64)],
        [float32(floats), float32(spline_floats), np.concatenate(points)],
        device,
    )
    patches, curves, numbers, curve_numbers, coefficients = on_device
    table = torch.empty(max(1, sum(seen.table_size for seen in splines)), dtype=torch.float32, device=device)
    return Launch(patches, numbers, curves, curve_numbers, coefficients, table, codes, len(groups), has_spline)


def options(codes: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """How `kernels.gather_kernel` is compiled: one channel a key fits 128 registers, more would spill."""
    return OPTIONS | ({"maxnreg": 128} if all(count == 1 for _, count in codes) else {})


def constants(
    codes: tuple[tuple[int, int], ...], has_spline: bool, size: Size, tile: Size, path: int = 0
) -> dict[str, Any]:
    """The compile-time constants of `kernels.gather_kernel`."""
    channels = sum(count for _, count in codes)
    return {
        "SIZE_I": size[0], "SIZE_J": size[1], "SIZE_K": size[2],
        "TILE_I": tile[0], "TILE_J": tile[1], "TILE_K": tile[2],
        "NUM_KEYS": len(codes),
        "CODES": sum(code << 6 * n for n, (code, _) in enumerate(codes)),
        "CHANNELS": sum(count << 10 * n for n, (_, count) in enumerate(codes)),
        "NUM_INTS": kernels.PATCH_INTS.value + kernels.KEY_INTS.value * len(codes) + 3 * channels,
        "NUM_FLOATS": kernels.PATCH_FLOATS.value + 3 * channels,
        "SPLINE": has_spline, "PATH": path,
    }  # fmt: skip
