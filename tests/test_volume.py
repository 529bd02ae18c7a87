"""What a volume accepts, and what it refuses with which words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gpuqueue as gq
from gpuqueue.volumes.volume import RESERVED_KEYS, as_volume

ONES = np.ones((4, 5, 6), np.float32)


def test_origins_that_differ_in_the_fourth_decimal_are_accepted():
    """H53: 3e-4 mm is read through the image's affine; 0.6 mm is refused with the difference, unless asked for."""
    near, far = np.eye(4), np.eye(4)
    near[:3, 3], far[:3, 3] = 3e-4, (0.6, 0, 0)
    arrays = {"image": ONES, "label": ONES.astype(int)}
    gq.Volume("a", arrays, {"image": np.eye(4), "label": near})
    with pytest.raises(gq.VolumeError, match=r"'a'.*image.*label.*0\.6 voxels.*0\.6, *0\.0|0\.6"):
        gq.Volume("a", arrays, {"image": np.eye(4), "label": far})
    gq.Volume("a", arrays, {"image": np.eye(4), "label": far}, same_grid=0.7)
    assert gq.Volume("a", arrays, {"image": np.eye(4), "label": far}, same_grid=False).grid("label").affine[0, 3] == 0.6


def test_a_label_of_another_shape_is_refused_with_both_shapes():
    """H05"""
    with pytest.raises(gq.VolumeError, match=r"'a'.*\(40, 40, 40\).*\(40, 39, 40\)"):
        gq.Volume("a", {"image": np.zeros((40, 40, 40)), "label": np.zeros((40, 39, 40), int)})


@pytest.mark.parametrize("key", RESERVED_KEYS)
def test_reserved_keys_are_refused(key):
    with pytest.raises(gq.VolumeError, match=f"{key}.*reserved"):
        gq.Volume("a", {"image": ONES, key: ONES}, roles={key: "image"})


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"arrays": {}}, "no arrays"),
        ({"arrays": {"scan": ONES}}, "'scan' has no role"),
        ({"arrays": {"scan": ONES}, "roles": {"scan": "mask"}}, "'mask' is none of these"),
        ({"arrays": {"image": ONES[0]}}, "'image'"),
        ({"arrays": {"image": ONES[:0]}}, "'image'"),
        ({"arrays": {"image": ONES + 1j}}, "complex"),
        ({"arrays": {"label": ONES / 2}}, "0.5"),
        ({"arrays": {"image": ONES}, "affine": np.zeros((4, 4))}, "last row|inverted"),
        ({"arrays": {"image": ONES}, "affine": np.diag([1, 1, 0, 1])}, "inverted"),
        ({"arrays": {"image": ONES}, "affine": np.full((4, 4), np.nan)}, "finite"),
        ({"arrays": {"image": ONES}, "affine": {"label": np.eye(4)}}, "image"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(arguments, message):
    with pytest.raises(gq.VolumeError, match=message) as caught:
        gq.Volume("case3", **arguments)
    assert "case3" in str(caught.value)


def test_true_values_and_replace():
    volume = gq.Volume(
        "a",
        {"image": np.full((2, 2, 2), 100, np.int16), "label": np.full((2, 2, 2), 3)},
        scale={"image": np.array([[0.5, 10.0]])},
    )
    assert (volume["image"] == 60).all() and volume["image"].dtype == torch.float32
    assert volume.arrays["image"].dtype == torch.int16
    halved = volume.replace({"image": volume["image"] / 2, "map": np.ones((2, 2, 2))})
    assert (halved["image"] == 30).all() and halved.roles["map"] == "map" and (volume["image"] == 60).all()
    assert volume.reference == "image" and volume.nbytes == 8 * 2 + 8


class Meta(torch.Tensor):
    """Stands for a MetaTensor: a subclass with an affine."""


def test_dicts_become_volumes():
    tensor = torch.ones(1, 1, 4, 5, 6).as_subclass(Meta)
    tensor.affine = torch.diag(torch.tensor([3.0, 3, 3, 1]))[None]
    item = {
        "image": tensor,
        "label": np.ones((1, 1, 4, 5, 6), int),
        "label_meta_dict": {"affine": np.diag([3.0, 3, 3, 1])},
    }
    volume = as_volume(item | {"id": ["c1"], "name": "x", "point": np.zeros(3)}, "0", None, True)
    assert volume.id == "c1" and set(volume.arrays) == {"image", "label"} and volume.grid().spacing[0] == 3
    assert type(volume.arrays["image"]) is torch.Tensor and volume.arrays["image"].shape == (1, 4, 5, 6)
    with pytest.raises(gq.VolumeError, match="collate_fn=list"):
        as_volume({"image": torch.ones(2, 1, 4, 5, 6)}, "0", None, True)
    with pytest.raises(gq.VolumeError, match="expected a gpuqueue.Volume"):
        as_volume(torch.ones(4, 5, 6), "0", None, True)
