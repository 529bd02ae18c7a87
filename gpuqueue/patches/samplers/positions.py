"""Where the voxels of each class are, so that the r-th voxel of a class is found without looking at the volume.

Voxels are numbered with i fastest, as files lie. Two forms, whichever is smaller: runs of equal voxels (8 bytes a run;
real labels have runs of 15 voxels and more), or, for labels like noise, one bit plane for each binary digit of the
class's number with counts for each class and block. Both turn a rank among all listed voxels, class after class, into a
cell by one binary search.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuqueue.volumes.storage import in_c_order

Index = Mapping[str, NDArray[Any]]
_BLOCK = 4096  # voxels of a bit plane that one draw looks at, with up to 64 classes
_SLAB = 1 << 20  # voxels looked at at a time


def index_classes(label: NDArray[Any], wanted: Sequence[int] | None) -> dict[str, NDArray[Any]]:
    """The index of a label map (I, J, K): its classes among `wanted`, None for all but 0.

    `classes` (n,) ascending and `counts` (n,) of their voxels; the rest is for `find_voxels`.

    >>> label = np.zeros((4, 3, 2), np.uint8)
    >>> label[1, 2, 1] = 7
    >>> index = index_classes(label, None)
    >>> index["classes"], index["counts"], find_voxels(index, np.array([0]), np.array([0]))
    (array([7]), array([1]), array([[1, 2, 1]]))
    """
    flat = in_c_order(label.T).reshape(-1)
    starts = _run_starts(flat)
    index = _planes(flat, wanted) if 8 * len(starts) > flat.size else _runs(flat, starts, wanted)
    return {**index, "shape": np.array(label.shape)}


def find_voxels(index: Index, which: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Voxels (n, 3): of class `classes[which]` (n,) the one numbered `ranks` (n,), 0 to counts - 1, each."""
    counts, before = index["counts"], index["before"]
    overall = (np.cumsum(counts) - counts)[which] + ranks
    # in the dtype of `before`, else the search would convert all of it
    cells = np.searchsorted(before, overall.astype(before.dtype), side="right") - 1
    within = overall - before[cells].astype(np.int64)
    if "starts" in index:
        flat = index["starts"][cells].astype(np.int64) + within
    else:
        flat = _in_planes(index, cells, within)
    columns, rows, _ = index["shape"].tolist()
    return np.stack([flat % columns, flat // columns % rows, flat // (columns * rows)], axis=-1)


def _run_starts(flat: NDArray[Any]) -> NDArray[Any]:
    """Where a voxel differs from the one before, and 0. Slab by slab, so that what is looked at stays in the cache."""
    small = _index_type(flat.size)
    changes = np.empty(_SLAB, np.bool_)
    eights = changes.view(np.uint64)
    found = [np.zeros(1, small)]
    for first in range(0, flat.size - 1, _SLAB):
        count = min(_SLAB, flat.size - 1 - first)
        np.not_equal(flat[first + 1 : first + count + 1], flat[first : first + count], out=changes[:count])
        changes[count:] = False
        words = np.flatnonzero(eights != 0)  # few: looking only there halves the time
        bits = np.flatnonzero(eights[words].view(np.bool_))
        found.append(((words << 3)[bits >> 3] + (bits & 7) + (first + 1)).astype(small))
    return np.concatenate(found)


def _runs(flat: NDArray[Any], starts: NDArray[Any], wanted: Sequence[int] | None) -> dict[str, NDArray[Any]]:
    kinds = flat[starts]
    order = np.argsort(kinds, kind="stable")  # by class, then by position
    ends = np.flatnonzero(np.diff(kinds[order], append=kinds[order[:1]]) != 0) + 1
    parts = np.split(order, ends[ends < len(order)])
    parts = [part for part in parts if (kinds[part[0]] != 0 if wanted is None else kinds[part[0]] in wanted)]
    order = np.concatenate([*parts, order[:0]])
    lengths = np.diff(starts, append=starts.dtype.type(flat.size))[order]
    before = np.cumsum(lengths, dtype=starts.dtype)
    before -= lengths
    first = np.cumsum([0, *map(len, parts)])[:-1]
    return {
        "classes": np.array([kinds[part[0]] for part in parts], np.int64),
        "counts": np.diff(before[first].astype(np.int64), append=lengths.sum(dtype=np.int64)),
        "starts": starts[order],
        "before": before,
    }


def _index_type(size: int) -> type[np.uint32] | type[np.uint64]:
    return np.uint32 if size < 2**32 else np.uint64


def _planes(flat: NDArray[Any], wanted: Sequence[int] | None) -> dict[str, NDArray[Any]]:
    present = np.unique(np.concatenate([np.unique(flat[a : a + _SLAB]) for a in range(0, flat.size, _SLAB)]))
    classes = present[present != 0 if wanted is None else np.isin(present, wanted)].astype(np.int64)
    block = max(_BLOCK, 64 * len(classes))
    digits = max(1, len(classes).bit_length())
    planes = np.empty((digits, -(-flat.size // block) * block // 8), np.uint8)
    counts = []
    for first, numbers in _numbered(flat, classes, block):
        cell = numbers + np.arange(len(numbers)) // block * (len(classes) + 1)
        blocks = len(numbers) // block
        counts.append(np.bincount(cell, minlength=blocks * (len(classes) + 1)).reshape(blocks, -1)[:, 1:])
        for digit, plane in enumerate(planes):
            plane[first // 8 : (first + len(numbers)) // 8] = np.packbits(numbers >> digit & 1)
    by_class = np.concatenate(counts).T  # (classes, blocks)
    return {
        "classes": classes,
        "counts": by_class.sum(axis=1),
        "planes": planes,
        "before": (np.cumsum(by_class.ravel()) - by_class.ravel()).astype(_index_type(flat.size)),
    }


def _numbered(flat: NDArray[Any], classes: NDArray[np.int64], block: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Slabs of whole blocks, as 1 + the place of each voxel's class, or 0; the last one filled up with 0."""
    step = -(-_SLAB // block) * block
    for first in range(0, flat.size, step):
        part = flat[first : first + step]
        numbers = np.zeros(-(-len(part) // block) * block, np.int64)
        if len(classes):
            places = np.minimum(np.searchsorted(classes, part), len(classes) - 1)
            numbers[: len(part)] = np.where(classes[places] == part, places + 1, 0)
        yield first, numbers


def _in_planes(index: Index, cells: NDArray[np.int64], within: NDArray[np.int64]) -> NDArray[np.int64]:
    planes, blocks = index["planes"], len(index["before"]) // len(index["classes"])
    width = planes.shape[1] // blocks
    flat = np.empty(len(cells), np.int64)
    for n, (cell, rank) in enumerate(zip(cells.tolist(), within.tolist())):
        which, block = divmod(cell, blocks)
        bits = np.unpackbits(planes[:, block * width : (block + 1) * width], axis=1)
        wanted = np.array([which + 1 >> digit & 1 for digit in range(len(planes))], np.uint8)
        flat[n] = 8 * width * block + np.flatnonzero((bits == wanted[:, None]).all(axis=0))[rank]
    return flat
