"""Patches as NIfTI files: where they lie, what they hold, how they are named."""

from __future__ import annotations

import pathlib
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

import gpuqueue as gq

OBLIQUE = np.array([[0.9, -0.3, 0.2, -40.0], [0.25, 1.1, 0.1, 12.0], [-0.1, 0.05, 2.9, 7.5], [0, 0, 0, 1]])


def batch_of(**keys: torch.Tensor) -> dict[str, Any]:
    count = len(next(iter(keys.values())))
    return {
        **keys,
        "affine": torch.eye(4, dtype=torch.float64).repeat(count, 1, 1),
        "volume": [f"case{n}" for n in range(count)],
        "epoch": 2,
        "index": torch.arange(count) * 100,
    }


def test_a_patch_that_was_not_augmented_lies_over_its_volume_in_the_world(tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(1)
    volume = gq.Volume(
        "case", {"image": random.normal(size=(20, 18, 9)), "label": random.integers(0, 300, (20, 18, 9))}, OBLIQUE
    )
    with gq.GPUQueue([volume], (8, 6, 5), 4, batch_size=4, device="cpu", backend="torch") as queue:
        files = gq.save_nifti(next(iter(queue)), tmp_path)
    assert len(files) == 8 and sorted(files) == sorted(tmp_path.iterdir())
    for file in files:
        patch = nibabel.load(file)
        offset = np.linalg.solve(OBLIQUE, patch.affine)
        start = np.rint(offset[:3, 3]).astype(int)
        assert np.allclose(offset[:3, :3], np.eye(3), atol=1e-5) and np.allclose(offset[:3, 3], start, atol=1e-4)
        key = "image" if "image" in file.name else "label"
        there = tuple(slice(a, a + n) for a, n in zip(start, patch.shape))
        assert np.array_equal(np.asanyarray(patch.dataobj), volume[key][0].numpy()[there])


def test_channels_are_the_fourth_axis_and_dtypes_are_the_narrowest_that_fit(tmp_path: pathlib.Path) -> None:
    image = torch.rand(2, 3, 4, 5, 6).to(torch.bfloat16)
    label = torch.tensor([[255], [-1]]).reshape(2, 1, 1, 1, 1).expand(2, 1, 4, 5, 6)
    files = gq.save_nifti(batch_of(image=image, label=label, label_wide=label * 1000), tmp_path)
    dtypes = [nibabel.load(file).get_data_dtype().name for file in files]
    assert dtypes == ["float32", "uint8", "int32", "float32", "int8", "int16"]
    voxels = np.asanyarray(nibabel.load(files[3]).dataobj)
    assert voxels.shape == (4, 5, 6, 3)
    assert np.array_equal(voxels[..., 2], image[1, 2].float().numpy())


@pytest.mark.parametrize("shear", [0.0, 0.4])
def test_both_forms_of_the_header_agree_or_only_one_is_declared(tmp_path: pathlib.Path, shear: float) -> None:
    """A quaternion cannot say shear: a viewer that prefers it must not be misled."""
    batch = batch_of(image=torch.zeros(1, 1, 4, 4, 4))
    batch["affine"][0, 0, 1] = shear
    image = nibabel.load(gq.save_nifti(batch, tmp_path)[0])
    wanted = batch["affine"][0].numpy()
    assert np.allclose(image.get_sform(coded=True)[0], wanted, atol=1e-6)
    if shear:
        assert image.header["qform_code"] == 0
    else:
        assert np.allclose(image.get_qform(coded=True)[0], wanted, atol=1e-6)
    assert image.header.get_xyzt_units()[0] == "mm"


def test_names_are_safe_and_different_ids_never_share_a_file(tmp_path: pathlib.Path) -> None:
    ids = ["site/../case", "site_.._case", "..", "a b\n", "a_b_", "ü" * 300, "x" * 300, "x" * 301]
    batch = batch_of(image=torch.zeros(len(ids), 1, 2, 2, 2)) | {"volume": ids, "index": torch.zeros(len(ids)).long()}
    files = gq.save_nifti(batch, tmp_path / "new" / "folder")
    assert len({file.name.lower() for file in files}) == len(ids)
    assert sorted((tmp_path / "new" / "folder").iterdir()) == sorted(files)
    assert gq.save_nifti(batch_of(image=torch.zeros(2, 1, 2, 2, 2)), tmp_path)[1].name == "case1_e002_k100_image.nii.gz"


@pytest.mark.parametrize("missing", ["affine", "volume", "epoch", "index", "image"])
def test_a_batch_that_does_not_say_where_its_patches_lie_is_refused(tmp_path: pathlib.Path, missing: str) -> None:
    batch = batch_of(image=torch.zeros(1, 1, 2, 2, 2))
    del batch[missing]
    with pytest.raises(ValueError, match="the batch has no"):
        gq.save_nifti(batch, tmp_path)
    assert not list(tmp_path.iterdir())
