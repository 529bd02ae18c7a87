"""Volumes of a data set by their files."""

from __future__ import annotations

import csv
import json
import pickle

import nibabel as nib
import numpy as np
import pytest

import gpuqueue as gq


def save(path, array, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
    return path


IMAGE, LABEL = np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.arange(60, dtype=np.uint8).reshape(3, 4, 5) % 3


def test_entries_are_read_with_their_roles_channels_and_transform(tmp_path):
    paths = [save(tmp_path / f"{name}.nii.gz", IMAGE + n) for n, name in enumerate(("t1", "t2"))]
    label = save(tmp_path / "seg.nii", LABEL)
    dataset = gq.VolumeDataset(
        [{"id": "a", "image": paths, "mask": label}],
        roles={"mask": "label"},
        transform=lambda volume: volume.replace({"image": volume["image"] * 2}),
    )
    volume = dataset[0]
    assert volume.id == "a" and volume["image"].shape == (2, 3, 4, 5)
    assert (volume["image"][1].numpy() == 2 * (IMAGE + 1)).all() and (volume["mask"][0].numpy() == LABEL).all()
    assert volume.roles == {"image": "image", "mask": "label"}
    with pytest.raises(IndexError):
        dataset[1]
    plain = gq.VolumeDataset([{"image": str(paths[0])}])
    assert plain.ids == ["t1"] and plain.reference_grid(0).shape == (3, 4, 5)
    assert pickle.loads(pickle.dumps(plain))[0].id == "t1"


def test_the_decathlons_layout(tmp_path):
    for name in ("la_003", "la_004"):
        save(tmp_path / "imagesTr" / f"{name}.nii.gz", np.stack([IMAGE, IMAGE + 1], axis=-1))
        save(tmp_path / "labelsTr" / f"{name}.nii.gz", LABEL)
    (tmp_path / "imagesTr" / "._la_003.nii.gz").write_bytes(b"not a volume")
    dataset = gq.VolumeDataset.from_folder(tmp_path)
    assert dataset.ids == ["la_003", "la_004"] and dataset[1]["image"].shape == (2, 3, 4, 5)
    assert dataset.subset(["la_004"]).ids == ["la_004"]
    with pytest.raises(ValueError, match="no volume has the id 'x'"):
        dataset.subset(["x"])
    (tmp_path / "labelsTr" / "la_004.nii.gz").unlink()
    with pytest.raises(ValueError, match=r"1 of 2 cases have no label.*'la_004'"):
        gq.VolumeDataset.from_folder(tmp_path)


@pytest.mark.parametrize("described", [True, False])
def test_nnunets_layout_has_channels_as_files(tmp_path, described):
    for case in ("BRATS_001", "BRATS_002"):
        for channel in range(2):
            save(tmp_path / "imagesTr" / f"{case}_{channel:04d}.nii.gz", IMAGE + channel)
        save(tmp_path / "labelsTr" / f"{case}.nii.gz", LABEL)
    if described:
        (tmp_path / "dataset.json").write_text(json.dumps({"channel_names": {"0": "T1", "1": "T2"}}))
    dataset = gq.VolumeDataset.from_folder(tmp_path)
    assert dataset.ids == ["BRATS_001", "BRATS_002"]
    assert (dataset[0]["image"].numpy() == np.stack([IMAGE, IMAGE + 1])).all() and "label" in dataset[0].arrays


def test_pairs_of_files(tmp_path):
    save(tmp_path / "x_image.nii.gz", IMAGE), save(tmp_path / "x_label.nii.gz", LABEL)
    nib.save(nib.Nifti1Pair(IMAGE, np.eye(4)), tmp_path / "y_image.hdr")
    save(tmp_path / "y_label.nii.gz", LABEL)
    assert gq.VolumeDataset.from_folder(tmp_path).ids == ["x", "y"]
    with pytest.raises(ValueError, match="no volumes in a known layout"):
        gq.VolumeDataset.from_folder(save(tmp_path / "other" / "z.nii", IMAGE).parent)
    with pytest.raises(ValueError, match="not a folder"):
        gq.VolumeDataset.from_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "entries, message",
    [
        ([], "empty"),
        ([{"id": "a", "image": "a.nii"}, {"id": "a", "image": "b.nii"}], "'a' occurs twice"),
        ([{"id": "a", "image": "a.nii"}, {"id": "b", "label": "b.nii"}], r"'b' has the keys \['label'\]"),
        ([{"id": "a", "scan": "a.nii"}], "'scan' has no role"),
        ([{"id": "a", "start": "a.nii"}], "reserved"),
        ([{"id": "a", "image": 3}], "path"),
        ([{"id": "a", "image": []}], "path"),
        ([{"id": "a"}], "names no file"),
    ],
)
def test_entries_that_make_no_sense_are_refused_before_anything_is_read(entries, message):
    with pytest.raises(ValueError, match=message):
        gq.VolumeDataset(entries)


def test_grids_of_one_sample_resampled_onto_one_grid(tmp_path):
    """H54: image and label at (0.98, 0.98, 3) mm, affines 1e-5 apart, to 4 mm: identical shapes and affines."""
    affine = np.diag([0.98, 0.98, 3.0, 1.0])
    image = save(tmp_path / "a_image.nii.gz", np.zeros((64, 64, 15), np.int16), affine)
    label = save(
        tmp_path / "a_label.nii.gz",
        np.zeros((64, 64, 15), np.uint8),
        affine + 1e-5 * np.eye(4, k=1) * [[1], [1], [1], [0]],
    )
    dataset = gq.VolumeDataset([{"id": "a", "image": image, "label": label}])
    with gq.GPUQueue(dataset, (16, 16, 11), 2, spacing=4, device="cpu") as queue:
        (batch,) = queue
    assert batch["image"].shape == batch["label"].shape == (2, 1, 16, 16, 11) and (batch["start"] == 0).all()
    assert np.allclose(np.linalg.norm(batch["affine"][0, :3, :3], axis=0), 4)


PAIRS = {  # of odd/gen/specs.tsv, kind "pair": what is decided only when image and label meet
    "dim_tiny_pair": None,
    "dim_aniso_pair": None,
    "ori_oblique_pair": None,
    "ori_LAS_pair": None,
    "ori_PSR_pair": None,
    "ori_IPR_pair": None,
    "lab_float64_0999999": None,
    "lab_no_foreground": None,
    "lab_sparse_1000plus": None,
    "lab_255_ignore": None,
    "lab_single_voxel": None,
    "lab_onehot_4d": None,
    "lab_bool_uint8_255": None,
    "pair_affine_1e-5": None,
    "lab_soft_edges": "whole|integer",
    "pair_shape_mismatch": r"37, 44, 36",
    "pair_label_coarser": "shape",
    "pair_label_permuted_grid": "shape",
    "pair_affine_rot_0p1deg": "voxels apart",
    "pair_spacing_differs": "voxels apart",
}


@pytest.mark.parametrize("name", PAIRS)
def test_odd_pairs_load_or_are_refused_by_name(name, shared_data):
    folder, message = shared_data / "odd" / "gen" / name, PAIRS[name]
    dataset = gq.VolumeDataset([{"id": name, "image": folder / "image.nii.gz", "label": folder / "label.nii.gz"}])
    specs = csv.DictReader((folder.parent / "specs.tsv").read_text().splitlines(), delimiter="\t")
    expect = next(row["expect"] for row in specs if row["name"] == name)
    assert expect in ({"LOAD", "OPTION", "WARN"} if message is None else {"REJECT", "OPTION", "WARN"})
    if message is not None:
        with pytest.raises(gq.VolumeError, match=message) as caught:
            dataset[0]
        assert name in str(caught.value)
        return
    truth = np.round(nib.load(folder / "label.nii.gz").get_fdata())
    label = dataset[0]["label"].numpy()
    assert (label == (np.moveaxis(truth, 3, 0) if truth.ndim == 4 else truth[None])).all()
    with gq.GPUQueue(dataset, 24, 3, device="cpu") as queue:
        (batch,) = queue
    assert batch["image"].isfinite().all() and batch["image"].shape == (3, 1, 24, 24, 24)


def test_storage_orders_become_the_same_patches_after_reorientation(shared_data):
    """The same scene stored RAS (the phantom), LAS, PSR and IPR: left stays left."""
    gen = shared_data / "odd" / "gen"
    patches = []
    for name in ("ori_LAS_pair", "ori_PSR_pair", "ori_IPR_pair"):
        dataset = gq.VolumeDataset(
            [{"id": "a", "image": gen / name / "image.nii.gz", "label": gen / name / "label.nii.gz"}]
        )
        with gq.GPUQueue(dataset, (40, 44, 36), 1, orientation="RAS", device="cpu") as queue:
            (batch,) = queue
        patches.append(batch)
    for other in patches[1:]:
        for key in ("image", "label", "affine"):
            assert np.allclose(other[key], patches[0][key], atol=1e-5)
