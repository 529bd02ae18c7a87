"""How patches are looked at: one figure, a column for each patch, a row for each axis."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]
_INCHES = 1.7  # side of one picture
_COLOURS = ("#ff5a4f", "#3fc8ff", "#ffd23f", "#6fe06f", "#ff8ff0", "#ff9f40", "#9f8cff", "#40e0c0")  # bright on grey
_NAMED_LABELS = 10  # more than these make the legend larger than the pictures


def show(
    batch: Mapping[str, Any],
    image: str | None = None,
    label: str | None = None,
    channel: int = 0,
    most: int = 8,
    file: str | os.PathLike[str] | None = None,
) -> Figure:
    """A figure of the patches of a batch: the middle slice across each axis, with the outlines of the labels.

    A slice across axis i has j to the right and k upwards, and so on in the order of the axes; pictures have the
    patch's proportions in mm where the batch has `affine`. Each patch is windowed to its own 0.5 to 99.5 percentiles.

    Args:
        batch: Keys `(B, C, I, J, K)` on any device, as a GPUQueue delivers them.
        image, label: Which keys to draw; by default the first that begin with these words. Without label: no outlines.
        channel: The image's channel. A label with several channels is outlined channel by channel.
        most: Patches drawn at most, the first ones.
        file: Also write the figure there, as PNG or what its suffix says.

    Raises:
        ValueError: No such key or channel, or an empty batch.

    >>> import torch
    >>> batch = {"image": torch.rand(2, 1, 8, 8, 8), "volume": ["a", "b"], "index": torch.tensor([0, 4])}
    >>> show(batch).axes[1].get_title()
    'b  k=4'
    """
    pixels, masks = _voxels(batch, image, "image"), _voxels(batch, label, "label")
    if pixels is None:
        raise ValueError(f"there is no image to show; the batch has the keys {list(batch)}: say image='KEY'")
    if not 0 <= channel < pixels.shape[1]:
        raise ValueError(f"channel={channel}: the image has {pixels.shape[1]} channels, counted from 0")
    pixels = pixels[: max(1, most), channel].astype(np.float32)
    masks = None if masks is None else masks[: len(pixels)]
    figure, grid = _empty_figure(len(pixels), rows := _axes_to_cut(pixels.shape[1:]))
    names = [] if masks is None else _label_numbers(masks)
    for column, patch in enumerate(pixels):
        outlines = [] if masks is None else list(_outlines(masks[column], names))
        _draw_patch(list(grid[:, column]), patch, outlines, rows, _spacing(batch, column))
        grid[0, column].set_title(_title(batch, column), fontsize=8)
    _name_labels(figure, names)
    if file is not None:
        pathlib.Path(file).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=110)
    return figure


def _voxels(batch: Mapping[str, Any], key: str | None, role: str) -> Array | None:
    """The key's values on the CPU, `(B, C, I, J, K)`; None where none begins with the role's name."""
    keys = [name for name, value in batch.items() if isinstance(value, Tensor) and value.ndim == 5 and len(value)]
    if key is not None and key not in keys:
        raise ValueError(f"{role}={key!r} is no tensor (B, C, I, J, K) with patches; those of the batch are {keys}")
    found = key or next((name for name in keys if name.startswith(role)), None)
    if found is None:
        return None
    values = batch[found].detach().cpu()
    array: Array = (values.float() if values.is_floating_point() else values).numpy()
    return array


def _axes_to_cut(size: Sequence[int]) -> list[int]:
    """The axes whose slices are pictures and not lines."""
    return [axis for axis in range(3) if min(np.delete(size, axis)) > 1] or [2]


def _empty_figure(columns: int, rows: Sequence[int]) -> tuple[Figure, Array]:
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        len(rows),
        columns,
        squeeze=False,
        layout="constrained",
        figsize=(_INCHES * columns + 0.3, _INCHES * len(rows) + 0.4),
    )
    pyplot.close(figure)  # the caller's alone: a notebook shows it once, and pyplot does not keep it alive
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    return figure, grid


def _draw_patch(
    column: Sequence[Axes], patch: Array, outlines: Sequence[tuple[int, Array]], rows: Sequence[int], spacing: Array
) -> None:
    known = patch[np.isfinite(patch)]
    low, high = np.percentile(known, [0.5, 99.5]) if known.size else (0.0, 1.0)
    for axes, axis in zip(column, rows):
        middle = patch.shape[axis] // 2
        across, up = np.delete(spacing, axis)
        flat = patch.take(middle, axis).T
        axes.imshow(
            flat,
            cmap="gray",
            origin="lower",
            vmin=low,
            vmax=max(high, low + 1e-6),
            aspect=up / across,
            interpolation="nearest",
        )
        if axes.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            axes.set_ylabel(f"{'ijk'[axis]} = {middle}", fontsize=8)
        for number, mask in outlines:
            cut = mask.take(middle, axis).T
            if min(cut.shape) > 1 and cut.any() and not cut.all():
                axes.contour(cut, levels=[0.5], colors=[_colour(number)], linewidths=0.8)


def _label_numbers(masks: Array) -> list[int]:
    """The labels to outline: values above 0 of one channel, or the numbers of several channels."""
    if masks.shape[1] > 1:
        return list(range(masks.shape[1]))
    return [int(value) for value in np.unique(masks) if value > 0]


def _outlines(mask: Array, names: Sequence[int]) -> Iterator[tuple[int, Array]]:
    for number in names:
        yield number, mask[number] > 0 if len(mask) > 1 else mask[0] == number


def _colour(number: int) -> str:
    return _COLOURS[(number - 1) % len(_COLOURS)]


def _name_labels(figure: Figure, names: Sequence[int]) -> None:
    from matplotlib.lines import Line2D

    if 0 < len(names) <= _NAMED_LABELS:
        lines = [Line2D([], [], color=_colour(number), label=f"label {number}") for number in names]
        figure.legend(handles=lines, loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)


def _title(batch: Mapping[str, Any], column: int) -> str:
    name = str(batch["volume"][column]) if "volume" in batch else f"patch {column}"
    name = name if len(name) <= 16 else f"{name[:7]}…{name[-8:]}"
    return f"{name}  k={int(batch['index'][column])}" if "index" in batch else name


def _spacing(batch: Mapping[str, Any], column: int) -> Array:
    """Voxel size in mm of one patch; 1 where the batch does not say."""
    affine = batch.get("affine")
    if not isinstance(affine, Tensor) or affine.ndim != 3:
        return np.ones(3)
    lengths: Array = np.linalg.norm(affine[column, :3, :3].cpu().numpy(), axis=0)
    return lengths
