"""How patches become files: NIfTI that lies where the patch was cut, for any viewer."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import nibabel
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuqueue.rng import hash_id

Array = NDArray[Any]
_INTEGERS = (np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64)  # narrowest first
_LONGEST_NAME = 80  # file systems allow 255 bytes for the whole name


def save_nifti(batch: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes every patch of a batch as NIfTI, one file for each patch and key: `ID_e000_k000_KEY.nii.gz`.

    Floats become float32, whole numbers the narrowest integers that hold them; several channels are the 4th axis. The
    affine is that of the patch's own first voxel (RAS+ mm), so a patch that was not augmented lies over its volume.
    Letters of an id that a file name cannot hold become `_`, and a hash of the id is added. A file of that name is
    overwritten.

    Args:
        batch: As a GPUQueue delivers it: keys `(B, C, I, J, K)`, `affine` (B, 4, 4), `volume`, `epoch`, `index`.
        folder: Made if it is not there.

    Returns:
        The files, patch by patch.

    Raises:
        ValueError: The batch has no `affine` (or `volume`, `epoch`, `index`), or no key of five axes.

    >>> import tempfile, torch
    >>> about = {"affine": torch.eye(4)[None].double(), "volume": ["case1"], "epoch": 0, "index": torch.tensor([3])}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [file.name for file in save_nifti({"label": torch.ones(1, 1, 4, 4, 4, dtype=torch.int64)} | about, folder)]
    ['case1_e000_k003_label.nii.gz']
    """
    if missing := [name for name in ("affine", "volume", "epoch", "index") if name not in batch]:
        raise ValueError(
            f"the batch has no {missing[0]!r}, so a patch's place or name is not known; save it as the queue gave it, "
            "or keep its entries: {**batch, 'image': new}"
        )
    keys = [key for key, value in batch.items() if isinstance(value, Tensor) and value.ndim == 5]
    if not keys:
        raise ValueError(f"the batch has no tensor (B, C, I, J, K) to save, only {list(batch)}")
    root = pathlib.Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    affines = batch["affine"].cpu().numpy()
    written = []
    for place, volume_id in enumerate(batch["volume"]):
        name = f"{_file_name(volume_id)}_e{int(batch['epoch']):03d}_k{int(batch['index'][place]):03d}"
        for key in keys:
            path = root / f"{name}_{_file_name(key)}.nii.gz"
            _write(path, _voxels(batch[key][place]), affines[place])
            written.append(path)
    return written


def _voxels(patch: Tensor) -> Array:
    """One patch (C, I, J, K) in the dtype and axis order of the file."""
    values = patch.detach().cpu()
    if values.is_floating_point():
        array: Array = values.float().numpy()
    else:
        array = values.numpy()
        array = array.astype(_narrowest(array))
    return array[0] if len(array) == 1 else np.moveaxis(array, 0, -1)


def _narrowest(array: Array) -> type[np.integer[Any]]:
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    return next(dtype for dtype in _INTEGERS if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)


def _write(path: pathlib.Path, voxels: Array, affine: NDArray[np.float64]) -> None:
    image = nibabel.Nifti1Image(voxels, affine, dtype=voxels.dtype)
    image.header.set_xyzt_units("mm")
    image.set_sform(affine, code="aligned")
    image.set_qform(affine, code="aligned")
    if not np.allclose(image.get_qform(), affine, atol=1e-3):
        image.set_qform(None, code="unknown")  # a quaternion cannot say shear; a reader must take the sform
    image.to_filename(path)


def _file_name(text: str) -> str:
    """The text as part of a file name; different texts stay different.

    >>> _file_name("case1"), _file_name("site/case1") != _file_name("site_case1")
    ('case1', True)
    """
    safe = re.sub(r"[^A-Za-z0-9._-]", "_", text)[:_LONGEST_NAME].lstrip(".")
    return safe if safe == text else f"{safe}_{hash_id(text):016x}"
