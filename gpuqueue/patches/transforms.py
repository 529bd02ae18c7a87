"""Random spatial transforms: which parameters are drawn, and the world matrix or control points they give.

All geometry is in world (RAS+) millimetres and degrees. A matrix is the forward map of content,
`y = c + X (x - c) + t`. Names and parameters are TorchIO's. An axis of one voxel takes no part: nothing is scaled or
displaced along it, and rotations stay in the plane.

Over 300 lines, since three public classes carry their documentation and checks; they share one geometry.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuqueue.patches.ranges import Range, axis_limits, probability
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid

Matrix = NDArray[np.float64]
_NAMES = {"L": "LR", "R": "LR", "P": "PA", "A": "PA", "I": "IS", "S": "IS"}
_QUEUE_SETTINGS = {
    "default_pad_value": "pad={'image': ...}",
    "default_pad_label": "pad={'label': ...}",
    "image_interpolation": "the role of a key (images are linear)",
    "label_interpolation": "the role of a key (labels are nearest)",
    "include": "roles=",
    "exclude": "roles=",
    "keep": "nothing: volumes are never changed",
    "copy": "nothing: volumes are never changed",
    "check_shape": "same_grid= of the dataset",
}


def _refuse(transform: str, keywords: dict[str, Any]) -> None:
    for name in keywords:
        hint = _QUEUE_SETTINGS.get(name)
        raise ValueError(
            f"{transform}({name}=...): "
            + (f"this is the queue's business here, use {hint}" if hint else "unknown keyword")
        )


def about(centre: Matrix, linear: Matrix, translation: Matrix | None = None) -> Matrix:
    """The 4x4 map y = c + X (x - c) + t."""
    matrix = np.eye(4)
    matrix[:3, :3] = linear
    matrix[:3, 3] = centre - linear @ centre + (0 if translation is None else translation)
    return matrix


class RandomFlip:
    """Flips the reference grid onto itself along each of `axes` with `flip_probability`.

    Args:
        axes: Voxel axes of the reference grid (0, 1, 2), or anatomical names ("left", "LR", "Superior": the first
            letter counts) for the axis closest to that direction; one or several.
        flip_probability: For each axis on its own.
        p: Probability that the transform is applied at all.

    >>> grid = Grid((4, 4, 4), np.eye(4))
    >>> RandomFlip(axes=0, flip_probability=1.0).draw(Random([1]), [grid])[0][0]
    array([-1.,  0.,  0.,  3.])
    """

    def __init__(
        self, axes: int | str | Sequence[int | str] = 0, flip_probability: float = 0.5, p: float = 1.0, **other: Any
    ) -> None:
        _refuse("RandomFlip", other)
        listed = [axes] if isinstance(axes, (int, str)) else list(axes)
        self.axes: list[int | str] = []
        for axis in listed:
            if isinstance(axis, str):
                letter = axis[:1].upper()
                if letter not in _NAMES:
                    raise ValueError(
                        f"axes={axes!r}: {axis!r} is no anatomical direction; take left, right, anterior, "
                        "posterior, inferior or superior, or 0, 1, 2"
                    )
                self.axes.append(letter)
            elif axis in (0, 1, 2):
                self.axes.append(int(axis))
            else:
                raise ValueError(f"axes={axes!r}: voxel axes are 0, 1 and 2, got {axis!r}")
        self.flip_probability = probability(flip_probability, "flip_probability")
        self.p = probability(p, "p")

    def draw(self, random: Random, grids: Sequence[Grid]) -> list[Matrix]:
        """One forward map (4, 4) per grid."""
        unit = random.uniform(1 + len(self.axes))
        flipped = (unit[:, :1] < self.p) & (unit[:, 1:] < self.flip_probability)
        return [self._matrix(grid, row) for grid, row in zip(grids, flipped)]

    def _matrix(self, grid: Grid, flipped: NDArray[np.bool_]) -> Matrix:
        signs = np.ones(3)
        for axis, yes in zip(self.axes, flipped):
            if yes:
                place = axis if isinstance(axis, int) else _closest_axis(grid, axis)
                signs[place] *= -1
        directions = grid.directions
        return about(grid.centre, directions @ np.diag(signs) @ np.linalg.inv(directions))


def _closest_axis(grid: Grid, letter: str) -> int:
    return next(place for place, code in enumerate(grid.axcodes) if _NAMES[code] == _NAMES[letter])


class RandomAffine:
    """Scales, rotates and moves content in world millimetres: X = R S, R = Rz Ry Rx.

    Args:
        scales: Factors per world axis; 1.2 enlarges content. A number x means 1 - x to 1 + x.
        degrees: Right-handed rotation about world x, then y, then z.
        translation: mm; positive moves content to larger coordinates.
        isotropic: One factor for all axes (that of the first).
        center: "image", the middle of the reference extent, "origin", the world's, or a world point in mm.
        p: Probability that the transform is applied.

    Raises:
        ValueError: Ranges that are no ranges, or factors that are not positive.

    >>> grid = Grid((9, 9, 9), np.eye(4))
    >>> RandomAffine(scales=(2, 2), degrees=0).draw(Random([1]), [grid])[0][0]
    array([ 2.,  0.,  0., -4.])
    """

    def __init__(
        self,
        scales: Range = 0.1,
        degrees: Range = 10,
        translation: Range = 0,
        isotropic: bool = False,
        center: str | Sequence[float] = "image",
        p: float = 1.0,
        **other: Any,
    ) -> None:
        _refuse("RandomAffine", other)
        self.scales = axis_limits(scales, "scales", around=1.0)
        self.degrees = axis_limits(degrees, "degrees")
        self.translation = axis_limits(translation, "translation")
        if (self.scales <= 0).any():
            raise ValueError(f"scales={scales!r}: factors must be positive, got limits {self.scales.tolist()}")
        if isotropic and not (self.scales == self.scales[0]).all():
            raise ValueError(f"scales={scales!r} differ between axes, which isotropic=True rules out")
        if isinstance(center, str) and center not in ("image", "origin"):
            raise ValueError(f"center={center!r}: take 'image', 'origin' or a world point (x, y, z) in mm")
        self.center = center if isinstance(center, str) else np.asarray(center, np.float64).reshape(3)
        self.isotropic, self.p = isotropic, probability(p, "p")

    def draw(self, random: Random, grids: Sequence[Grid]) -> list[Matrix]:
        """One forward map (4, 4) per grid."""
        unit = random.uniform(10)
        limits = np.concatenate([self.scales, self.degrees, self.translation])
        values = limits[:, 0] + (limits[:, 1] - limits[:, 0]) * unit[:, 1:]
        if self.isotropic:
            values[:, 1:3] = values[:, :1]
        return [
            self._matrix(grid, *row.reshape(3, 3)) if use < self.p else np.eye(4)
            for grid, use, row in zip(grids, unit[:, 0], values)
        ]

    def _matrix(self, grid: Grid, scales: Matrix, degrees: Matrix, translation: Matrix) -> Matrix:
        frame, still = _frame(grid)
        scales, degrees, translation = scales.copy(), degrees.copy(), translation.copy()
        scales[still] = 1
        if len(still):
            translation = frame.T @ translation
            translation[still] = 0
            translation = frame @ translation
            degrees[[axis for axis in range(3) if axis not in still]] = 0  # only in the plane, about its normal
            if len(still) > 1:
                degrees[:] = 0
        linear = frame @ _rotation(degrees) @ np.diag(scales) @ frame.T
        centre = grid.centre if isinstance(self.center, str) else self.center
        if isinstance(self.center, str) and self.center == "origin":
            centre = np.zeros(3)
        return about(centre, linear, translation)


def _frame(grid: Grid) -> tuple[Matrix, list[int]]:
    """The orthonormal frame to scale and rotate in, and which of its axes take no part.

    The world's own frame, unless an axis has one voxel: then the grid's directions, each in the place and sense of the
    world axis it is nearest to, so that the plane is kept.
    """
    single = [axis for axis in range(3) if grid.shape[axis] == 1]
    if not single:
        return np.eye(3), []
    directions = grid.directions
    best = max(
        itertools.permutations(range(3)), key=lambda order: sum(abs(directions[w, a]) for w, a in enumerate(order))
    )  # best[w]: the voxel axis nearest to world axis w
    ordered = directions[:, best] * np.sign([directions[w, a] for w, a in enumerate(best)])
    # the kept axes first, so that they stay exact if the grid is sheared
    kept_first = sorted(range(3), key=lambda w: best[w] in single)
    q, r = np.linalg.qr(ordered[:, kept_first])
    frame = np.empty((3, 3))
    frame[:, kept_first] = q * np.sign(np.diag(r))
    return frame, [w for w in range(3) if best[w] in single]


def _rotation(degrees: Matrix) -> Matrix:
    """Right-handed rotation about x, then y, then z: Rz Ry Rx."""
    (cx, cy, cz), (sx, sy, sz) = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    return np.asarray(z @ y @ x)


@dataclass(frozen=True)
class _Bound:
    millimetres: float
    share: float
    spacing: float


class RandomElasticDeformation:
    """A smooth displacement: a uniform cubic B-spline over the reference extent (Rueckert et al. 1999).

    The sampling point of output point w is w + u(w); u is spanned by control points drawn uniformly.

    Args:
        num_control_points: Per axis of the reference grid, 4 or more; one number or three.
        max_displacement: mm along each world axis, one number or three. None: 7.5 mm or the largest that cannot fold,
            whichever is smaller.
        locked_borders: This many outer layers of control points do not move (0, 1 or 2).
        p: Probability that the transform is applied.
        allow_folding: Accept displacements beyond 0.40 of the control spacing (0.36 on oblique grids), where the map
            can fold (Choi and Lee 2000).

    Raises:
        ValueError: Numbers out of range; or, with the volume's id, a displacement that can fold.

    >>> grid = Grid((64, 64, 64), np.eye(4))
    >>> RandomElasticDeformation().draw(Random([1]), [grid], ["case1"])[0].shape
    (3, 7, 7, 7)
    """

    def __init__(
        self,
        num_control_points: int | Sequence[int] = 7,
        max_displacement: float | Sequence[float] | None = None,
        locked_borders: int = 2,
        p: float = 1.0,
        allow_folding: bool = False,
        **other: Any,
    ) -> None:
        _refuse("RandomElasticDeformation", other)
        points = np.broadcast_to(np.asarray(num_control_points), 3)
        if not np.issubdtype(points.dtype, np.integer) or (points < 4).any():
            raise ValueError(f"num_control_points={num_control_points!r}: whole numbers of 4 or more")
        if locked_borders not in (0, 1, 2):
            raise ValueError(f"locked_borders={locked_borders!r}: take 0, 1 or 2")
        if locked_borders == 2 and (points == 4).any():
            raise ValueError("locked_borders=2 locks all of 4 control points: nothing would move; take 5 or more")
        self.num_control_points = (int(points[0]), int(points[1]), int(points[2]))
        self.max_displacement: Matrix | None = None
        if max_displacement is not None:
            self.max_displacement = np.array(np.broadcast_to(np.asarray(max_displacement, np.float64), 3))
            if not np.isfinite(self.max_displacement).all() or (self.max_displacement < 0).any():
                raise ValueError(f"max_displacement={max_displacement!r}: finite numbers of mm, 0 or more")
        self.locked_borders, self.allow_folding = locked_borders, allow_folding
        self.p = probability(p, "p")

    def draw(self, random: Random, grids: Sequence[Grid], ids: Sequence[str]) -> list[Matrix | None]:
        """Control points (3, gi, gj, gk) in mm along world x, y, z for each grid; None where it is not applied."""
        use = random.uniform() < self.p
        unit = random.uniform((3, *self.num_control_points), -1.0, 1.0)
        lock = self.locked_borders
        for axis in range(2, 5):
            moved = np.moveaxis(unit, axis, 0)
            moved[:lock] = 0
            moved[moved.shape[0] - lock :] = 0
        return [
            self._control_points(grid, volume_id, row) if yes else None
            for grid, volume_id, row, yes in zip(grids, ids, unit, use)
        ]

    def limits(self, grid: Grid, volume_id: str) -> Matrix:
        """Largest displacement (3,) in mm on this grid; ValueError if it can fold."""
        bound = self._bound(grid)
        if self.max_displacement is None:
            return np.full(3, min(7.5, bound.millimetres))
        if not self.allow_folding and self.max_displacement.max() > bound.millimetres:
            raise ValueError(
                f"volume {volume_id!r}: max_displacement={self.max_displacement.max():g} mm can fold: with "
                f"{self.num_control_points} control points over {grid.shape} voxels lie {bound.spacing:.3g} mm apart"
                f" and at most {bound.share:g} of that, {bound.millimetres:.3g} mm, is safe; lower max_displacement or "
                "num_control_points, or say allow_folding=True"
            )
        return self.max_displacement

    def _bound(self, grid: Grid) -> _Bound:
        cells = np.array(self.num_control_points) - 3
        spacing = np.array(grid.shape) * grid.spacing / cells
        takes_part = np.array(grid.shape) > 1
        smallest = float(spacing[takes_part].min()) if takes_part.any() else np.inf
        share = 0.40 if np.isclose(np.abs(grid.directions).max(axis=0), 1, atol=1e-4).all() else 0.36
        return _Bound(share * smallest, share, smallest)

    def _control_points(self, grid: Grid, volume_id: str, unit: Matrix) -> Matrix:
        points = unit * self.limits(grid, volume_id)[:, None, None, None]
        frame, still = _frame(grid)
        if still:
            moved = np.einsum("wf,wijk->fijk", frame, points)
            moved[still] = 0
            points = np.einsum("wf,fijk->wijk", frame, moved)
        return points
