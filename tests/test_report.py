"""The figure of a batch: which slices, which outlines, which titles."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot

import gpuqueue as gq


def batch_of(size: tuple[int, int, int], count: int = 2, channels: int = 1, spacing: float = 1.0) -> dict[str, Any]:
    affine = torch.diag(torch.tensor([1.0, 1.0, spacing, 1.0], dtype=torch.float64)).repeat(count, 1, 1)
    image = torch.arange(count * channels * np.prod(size), dtype=torch.float32).reshape(count, channels, *size)
    return {"image": image, "affine": affine, "volume": [f"v{n}" for n in range(count)], "index": torch.arange(count)}


def panels(figure: Any, columns: int) -> np.ndarray[Any, Any]:
    """The axes as (rows, columns)."""
    return np.array([axes for axes in figure.axes if axes.images], object).reshape(-1, columns)


def test_every_patch_shows_its_middle_slices_with_id_and_k_and_without_ticks() -> None:
    batch = batch_of((6, 8, 4), spacing=3.0)
    grid = panels(gq.show(batch), 2)
    patch = batch["image"][1, 0].numpy()
    for row, wanted in enumerate((patch[3], patch[:, 4], patch[:, :, 2])):
        assert np.array_equal(grid[row, 1].images[0].get_array(), wanted.T)
    assert [axes.get_title() for axes in grid[0]] == ["v0  k=0", "v1  k=1"]
    assert [axes.get_aspect() for axes in grid[:, 0]] == [3.0, 3.0, 1.0]
    assert all(len(axes.get_xticks()) == len(axes.get_yticks()) == 0 for axes in grid.flat)


def test_an_outline_surrounds_its_label_in_every_slice() -> None:
    batch = batch_of((12, 14, 16))
    batch["label"] = torch.zeros(2, 1, 12, 14, 16, dtype=torch.int64)
    box = (slice(4, 9), slice(3, 10), slice(6, 11))
    batch["label"][0, 0][box] = 7
    grid = panels(gq.show(batch), 2)
    for row, (across, up) in enumerate(((1, 2), (0, 2), (0, 1))):
        (outline,) = grid[row, 0].collections
        extent = outline.get_paths()[0].get_extents()
        assert (extent.x0, extent.x1) == (box[across].start - 0.5, box[across].stop - 0.5)
        assert (extent.y0, extent.y1) == (box[up].start - 0.5, box[up].stop - 0.5)
        assert not grid[row, 1].collections


def test_a_label_of_several_channels_is_outlined_channel_by_channel() -> None:
    batch = batch_of((8, 8, 8), count=1)
    batch["label"] = torch.zeros(1, 3, 8, 8, 8, dtype=torch.int64)
    batch["label"][0, 0, :5], batch["label"][0, 2, :, :5] = 1, 1
    grid = panels(gq.show(batch), 1)
    assert [len(axes.collections) for axes in grid[:, 0]] == [1, 1, 2]


def test_the_channel_the_keys_and_the_number_of_patches_can_be_chosen() -> None:
    batch = batch_of((4, 4, 4), count=5, channels=2)
    batch["prediction"] = torch.zeros(5, 1, 4, 4, 4, dtype=torch.int64)
    batch["prediction"][:, :, :2] = 1
    grid = panels(gq.show(batch, image="image", label="prediction", channel=1, most=3), 3)
    assert np.array_equal(grid[0, 2].images[0].get_array(), batch["image"][2, 1, 2].numpy().T)
    assert len(grid[2, 2].collections) == 1


def test_flat_constant_and_non_finite_patches_are_drawn(tmp_path: pathlib.Path) -> None:
    flat = batch_of((8, 6, 1)) | {"label": torch.ones(2, 1, 8, 6, 1, dtype=torch.int64)}
    assert panels(gq.show(flat, file=tmp_path / "flat.png"), 2).shape == (1, 2)
    empty = {"image": torch.zeros(2, 1, 4, 4, 4).to(torch.bfloat16)}
    empty["image"][1] = torch.nan
    assert panels(gq.show(empty, file=tmp_path / "new" / "empty.png"), 2)[0, 1].get_title() == "patch 1"
    assert (tmp_path / "new" / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_no_figure_stays_open_behind_the_callers_back() -> None:
    gq.show(batch_of((4, 4, 4)))
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": "t2"}, "t2"),
        ({"label": "seg"}, "seg"),
        ({"channel": 1}, "channel=1"),
        ({"channel": -1}, "channel=-1"),
    ],
)
def test_what_is_not_in_the_batch_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        gq.show(batch_of((4, 4, 4)), **options)


def test_a_batch_without_an_image_is_refused() -> None:
    with pytest.raises(ValueError, match="no image to show"):
        gq.show({"label": torch.zeros(1, 1, 4, 4, 4)})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_on_the_gpu_is_drawn() -> None:
    batch = batch_of((4, 4, 4)) | {"label": torch.ones(2, 1, 4, 4, 4, dtype=torch.int64)}
    on_gpu = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    assert panels(gq.show(on_gpu), 2).shape == (3, 2)
