"""What a file's header says, before a voxel is read, and whether the file can keep that promise.

NIfTI-1, NIfTI-2 and MGH in one file, gzipped or not and whatever the name, are understood here through nibabel's header
classes; `None` says that the file is something else, for `nibabel.load`. Affines are as nibabel chooses them (sform,
then qform, then pixdim), in mm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from nibabel.freesurfer.mghformat import MGHHeader
from nibabel.nifti1 import Nifti1Header
from nibabel.nifti2 import Nifti2Header

from gpuqueue.errors import VolumeError
from gpuqueue.volumes.grid import Grid, Matrix, check_affine, corner_difference
from gpuqueue.volumes.storage import check_numeric

START = 540  # bytes that hold the longest of the headers
FORMS_AGREE = 1e-2  # voxels that sform and qform may differ by
_UNITS = {1: ("metres", 1e3), 3: ("microns", 1e-3)}  # NIfTI codes; 2 is mm
_WORTH_SAYING = 30  # of nibabel's levels; below are repairs that change nothing that is used
_ERROR_LEVEL = 40  # from here on a header fault is an error in nibabel


@dataclass(frozen=True, eq=False)
class FileHeader:
    """`shape` and `dtype` as in the file, `offset` of the voxels in bytes, `slope` and `intercept`, `affine` in mm, and
    `remarks`: what had to be repaired or chosen."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    slope: float
    intercept: float
    affine: Matrix
    remarks: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the voxels in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def parse(start: bytes, name: str, where: str) -> FileHeader | None:
    """The header in the first `START` bytes of a file called `name`, or None when it is none of the known ones."""
    notes = _Notes()
    header = _header(start, name, where, notes)
    if header is None:
        return None
    slope, intercept = header.get_slope_inter()
    shape = tuple(int(size) for size in header.get_data_shape())
    affine, remarks = file_affine(header, header.get_best_affine(), shape, where)
    return FileHeader(
        shape,
        header.get_data_dtype(),
        int(header.get_data_offset()),
        1.0 if slope is None else float(slope),
        0.0 if intercept is None else float(intercept),
        affine,
        (*notes, *remarks),
    )


def check_header(header: FileHeader, room: float, where: str) -> None:
    """Refuse voxels that are no numbers, impossible scales, and claims of more bytes than the file has `room` for."""
    check_numeric(header.dtype, where)
    channels_and_shape(header.shape, where)
    needed = header.offset + header.nbytes
    if header.offset < 0 or needed > room:
        raise VolumeError(
            f"{where}: the header claims {header.shape} voxels of {header.dtype} from byte {header.offset}, {needed} "
            f"bytes, but the file can hold at most {room:.0f}; it is cut short or its header is damaged"
        )
    largest = np.iinfo(header.dtype).max if header.dtype.kind in "iu" else 1
    limits = np.finfo(np.float32)
    if abs(header.slope) * largest + abs(header.intercept) > limits.max or abs(header.slope) < limits.tiny:
        raise VolumeError(
            f"{where}: slope {header.slope:g} and intercept {header.intercept:g} give values that float32 cannot hold; "
            "repair scl_slope and scl_inter"
        )


def channels_and_shape(shape: tuple[int, ...], where: str) -> tuple[int, tuple[int, int, int]]:
    """(C, (I, J, K)) of a file's axes: singletons beyond the third are dropped, one axis may be left as channels.

    >>> channels_and_shape((9, 10, 11, 1, 2), "a.nii")
    (2, (9, 10, 11))
    """
    if len(shape) < 2 or min(shape) < 1:
        raise VolumeError(f"{where}: expected at least two axes, none of them empty, got shape {shape}")
    space = (*shape[:3], 1)[:3]
    further = [size for size in shape[3:] if size != 1]
    if len(further) > 1:
        raise VolumeError(f"{where}: shape {shape} has {len(further)} axes beyond space; save one 4D file per series")
    return (further[0] if further else 1), (space[0], space[1], space[2])


def file_affine(header: Any, best: Any, shape: tuple[int, ...], where: str) -> tuple[Matrix, tuple[str, ...]]:
    """`best`, the affine that nibabel chose, checked and in mm, and remarks about it, for any nibabel header."""
    try:
        affine = check_affine(best, where)
    except VolumeError:
        raise
    except ValueError as error:
        raise VolumeError(str(error)) from error
    if not isinstance(header, Nifti1Header):
        return affine, ()
    remarks = [_forms(header, affine, shape)]
    unit, factor = _UNITS.get(int(header["xyzt_units"]) % 8, ("mm", 1.0))
    if factor != 1:
        affine[:3] *= factor
        remarks.append(f"the header is in {unit}; its affine was multiplied by {factor:g} to give mm")
    return affine, tuple(remark for remark in remarks if remark)


def _header(start: bytes, name: str, where: str, notes: _Notes) -> Any:
    if start[344:348] == b"n+1\0":
        kind, size = Nifti1Header, 348
    elif start[4:8] == b"n+2\0":
        kind, size = Nifti2Header, 540
    elif start[:4] == b"\0\0\0\1" and name.lower().endswith((".mgh", ".mgz", ".mgh.gz")):
        return MGHHeader(start[:284])
    else:
        return None
    if len(start) < size:
        raise VolumeError(f"{where}: the file ends inside its header")
    header = kind(start[:size], check=False)
    header.check_fix(logger=notes, error_level=_ERROR_LEVEL)
    return header


class _Notes(list[str]):
    """What nibabel says about a header, kept so that it can be logged with the file's name."""

    def log(self, level: int, message: str) -> None:
        if level >= _WORTH_SAYING:
            self.append(message)


def _forms(header: Nifti1Header, affine: Matrix, shape: tuple[int, ...]) -> str:
    """A remark where both sform and qform are set and put the volume's corners in different places."""
    if header["sform_code"] <= 0 or header["qform_code"] <= 0:
        return ""
    space = (*shape[:3], 1)[:3]
    try:
        qform = Grid((space[0], space[1], space[2]), np.asarray(header.get_qform(), np.float64))
    except Exception as error:  # nibabel's own errors for impossible quaternions
        return f"the qform is invalid ({error}); the sform is used"
    apart = corner_difference(Grid(qform.shape, affine), qform)
    if apart <= FORMS_AGREE:
        return ""
    return f"sform and qform differ by up to {apart:.3g} voxels; the sform is used, as in nibabel"
