"""Where a drawn source voxel lands after augmentation, and so where its patch starts.

The pull-back says which source point an output voxel o reads: `source(o) = A_k^-1 F^-1 (A_ref o + u(o))`. A drawn voxel
x lands where that is solved for o: `o = A_ref^-1 (F A_k x - u(o))`, by fixed-point steps, since u changes slowly where
it does not fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuqueue.patches.gather.contract import Size
from gpuqueue.patches.samplers.protocol import DrawnVoxel, Prepared, clamped_start
from gpuqueue.volumes.grid import Grid

Matrix = NDArray[np.float64]
_REDRAWS = 8
_STEPS = 60
_CLOSE = 1e-6  # voxels


@dataclass(frozen=True, eq=False)
class Site:
    """One patch to place: its reference grid and size, the affine of each key, the map drawn for it.

    `draw(None)` asks its sampler, `draw(previous)` for another in the stead of one that landed outside.
    """

    reference: Grid
    size: Size
    affines: Mapping[str, Matrix]
    forward: Matrix
    control_points: Matrix | None
    draw: Callable[[DrawnVoxel | None], NDArray[np.int64] | DrawnVoxel]


@dataclass(frozen=True, eq=False)
class Placed:
    """Where a patch starts (3,), and why: `drawn` is the voxel it was placed by, if by one.

    `redraws`: voxels that landed outside the reference grid. `outside`: so did the last one, and its nearest voxel
    inside was taken. `moved`: the start was moved into [0, N - p].
    """

    start: NDArray[np.int64]
    drawn: DrawnVoxel | None = None
    redraws: int = 0
    outside: bool = False
    moved: bool = False


def place(sites: Sequence[Site]) -> list[Placed]:
    """Draws for every patch, follows drawn voxels forward, draws again up to 8 times what lands outside."""
    drawn = [site.draw(None) for site in sites]
    redraws = [0] * len(sites)
    landed: dict[int, Matrix] = {}
    waiting = list(range(len(sites)))
    while waiting:
        voxels = {n: voxel for n in waiting if isinstance(voxel := drawn[n], DrawnVoxel)}
        landed |= zip(voxels, forward_points(list(voxels.values()), [sites[n] for n in voxels]))
        waiting = [n for n in voxels if redraws[n] < _REDRAWS and _is_outside(landed[n], sites[n].reference)]
        for n in waiting:
            redraws[n] += 1
            drawn[n] = sites[n].draw(voxels[n])
    return [_placed(site, drawn[n], landed.get(n), redraws[n]) for n, site in enumerate(sites)]


def _placed(site: Site, drawn: NDArray[np.int64] | DrawnVoxel, point: Matrix | None, redraws: int) -> Placed:
    if not isinstance(drawn, DrawnVoxel):
        return Placed(clamped_start(drawn, site.reference, site.size), None, redraws)
    assert point is not None
    last, size = np.array(site.reference.shape) - 1, np.array(site.size)
    nearest = np.clip(np.floor(np.nan_to_num(point) + 0.5), 0, last).astype(np.int64)
    if drawn.inside is None:
        wanted = nearest - size // 2
    else:  # any start whose patch holds the voxel and lies inside
        low, high = np.maximum(nearest - size + 1, 0), np.minimum(nearest, last + 1 - size)
        wanted = low + np.floor(drawn.inside * np.maximum(high - low + 1, 1)).astype(np.int64)
    start = clamped_start(wanted, site.reference, site.size)
    moved = bool((start != wanted).any())
    return Placed(start, drawn, redraws, _is_outside(point, site.reference), moved)


def _is_outside(point: Matrix, reference: Grid) -> bool:
    voxel = np.floor(point + 0.5)
    return not ((voxel >= 0) & (voxel < reference.shape)).all()  # also where it is NaN


def forward_points(voxels: Sequence[DrawnVoxel], sites: Sequence[Site]) -> Matrix:
    """Where source voxels land: points (n, 3) of the reference grids; NaN where the steps do not settle (a fold)."""
    if not voxels:
        return np.empty((0, 3))
    with np.errstate(all="ignore"):  # a map that is not finite leads to NaN, which lies outside
        return _forward_points(voxels, sites)


def _forward_points(voxels: Sequence[DrawnVoxel], sites: Sequence[Site]) -> Matrix:
    back = np.linalg.inv(np.stack([site.reference.affine for site in sites]))
    maps = back @ np.stack([site.forward @ site.affines[voxel.key] for voxel, site in zip(voxels, sites)])
    points: Matrix = np.einsum("nab,nb->na", maps[:, :3, :3], np.stack([v.voxel for v in voxels])) + maps[:, :3, 3]
    bent = [n for n, site in enumerate(sites) if site.control_points is not None]
    if bent:
        points[bent] = _settled(points[bent], back[bent, :3, :3], [sites[n] for n in bent])
    return points


def _settled(targets: Matrix, back: Matrix, sites: Sequence[Site]) -> Matrix:
    """Solves o + v(o) = target for each row, with v = A_ref^-1 u in voxels, 0 along axes of one voxel."""
    control = np.stack([site.control_points for site in sites if site.control_points is not None])
    shapes = np.array([site.reference.shape for site in sites])
    back = np.where((shapes == 1)[:, :, None], 0, back)
    points, step = targets, np.full(targets.shape, np.inf)
    for _ in range(_STEPS):
        following = targets - np.einsum("nab,nb->na", back, _displacement(points, control, shapes))
        step, points = np.abs(following - points), following
        if step.max() < _CLOSE:
            break
    settled = (step < _CLOSE).all(axis=1, keepdims=True)
    return np.asarray(np.where(settled, points, np.nan))


def _displacement(points: Matrix, control: Matrix, shapes: NDArray[np.int64]) -> Matrix:
    """u (n, 3) in mm at points (n, 3): the spline of `contract.spline_weights`, between voxels too."""
    cells = np.array(control.shape[2:]) - 3
    t = np.nan_to_num(np.clip((points + 0.5) * cells / shapes, 0, cells))
    first = np.minimum(np.floor(t).astype(np.int64), cells - 1)
    f = (t - first)[..., None]
    taps = np.concatenate([(1 - f) ** 3, 3 * f**3 - 6 * f**2 + 4, -3 * f**3 + 3 * f**2 + 3 * f + 1, f**3], axis=-1) / 6
    i, j, k = np.moveaxis(first[..., None] + np.arange(4), 1, 0)
    rows = np.arange(len(points))[:, None, None, None]
    near = control.transpose(0, 2, 3, 4, 1)[rows, i[:, :, None, None], j[:, None, :, None], k[:, None, None, :]]
    for axis in range(3):
        near = np.einsum("na,na...->n...", taps[:, axis], near)
    return np.asarray(near)


class Tally:
    """What was drawn so far, for `stats()`; written by the one thread that draws."""

    def __init__(self) -> None:
        self._labels: dict[int, int] = {}
        self._missing: dict[int | None, float] = {}
        self._redraws = self._outside = self._moved = 0
        self._warned: set[str] = set()

    def add(self, volume_id: str, prepared: Prepared, placed: Placed) -> str | None:
        """Counts one patch; returns the volume's warning where it was not given before."""
        if placed.drawn is not None and (label := placed.drawn.label) is not None:
            self._labels[label] = self._labels.get(label, 0) + 1
        for number, share in np.asarray(prepared.get("missing", ()), np.float64).reshape(-1, 2).tolist():
            absent = None if np.isnan(number) else int(number)
            self._missing[absent] = self._missing.get(absent, 0.0) + share
        self._redraws += placed.redraws
        self._outside += placed.outside
        self._moved += placed.moved
        if "warning" not in prepared or volume_id in self._warned:
            return None
        self._warned.add(volume_id)
        return str(prepared["warning"])

    def totals(self) -> dict[str, Any]:
        """The fields of `Stats`."""
        return {
            "drawn_labels": dict(self._labels),
            "missing_labels": dict(self._missing),
            "redraws": self._redraws,
            "outside": self._outside,
            "moved_starts": self._moved,
        }
