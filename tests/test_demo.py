"""The demo: its data are what it says, it runs to the end, and its Dice is a Dice."""

from __future__ import annotations

import contextlib
import io
import pathlib

import nibabel
import numpy as np
import pytest
import torch

import gpuqueue as gq
from gpuqueue.cli import main
from gpuqueue.demo import DemoSettings, ForNetwork, blocks, dice, make_network, run, split, write_blocks

# monai and nilearn, which the demo imports, warn about their own dependencies
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:monai"),
]


def demo(*arguments: str) -> str:
    """What `gpuqueue demo` prints, on both channels."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert main(["demo", *arguments]) == 0, printed.getvalue()
    return printed.getvalue()


def last_number(printed: str, row: str) -> float:
    line = next(line for line in printed.splitlines() if row in line)
    return float(line.strip(" │\n").split("│")[-1].split()[0])


def test_no_two_blocks_share_a_voxel_and_validation_lies_in_front() -> None:
    times = np.zeros((197, 233, 189), int)
    for box in blocks().values():
        times[box] += 1
    assert times.max() == 1
    training = [box[1] for name, box in blocks().items() if name.startswith("training")]
    validation = [box[1] for name, box in blocks().items() if name.startswith("validation")]
    assert max(side.stop for side in training) < min(side.start for side in validation)
    assert len({tuple(side.stop - side.start for side in box) for box in blocks().values()}) > 4


def test_block_files_lie_where_they_were_cut_from_the_template(tmp_path: pathlib.Path) -> None:
    from nilearn.datasets import load_mni152_gm_template, load_mni152_template

    template, grey = load_mni152_template(resolution=1), load_mni152_gm_template(resolution=1)
    training, validation = write_blocks(tmp_path)
    front = {name: [] for name in ("training", "validation")}
    for name in (*training, *validation):
        image, label = (nibabel.load(tmp_path / f"{name}_{key}.nii.gz") for key in ("image", "label"))
        start = np.rint(np.linalg.solve(template.affine, image.affine)[:3, 3]).astype(int)
        there = tuple(slice(a, a + n) for a, n in zip(start, image.shape))
        assert np.abs(image.get_fdata() / 255 - template.get_fdata()[there]).max() < 0.5 / 255 + 1e-6
        assert (label.get_fdata()[grey.get_fdata()[there] > 0.5] == 1).all()
        assert np.array_equal(image.affine, label.affine)
        front[name.split("_")[0]] += [image.affine[1, 3], image.affine[1, 3] + image.shape[1] - 1]
    assert (max(front["training"]), min(front["validation"])) == (21, 26)  # mm, as the demo says


def test_a_short_demo_leaves_what_it_promises(tmp_path: pathlib.Path) -> None:
    printed = demo("--out", str(tmp_path), "--seconds", "0.5", "--device", "cpu", "--workers", "1")
    for word in ("mirror-symmetric", "patches per second", "first batch after", "waited", "most volumes resident"):
        assert word in printed
    assert "Warning" not in printed and "warn" not in printed
    assert 0 <= last_number(printed, "label 1") <= 1 and 0 <= last_number(printed, "label 2") <= 1
    assert (tmp_path / "augmented.png").stat().st_size > 10_000
    volumes = {path.name: nibabel.load(path) for path in (tmp_path / "volumes").iterdir()}
    plain, moved = sorted((tmp_path / "plain").iterdir()), sorted((tmp_path / "augmented").iterdir())
    assert [path.name for path in plain] == [path.name for path in moved] and len(plain) == 12
    for path in plain:
        patch, volume = nibabel.load(path), volumes[path.name.replace("_e000_k000", "")]
        start = np.rint(np.linalg.solve(volume.affine, patch.affine)[:3, 3]).astype(int)
        there = tuple(slice(a, a + n) for a, n in zip(start, patch.shape))
        assert np.array_equal(patch.get_fdata(), volume.get_fdata()[there])
    assert any(
        not np.array_equal(nibabel.load(a).get_fdata(), nibabel.load(b).get_fdata()) for a, b in zip(plain, moved)
    )


def test_it_trains_on_a_folder_with_any_labels_and_volumes_smaller_than_a_patch(tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(0)
    for number, shape in enumerate([(12, 20, 9), (16, 16, 16), (11, 10, 30), (18, 9, 14)]):
        label = random.choice([0, 5, 300], shape).astype(np.int16)
        image = label[..., None] * [1, -2] + random.normal(size=(*shape, 2))
        for key, voxels in (("image", image.astype(np.float32)), ("label", label)):
            nibabel.Nifti1Image(voxels, np.diag([1, 1, 3, 1])).to_filename(tmp_path / f"c{number}_{key}.nii.gz")
    out = tmp_path / "out"
    settings = DemoSettings(tmp_path, out, epochs=1, patch_size=16, patches_per_volume=4, device="cpu", workers=0)
    said: list[str] = []
    report = run(settings, said.append, lambda done, text: None)
    assert report.dice_after.keys() == report.dice_before.keys() == {5, 300}
    assert (report.steps, report.stats.patches) == (3, 12)
    assert "3 volumes for training, 1 for validation" in said[0]
    assert nibabel.load(next(file for file in report.files if "label" in file.name)).get_data_dtype() == np.int16


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (4, 1), (20, 5)])
def test_the_split_is_drawn_by_the_seed_alone_and_loses_no_volume(count: int, held_out: int) -> None:
    ids = [f"case{n}" for n in range(count)]
    training, validation = split(ids, seed=3)
    assert sorted(training + validation) == sorted(ids) and len(validation) == held_out
    assert split(ids, seed=3) == (training, validation)
    assert len({tuple(split(ids, seed)[1]) for seed in range(20)}) > 1


def test_one_volume_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="two or more"):
        split(["only"], 0)


def test_dice_is_that_of_all_voxels_together() -> None:
    """Against the formula 2 |A and B| / (|A| + |B|), with a network that says what the image shows."""
    random = np.random.default_rng(5)
    shapes = [(9, 10, 11), (8, 8, 12)]
    truth = [random.integers(0, 3, shape) * 4 for shape in shapes]
    shown = [
        np.where(random.random(shape) < 0.3, random.integers(0, 3, shape) * 4, t) for shape, t in zip(shapes, truth)
    ]
    volumes = [gq.Volume(n, {"image": s, "label": t}) for n, (s, t) in enumerate(zip(shown, truth))]
    prepare = ForNetwork(torch.tensor([0, 4, 8]), {v.id: torch.tensor([[0.0], [8.0]]) for v in volumes})

    class Reads(torch.nn.Module):
        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return -torch.cat([(image - value).abs() for value in (-1, 0, 1)], dim=1)

    for label, score in dice(Reads(), volumes, prepare, 8, torch.device("cpu")).items():  # type: ignore[arg-type]
        pairs = [(s == label, t == label) for s, t in zip(shown, truth)]
        wanted = 2 * sum((a & b).sum() for a, b in pairs) / sum(a.sum() + b.sum() for a, b in pairs)
        assert score == pytest.approx(wanted, abs=1e-6)


def test_the_network_comes_from_the_seed_and_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (make_network(1, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    weights = [next(network.parameters()) for network in (first, again, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@pytest.mark.soak
@pytest.mark.timeout(300)  # the demo promises to end in less
def test_the_whole_demo_reaches_a_mean_dice_of_080_in_under_five_minutes(tmp_path: pathlib.Path) -> None:
    assert last_number(demo("--out", str(tmp_path), "--device", "cpu"), "mean") >= 0.80


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_demo_learns_the_hippocampus(tmp_path: pathlib.Path, shared_data: pathlib.Path) -> None:
    printed = demo("--data", str(shared_data / "real" / "hippocampus"), "--out", str(tmp_path), "--device", "cpu")
    assert last_number(printed, "mean") >= 0.70
