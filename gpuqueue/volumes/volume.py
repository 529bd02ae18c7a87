"""What a volume is: named arrays on grids in the world, one role per key, one id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from gpuqueue.errors import VolumeError
from gpuqueue.volumes.grid import Grid, check_affine, corner_difference
from gpuqueue.volumes.storage import storable

ROLES = ("image", "label", "map")
RESERVED_KEYS = ("volume", "start", "affine", "epoch", "index", "parameters", "present")
GRID_TOLERANCE = 1e-2  # voxels; headers of public data sets differ in the fourth decimal


def find_role(key: str, roles: Mapping[str, str] | None, where: str) -> str:
    """The role of a key: declared in `roles`, else by its prefix.

    >>> find_role("image_t2", None, "volume 'a'"), find_role("seg", {"seg": "label"}, "volume 'a'")
    ('image', 'label')
    """
    if key in RESERVED_KEYS:
        raise VolumeError(f"{where}: the key {key!r} is reserved for what a batch says of itself; rename it")
    role = (roles or {}).get(key) or next((role for role in ROLES if key.startswith(role)), None)
    if role not in ROLES:
        raise VolumeError(
            f"{where}: key {key!r} has no role; begin its name with image, label or map, or say "
            f"roles={{{key!r}: 'image'}} (linear), 'label' (nearest) or 'map' (sampling weights)"
            + (f"; {role!r} is none of these" if role else "")
        )
    return role


class Volume:
    """One case: named arrays `(C, I, J, K)` in nibabel axis order with their affines.

    Args:
        id: Unique in its dataset; turned into text. All random draws are keyed by it.
        arrays: `{key: array}`, NumPy or torch, `(C, I, J, K)` or `(I, J, K)`. Values are kept in the narrowest stored
            dtype that holds them; float64 images become float32; labels must be whole numbers.
        affine: 4x4, voxel to RAS+ mm, for all keys, or `{key: 4x4}`. None is the identity: 1 mm voxels.
        roles: `{key: "image" | "label" | "map"}` for keys whose name does not begin with one of these.
        same_grid: True refuses keys whose shape or affine differ by more than 0.01 voxel, a float is another tolerance
            in voxels, False lets every key keep its own grid in the same world.
        scale: `{key: (C, 2)}` slope and intercept that turn stored into true values; default 1 and 0.
        sources: `{key: text}` for messages, such as the file's path.

    Raises:
        VolumeError: names the volume, the keys and the values that do not fit.

    >>> volume = Volume("case1", {"image": np.zeros((4, 5, 6)), "label": np.zeros((4, 5, 6), np.uint8)})
    >>> volume
    Volume('case1', image (1, 4, 5, 6) float32, label (1, 4, 5, 6) uint8, spacing 1 x 1 x 1 mm)
    """

    def __init__(
        self,
        id: object,
        arrays: Mapping[str, Any],
        affine: ArrayLike | Mapping[str, ArrayLike] | None = None,
        roles: Mapping[str, str] | None = None,
        same_grid: bool | float = True,
        *,
        scale: Mapping[str, NDArray[np.float64]] | None = None,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.id = str(id)
        self.same_grid = same_grid
        self.sources = dict(sources or {})
        if not arrays:
            raise VolumeError(f"volume {self.id!r} has no arrays; give at least {{'image': array}}")
        self.roles = {key: find_role(key, roles, f"volume {self.id!r}") for key in arrays}
        self.arrays: dict[str, Tensor] = {
            key: storable(array, self.roles[key], self.where(key)) for key, array in arrays.items()
        }
        self.affines = self._affines(affine)
        self.scale = {
            key: np.tile([1.0, 0.0], (len(data), 1)) if scale is None or key not in scale else scale[key]
            for key, data in self.arrays.items()
        }
        if same_grid is not False:
            self._check_same_grid(GRID_TOLERANCE if same_grid is True else float(same_grid))

    def where(self, key: str) -> str:
        """How messages name one key of this volume."""
        source = self.sources.get(key)
        return f"volume {self.id!r}, key {key!r}" + (f" ({source})" if source else "")

    @property
    def reference(self) -> str:
        """The key whose grid patches are cut from: the first image, else the first key."""
        return next((key for key, role in self.roles.items() if role == "image"), next(iter(self.arrays)))

    def grid(self, key: str | None = None) -> Grid:
        """The grid of one key; without `key`, that of the reference key."""
        key = self.reference if key is None else key
        i, j, k = self.arrays[key].shape[1:]
        return Grid((i, j, k), self.affines[key])

    @property
    def affine(self) -> NDArray[np.float64]:
        """The reference key's affine (4, 4), voxel to RAS+ mm."""
        return self.affines[self.reference]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays as stored."""
        return sum(array.numel() * array.element_size() for array in self.arrays.values())

    @property
    def layout(self) -> dict[str, tuple[str, int]]:
        """(role, channels) of each key: what all volumes of a data set share."""
        return {key: (self.roles[key], len(array)) for key, array in self.arrays.items()}

    def __getitem__(self, key: str) -> Tensor:
        """True values of one key, `(C, I, J, K)`: images and maps float32 with slope and intercept applied, labels as
        stored."""
        data = self.arrays[key]
        if self.roles[key] == "label":
            return data
        scale = torch.from_numpy(self.scale[key].astype(np.float32))[:, :, None, None, None]
        return data.to(torch.float32) * scale[:, 0] + scale[:, 1]

    def replace(self, arrays: Mapping[str, Any], affine: ArrayLike | Mapping[str, ArrayLike] | None = None) -> Volume:
        """A copy of this volume with some arrays (true values) exchanged or added, for a dataset's `transform=`.

        >>> volume = Volume("a", {"image": np.full((2, 2, 2), 7.0)})
        >>> float(volume.replace({"image": volume["image"].clamp(0, 5)})["image"].max())
        5.0
        """
        kept = {key: scale for key, scale in self.scale.items() if key not in arrays}
        roles = self.roles | {key: find_role(key, self.roles, f"volume {self.id!r}") for key in arrays}
        affines = (
            affine
            if affine is not None
            else self.affines | {key: self.affines[self.reference] for key in arrays if key not in self.affines}
        )
        return Volume(
            self.id, self.arrays | dict(arrays), affines, roles, self.same_grid, scale=kept, sources=self.sources
        )

    def _affines(self, affine: ArrayLike | Mapping[str, ArrayLike] | None) -> dict[str, NDArray[np.float64]]:
        if affine is None:
            affine = np.eye(4)
        if isinstance(affine, Mapping):
            if missing := [key for key in self.arrays if key not in affine]:
                raise VolumeError(f"volume {self.id!r}: affine= names no matrix for {missing}")
            given = {key: affine[key] for key in self.arrays}
        else:
            given = dict.fromkeys(self.arrays, affine)
        try:
            return {key: check_affine(matrix, self.where(key)) for key, matrix in given.items()}
        except ValueError as error:
            raise VolumeError(str(error)) from None

    def _check_same_grid(self, tolerance: float) -> None:
        reference = self.grid()
        for key in self.arrays:
            other = self.grid(key)
            if other.shape != reference.shape:
                raise VolumeError(
                    f"{self.where(self.reference)} has shape {reference.shape} but {self.where(key)} has shape "
                    f"{other.shape}; repair the files, or say same_grid=False if each has its own grid"
                )
            if (difference := corner_difference(reference, other)) > tolerance:
                raise VolumeError(
                    f"{self.where(self.reference)} and {self.where(key)} lie up to {difference:.3g} voxels apart "
                    f"(tolerance {tolerance:g}): affines {reference.affine.tolist()} and {other.affine.tolist()}, "
                    f"difference {(other.affine - reference.affine).tolist()}; repair the files, or say "
                    "same_grid=False to keep each key's own grid, or same_grid=<tolerance in voxels>"
                )

    def __repr__(self) -> str:
        parts = [
            f"{key} {tuple(data.shape)} {str(data.dtype).removeprefix('torch.')}" for key, data in self.arrays.items()
        ]
        spacing = " x ".join(f"{s:.4g}" for s in self.grid().spacing)
        return f"Volume({self.id!r}, {', '.join(parts)}, spacing {spacing} mm)"


def as_volume(item: object, fallback_id: str, roles: Mapping[str, str] | None, same_grid: bool | float) -> Volume:
    """What a dataset or DataLoader gave, as a Volume: a Volume itself, or a MONAI-style dict of arrays.

    A dict's id is its "id", else its fallback. A batch axis of one is unstacked; entries that are no arrays of three
    axes or more are ignored. Affines come from MetaTensors, `KEY_meta_dict` or `affine`.
    """
    if isinstance(item, Volume):
        return item
    if not isinstance(item, Mapping):
        raise VolumeError(
            f"volume {fallback_id!r}: expected a gpuqueue.Volume or a dict such as {{'image': array, 'label': array}}, "
            f"got {type(item).__name__}"
        )
    volume_id = _first(item.get("id", fallback_id))
    arrays: dict[str, Any] = {}
    affines: dict[str, Any] = {}
    for key, value in item.items():
        if not isinstance(value, (Tensor, np.ndarray)) or value.ndim < 3 or key == "affine":
            continue
        if value.ndim == 5 and len(value) > 1:
            raise VolumeError(
                f"volume {volume_id!r}: {key!r} has shape {tuple(value.shape)}, {len(value)} volumes stacked;"
                " use DataLoader(..., batch_size=1), or collate_fn=list to keep volumes of different shapes apart"
            )
        arrays[key] = value[0] if value.ndim == 5 else value
        affines[key] = _find_affine(item, key, value)
    return Volume(volume_id, arrays, affines or None, roles, same_grid)


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _find_affine(item: Mapping[str, Any], key: str, value: Any) -> NDArray[np.float64]:
    meta = item.get(f"{key}_meta_dict")
    found = getattr(value, "affine", None)
    if found is None and isinstance(meta, Mapping):
        found = meta.get("affine")
    if found is None:
        found = item.get("affine")
    matrix = np.eye(4) if found is None else np.asarray(found, np.float64)
    return matrix[0] if matrix.ndim == 3 and len(matrix) == 1 else matrix
