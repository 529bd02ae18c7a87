"""Where patches start: shares, borders, extreme draws, and drawn voxels followed through augmentation."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.interpolate import BSpline
from scipy.optimize import fsolve
from scipy.spatial.transform import Rotation

import gpuqueue as gq
from gpuqueue.patches.samplers.grid import axis_starts, grid_starts, overlap_voxels
from gpuqueue.patches.samplers.positions import find_voxels, index_classes
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid

BACKENDS = ["torch", "numba"]
EXTREMES = (0.0, 1 - 2.0**-24, 1 - 2.0**-53)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def ramp(shape):
    i, j, k = np.meshgrid(*[np.arange(n) for n in shape], indexing="ij")
    return (10000 * i + 100 * j + k).astype(np.float32)


def drawn(volumes, size, count, batch_size=50, **options):
    """Batches of one epoch."""
    volumes = volumes if isinstance(volumes, list) else [volumes]
    with gq.GPUQueue(
        volumes, size, count, batch_size=batch_size, device="cpu", return_parameters=True, **options
    ) as queue:
        return list(queue), queue.stats()


def close_to(share, wanted, number):
    """Within 4 standard errors."""
    return abs(share - wanted) <= 4 * np.sqrt(wanted * (1 - wanted) / number)


def test_a_class_at_the_border_gets_its_share(backend):
    """H02 with its values; every voxel is legal, so neither the drawn voxels nor the patches' centres are skewed."""
    label = np.zeros((5, 5, 1), np.uint8)
    label[2, 2, 0] = 1
    sampler = gq.LabelSampler("label", weights={0: 1, 1: 1})
    batches, stats = drawn(gq.Volume("a", {"label": label}), (2, 2, 1), 10000, 500, sampler=sampler, backend=backend)
    labels = np.array([p["drawn_label"] for batch in batches for p in batch["parameters"]])
    voxels = np.array([p["drawn_voxel"] for batch in batches for p in batch["parameters"]])
    assert abs((labels == 1).mean() - 0.5) <= 0.02
    assert (label[tuple(voxels.T)] == labels).all()
    centres = torch.cat([batch["label"][:, 0, 1, 1, 0] for batch in batches])
    assert abs((centres == 1).float().mean() - 0.5) <= 0.02
    zeros = voxels[labels == 0]
    counts = np.bincount(5 * zeros[:, 0] + zeros[:, 1], minlength=25)
    assert counts[12] == 0 and (np.abs(np.delete(counts, 12) / len(zeros) - 1 / 24) < 0.012).all()
    assert stats.label_shares[1] == pytest.approx((labels == 1).mean())


class Fixed(Random):
    """A uniform source that always returns one number."""

    def __init__(self, unit):
        super().__init__(0)
        self.unit, self.index = unit, 0

    def uniform(self, shape=(), low=0.0, high=1.0):
        return np.full(shape, low + (high - low) * self.unit)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, np.float16])
@pytest.mark.parametrize("mode", ["centre", "inside"])
def test_no_draw_lands_on_weight_zero(dtype, mode):
    """H03 with its values: for 0 the first voxel of positive weight, for the largest numbers below 1 the last."""
    weights = np.zeros((6, 6, 6), dtype)
    weights[4, 4, 4], weights[5, 1, 2] = 3, 1
    volume = gq.Volume("a", {"map": weights})
    sampler = gq.WeightedSampler("map", mode=mode)
    for mixed in (sampler, gq.MixedSampler([(sampler, 1), (gq.WeightedSampler("map", mode=mode), 2)])):
        prepared = mixed.prepare(volume)
        found = [mixed.draw(prepared, volume.grid(), (3, 3, 3), Fixed(unit)) for unit in EXTREMES]
        assert [voxel.voxel.tolist() for voxel in found] == [[4, 4, 4], [5, 1, 2], [5, 1, 2]]
        again = [voxel.again(Fixed(1 - 2.0**-53)).voxel.tolist() for voxel in found]
        assert again == [[5, 1, 2]] * 3


def test_no_draw_lands_on_a_class_of_weight_zero():
    """H03 for classes, in both forms of the index."""
    rng = np.random.default_rng(0)
    for label in (np.pad(np.full((2, 3, 4), 7), 9), rng.integers(0, 9, (20, 21, 22))):
        volume = gq.Volume("a", {"label": label.astype(np.uint8)})
        sampler = gq.LabelSampler("label", weights={0: 0, 7: 2, 3: 0})
        prepared = sampler.prepare(volume)
        for unit in EXTREMES:
            voxel = sampler.draw(prepared, volume.grid(), (3, 3, 3), Fixed(unit)).voxel
            assert label[tuple(voxel)] == 7


EMPTY = {
    "label": (gq.LabelSampler, {"weights": {1: 1, 2: 1}}),
    "any label": (gq.LabelSampler, {}),
    "foreground share": (gq.LabelSampler, {"foreground": 0.33}),
    "map": (gq.WeightedSampler, {}),
}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_map_is_named_and_stops_training_only_when_told_to(name, workers):
    """H04: 20 of 20 patches and one warning in two epochs, or an error; both say case_017."""
    kind, options = EMPTY[name]
    arrays = {"label": np.zeros((8, 8, 8), np.uint8), "map": np.zeros((8, 8, 8), np.float32)}
    loader = gq.volume_loader([gq.Volume("case_017", arrays)], num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with gq.GPUQueue(loader, 4, 20, device="cpu", sampler=kind(**options)) as queue:
            for _ in range(2):
                assert sum(len(batch["volume"]) for batch in queue) == 20
            missing = queue.stats().missing_labels
    told = [str(w.message) for w in caught if "case_017" in str(w.message)]
    assert len(told) == 1 and "on_empty" in told[0]
    shares = {"label": {1: 20, 2: 20}, "any label": {None: 40}, "foreground share": {None: 40 * 0.33}, "map": {}}[name]
    assert missing == pytest.approx(shares)
    queue = gq.GPUQueue(loader, 4, 20, device="cpu", sampler=kind(**options, on_empty="raise"))
    with queue, pytest.raises(gq.StageError, match="case_017"):
        list(queue)


def test_a_label_one_voxel_smaller_than_its_image_is_refused():
    """H05"""
    arrays = {"image": np.zeros((40, 40, 40)), "label": np.zeros((40, 39, 40), np.uint8)}
    with pytest.raises(gq.VolumeError, match=r"case3.*\(40, 40, 40\).*\(40, 39, 40\)"):
        gq.Volume("case3", arrays)
    volume = gq.Volume("case3", arrays, same_grid=False)
    batches, _ = drawn(volume, 16, 60, sampler=gq.LabelSampler("label", weights={0: 1}))
    assert all(batch["label"].shape[2:] == batch["image"].shape[2:] == (16, 16, 16) for batch in batches)


@pytest.mark.parametrize("mode", ["centre", "inside"])
def test_patches_stay_inside_and_hold_their_drawn_voxel(mode, backend):
    """H06 with its values: voxels in two corners, pad -7777."""
    label = np.zeros((40, 40, 40), np.uint8)
    label[39, 39, 39] = label[0, 0, 0] = 1
    volume = gq.Volume("a", {"image": ramp((40, 40, 40)), "label": label})
    batches, stats = drawn(
        volume, 16, 200, sampler=gq.LabelSampler(weights={1: 1}, mode=mode), pad={"image": -7777}, backend=backend
    )
    starts = torch.cat([batch["start"] for batch in batches]).numpy()
    voxels = np.array([p["drawn_voxel"] for batch in batches for p in batch["parameters"]])
    assert {tuple(start) for start in starts} == {(0, 0, 0), (24, 24, 24)}  # the only legal ones that hold a corner
    assert ((starts <= voxels) & (voxels < starts + 16)).all()
    assert min(batch["image"].min() for batch in batches) >= 0
    assert stats.moved_starts == (200 if mode == "centre" else 0)


def test_inside_puts_the_voxel_anywhere_in_the_patch():
    label = np.zeros((40, 20, 6), np.uint8)
    label[20, 2, 3] = 1
    batches, _ = drawn(gq.Volume("a", {"label": label}), (8, 8, 8), 4000, 400, sampler=gq.LabelSampler(mode="inside"))
    starts = torch.cat([batch["start"] for batch in batches]).numpy()
    assert np.bincount(starts[:, 0]).nonzero()[0].tolist() == list(range(13, 21))
    assert (np.abs(np.bincount(starts[:, 0])[13:] / 4000 - 1 / 8) < 0.021).all()
    assert np.bincount(starts[:, 1]).nonzero()[0].tolist() == [0, 1, 2]
    assert (starts[:, 2] == -1).all()


def test_weighted_draws_reach_every_voxel_of_a_large_map():
    """H08 with its values: 257 cubed voxels, weight only on the plane i = 256."""
    weights = np.zeros((257, 257, 257), np.float32)
    weights[256] = 1
    batches, _ = drawn(gq.Volume("a", {"map": weights}), 1, 1000, 500, sampler=gq.WeightedSampler())
    starts = torch.cat([batch["start"] for batch in batches]).double()
    assert (starts[:, 0] == 256).all() and all(b["map"].min() == 1 for b in batches)
    for axis in (1, 2):
        assert abs(starts[:, axis].mean() - 128) <= 10 and starts[:, axis].min() < 20 and starts[:, axis].max() > 236


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_shares_of_a_large_two_level_map_are_exact(dtype):
    """H08: 256 cubed; a quarter of the voxels has weight 5, the others 1; float32 sums would lose the rest."""
    weights = np.ones((256, 256, 256), dtype)
    weights[:, :, ::4] = 5
    volume = gq.Volume("a", {"map": weights})
    sampler = gq.WeightedSampler()
    prepared = sampler.prepare(volume)
    voxels = np.array([sampler.draw(prepared, volume.grid(), (1, 1, 1), Random(n)).voxel for n in range(8000)])
    assert close_to((voxels[:, 2] % 4 == 0).mean(), 5 / 8, 8000)
    for axis in range(3):
        assert (np.abs(np.bincount(voxels[:, axis] // 64) / 8000 - 0.25) < 0.02).all()


def test_weights_that_are_no_weights_are_refused():
    for bad in (-1.0, np.nan, np.inf):
        weights = np.ones((3, 3, 3))
        weights[1, 1, 1] = bad
        with pytest.raises(gq.VolumeError, match=r"case5.*finite and 0 or more"):
            gq.WeightedSampler().prepare(gq.Volume("case5", {"map": weights}))
    with pytest.raises(gq.VolumeError, match=r"case5.*'label'.*LabelSampler.*'map'"):
        gq.LabelSampler().prepare(gq.Volume("case5", {"map": np.ones((3, 3, 3))}))
    for options in ({"weights": {1: -1}}, {"weights": {1: 0}}, {"weights": {0.5: 1}}, {"foreground": 0}, {"mode": "x"},
                    {"weights": {0: 1, 1: 1}, "foreground": 0.3}, {"on_empty": "skip"}):  # fmt: skip
        with pytest.raises(ValueError):
            gq.LabelSampler(**options)


def test_whole_slices_can_be_drawn_by_class():
    """H09, first half, with its values. A rule that keeps foreground out of background patches is documented absent."""
    label = np.zeros((64, 64, 20), np.uint8)
    label[:, :, 4:6] = 1
    batches, _ = drawn(
        gq.Volume("a", {"label": label}), (64, 64, 1), 2000, 100, sampler=gq.LabelSampler(weights={0: 1, 1: 1})
    )
    starts = torch.cat([batch["start"] for batch in batches])
    assert abs(torch.isin(starts[:, 2], torch.tensor([4, 5])).double().mean() - 0.5) <= 0.045
    assert (starts[:, :2] == 0).all()
    assert "no rule that" in " ".join(gq.LabelSampler.__doc__.split())


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_class_shares_hold_for_any_batch_size_and_shortfalls_are_reported(batch_size):
    rng = np.random.default_rng(0)
    whole = np.zeros((12, 13, 14), np.int16)
    whole[rng.random(whole.shape) < 0.01] = -3
    whole[0, 0, 0] = 300
    lacking = np.where(whole == 300, 0, whole)
    volumes = [gq.Volume("whole", {"label": whole}), gq.Volume("lacking", {"label": lacking})]
    sampler = gq.LabelSampler(weights={-3: 1, 0: 1, 300: 2})
    batches, stats = drawn(volumes, 4, 800, batch_size, sampler=sampler)
    seen = {"whole": Counter(), "lacking": Counter()}
    for batch in batches:
        for volume, parameters in zip(batch["volume"], batch["parameters"]):
            seen[volume][parameters["drawn_label"]] += 1
    for label, share in {-3: 0.25, 0: 0.25, 300: 0.5}.items():
        assert close_to(seen["whole"][label] / 800, share, 800)
    for label, share in {-3: 0.5, 0: 0.5}.items():
        assert close_to(seen["lacking"][label] / 800, share, 800)
    assert stats.missing_labels == {300: 400}
    assert stats.drawn_labels == dict(seen["whole"] + seen["lacking"])


@pytest.mark.parametrize("batch_size", [2, 3])
def test_a_foreground_share_holds_for_any_batch_size(batch_size):
    """nnU-Net's rule: a class drawn alike among those present, then a voxel; other patches start anywhere."""
    label = np.zeros((20, 20, 20), np.uint8)
    label[3, 4, 5], label[10:, 10:, 10:] = 1, 2
    batches, _ = drawn(gq.Volume("a", {"label": label}), 4, 3000, batch_size, sampler=gq.LabelSampler(foreground=0.33))
    labels = Counter(p["drawn_label"] for batch in batches for p in batch["parameters"])
    assert close_to(labels[1] / 3000, 0.165, 3000) and close_to(labels[2] / 3000, 0.165, 3000)
    free = [
        start.tolist() for b in batches for start, p in zip(b["start"], b["parameters"]) if p["drawn_label"] is None
    ]
    assert {start[0] for start in free} == set(range(17))


@given(arrays(np.int16, st.tuples(*[st.integers(1, 9)] * 3), elements=st.sampled_from([-2, 0, 1, 900])), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_voxel_of_a_class_has_one_rank(label, listed):
    """Both forms of the index, against a plain look at the volume, whatever the order in memory."""
    wanted = [-2, 0, 5] if listed else None
    index = index_classes(label, wanted)
    present = [c for c in np.unique(label) if (c in wanted if listed else c != 0)]
    assert index["classes"].tolist() == present
    assert index["counts"].tolist() == [(label == c).sum() for c in present]
    other = index_classes(np.asfortranarray(label), wanted)
    for place, number in enumerate(present):
        ranks = np.arange(index["counts"][place])
        voxels = find_voxels(index, np.full(len(ranks), place), ranks)
        assert sorted(map(tuple, voxels)) == sorted(map(tuple, np.argwhere(label == number)))
        assert (voxels == find_voxels(other, np.full(len(ranks), place), ranks)).all()


@pytest.mark.parametrize("classes", [2, 40, 250])
@pytest.mark.parametrize("kind", ["noise", "blocks"])
def test_the_index_keeps_at_most_one_byte_a_voxel(kind, classes):
    rng = np.random.default_rng(0)
    label = rng.integers(0, classes, (60, 70, 80) if kind == "noise" else (6, 7, 8)).astype(np.uint8)
    if kind == "blocks":
        label = label.repeat(15, 0).repeat(10, 1).repeat(10, 2)
    index = index_classes(label, None)
    noise_of_many = kind == "noise" and classes == 250  # 8 binary digits a voxel is what such noise holds
    assert sum(array.nbytes for array in index.values()) <= label.size * (1.13 if noise_of_many else 1)
    which = rng.integers(0, len(index["classes"]), 500)
    voxels = find_voxels(index, which, rng.integers(0, index["counts"][which]))
    assert (label[tuple(voxels.T)] == index["classes"][which]).all()


def test_draws_are_the_same_for_any_layout_workers_and_batch_size():
    """Promise 4 for samplers with an index."""
    rng = np.random.default_rng(0)
    label = (rng.random((20, 30, 25)) < 0.3).astype(np.uint8)
    weights = rng.random((20, 30, 25)).astype(np.float32)
    sampler = gq.MixedSampler([(gq.LabelSampler(weights={0: 1, 1: 3}), 2), (gq.WeightedSampler(mode="inside"), 1)])

    def starts(order, workers, batch_size):
        volumes = [
            gq.Volume(n, {"label": np.array(np.roll(label, n, 0), order=order), "map": np.array(weights, order=order)})
            for n in range(3)
        ]
        loader = gq.volume_loader(volumes, num_workers=workers)
        augment = [gq.RandomAffine(), gq.RandomElasticDeformation()]
        with gq.GPUQueue(loader, 8, 12, batch_size=batch_size, device="cpu", sampler=sampler, augment=augment) as queue:
            return {
                (v, k): tuple(start)
                for b in queue
                for v, k, start in zip(b["volume"], b["index"].tolist(), b["start"].tolist())
            }

    assert starts("C", 0, 4) == starts("F", 2, 5) == starts("C", 1, 1)


# Under augmentation --------------------------------------------------------------------------------------------------


def forward_point(reference, forward, control_points, world):
    """o with A_ref o + u(o) = F world, by SciPy's solver and splines."""
    target = (forward @ [*world, 1])[:3]
    shape, affine = reference.shape, reference.affine

    def displaced(o):
        if control_points is None:
            return affine[:3, :3] @ o + affine[:3, 3] - target
        u = control_points
        for axis, (n, g) in enumerate(zip(shape, control_points.shape[1:])):
            t = np.clip((o[axis] + 0.5) * (g - 3) / n, 0, g - 3 - 1e-12)
            weights = BSpline.design_matrix([t], np.arange(g + 4) - 3.0, 3).toarray()[0]
            u = np.tensordot(weights, u, (0, 1))  # the next axis moves up to be axis 1 again
        return affine[:3, :3] @ o + affine[:3, 3] + u - target

    start = np.linalg.solve(affine, [*target, 1])[:3]
    point, _, settled, _ = fsolve(displaced, start, full_output=True, xtol=1e-12)
    assert settled == 1
    return point


REAL = {
    "mni152": ("mni152/image.nii.gz", "mni152/label.nii.gz", (16, 16, 16)),
    "hippocampus": ("hippocampus/hippocampus_001_image.nii.gz", "hippocampus/hippocampus_001_label.nii.gz", (9, 8, 9)),
    "ct_abdomen_sm": ("ct_abdomen_sm/image.nii.gz", "ct_abdomen_sm/label.nii.gz", (12, 12, 5)),
    "mr_spine_t2s": ("mr_spine_t2s/image.nii.gz", "mr_spine_t2s/label.nii.gz", (16, 16, 3)),
}


@pytest.mark.parametrize("name", REAL)
def test_a_drawn_voxel_lands_in_the_patchs_centre(name, backend, shared_data):
    """10 degrees, 10 % and the default elastic on real volumes: in draws that were not moved, the drawn voxel's forward
    point rounds to the centre in all, and its class lies within one voxel of it in at least 99.5 %."""
    image, label, size = REAL[name]
    dataset = gq.VolumeDataset([{"id": name, **{"image": str(shared_data / "real" / image)},
                                 "label": str(shared_data / "real" / label)}])  # fmt: skip
    volume = dataset[0]
    transforms = [gq.RandomAffine(scales=0.1, degrees=10), gq.RandomElasticDeformation()]
    batches, stats = drawn(
        volume, size, 400, 20, sampler=gq.LabelSampler(), augment=transforms, backend=backend, seed=1
    )
    affine, centre = volume.affines["label"], np.array(size) // 2
    kept = near = 0
    for batch in batches:
        for row, parameters in enumerate(batch["parameters"]):
            voxel, number = parameters["drawn_voxel"], parameters["drawn_label"]
            assert volume["label"][0][tuple(voxel)] == number
            world = affine[:3, :3] @ voxel + affine[:3, 3]
            point = forward_point(volume.grid(), parameters["affine"], parameters["control_points"], world)
            start = batch["start"][row].numpy()
            if (np.abs(point - start - centre) > 0.5 + 1e-5).any():  # must be one that could not be centred
                wanted = np.floor(point + 0.5) - centre
                assert ((wanted < 0) | (wanted > np.array(volume.grid().shape) - size)).any()
                continue
            kept += 1
            around = tuple(slice(max(c - 1, 0), c + 2) for c in centre)
            near += number in batch["label"][row, 0][around]
    assert kept + stats.moved_starts == 400 and kept > 80
    assert near / kept >= 0.995


def test_class_shares_survive_augmentation():
    """A voxel moved out of the volume is replaced by one of its own class; both are counted."""
    label = np.zeros((24, 24, 24), np.uint8)
    label[0], label[-1] = 1, 1
    sampler = gq.LabelSampler(weights={0: 1, 1: 1})
    batches, stats = drawn(
        gq.Volume("a", {"label": label}), 4, 4000, 400, sampler=sampler, augment=[gq.RandomAffine(0.1, 20)]
    )
    assert close_to(stats.label_shares[1], 0.5, 4000)
    assert stats.redraws > 500 and 0 < stats.outside < 400
    assert sum(len(batch["volume"]) for batch in batches) == 4000


@pytest.mark.parametrize("grid", ["own grid", "orientation and spacing"])
@pytest.mark.parametrize("same", [True, False])
def test_a_drawn_voxel_is_found_through_any_grid(grid, same, backend):
    """A label map of its own, coarser grid; a reference grid of another orientation and spacing; a flip."""
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", (8, -12, 20), degrees=True).as_matrix() * (1.1, 0.9, 1.6)
    affine[:3, 3] = 40, -20, 7
    shape, factor = (30, 34, 22), 1 if same else 2
    coarse = affine.copy()
    coarse[:3, :3] *= factor
    coarse[:3, 3] += affine[:3, :3] @ np.full(3, (factor - 1) / 2)
    label = np.random.default_rng(0).integers(1, 200, [n // factor for n in shape]).astype(np.uint8)
    volume = gq.Volume(
        "a", {"image": np.zeros(shape), "label": label}, {"image": affine, "label": coarse}, same_grid=same
    )
    options = {} if grid == "own grid" else {"orientation": "LSA", "spacing": (0.5, 0.5, 0.4)}
    batches, stats = drawn(
        volume, 5, 200, 20, sampler=gq.LabelSampler(), augment=[gq.RandomFlip((0, 1, 2))], backend=backend, **options
    )
    hits = [
        int(batch["label"][row, 0, 2, 2, 2]) == p["drawn_label"]
        for batch in batches
        for row, p in enumerate(batch["parameters"])
    ]
    assert sum(hits) >= 200 - stats.moved_starts and stats.moved_starts < 140


def test_a_map_follows_the_spatial_transforms_with_pad_zero(backend):
    """Like an image that is padded with 0; stages see it, and only those that name it change it."""
    values = np.random.default_rng(0).random((20, 22, 24)).astype(np.float32)
    volume = gq.Volume("a", {"image": values, "map": values})
    augment = [gq.RandomAffine(0.2, 20, 4), gq.RandomElasticDeformation()]
    batches, _ = drawn(volume, 20, 6, augment=augment, pad={"image": 0}, backend=backend)
    assert torch.equal(batches[0]["image"], batches[0]["map"]) and batches[0]["map"].dtype == torch.float32


class OfMyOwn:
    """Draws one voxel of the image, without `again`."""

    def prepare(self, volume):
        return {}

    def draw(self, prepared, grid, patch_size, random):
        return gq.DrawnVoxel("image", np.floor(random.uniform(3) * grid.shape).astype(int))


def test_a_sampler_of_ones_own_may_return_a_voxel_or_a_start(backend):
    volume = gq.Volume("a", {"image": ramp((20, 20, 20))})
    batches, stats = drawn(volume, 5, 200, sampler=OfMyOwn(), augment=[gq.RandomFlip((0, 1, 2))], backend=backend)
    exact = 0
    for batch in batches:
        for row, parameters in enumerate(batch["parameters"]):
            exact += int(batch["image"][row, 0, 2, 2, 2]) == int(parameters["drawn_voxel"] @ (10000, 100, 1))
            assert parameters["drawn_label"] is None
    assert exact == 200 - stats.moved_starts > 60
    volume = gq.Volume("a", {"image": ramp((20, 20, 20))})
    _, stats = drawn(volume, 5, 200, sampler=OfMyOwn(), augment=[gq.RandomAffine(0.1, 30)])
    assert stats.redraws > 20 and stats.drawn_labels == {}


# Grids ---------------------------------------------------------------------------------------------------------------


def test_windows_of_a_grid_leave_no_gap():
    """H70 and H71 with their values, and for all N <= 60, p <= N, 1 <= stride <= p."""
    assert axis_starts(20, 8, 0) == [0, 8, 12] and axis_starts(34, 9, 3) == [0, 6, 12, 18, 24, 25]
    starts = grid_starts((45, 34, 45), (9, 9, 1), 0.25)
    assert sorted({int(k) for k in starts[:, 2]}) == list(range(45))
    assert overlap_voxels(0.25, (9, 96, 1)) == (3, 24, 0)
    for n in range(1, 61):
        for p in range(1, n + 1):
            for stride in range(1, p + 1):
                found = np.array(axis_starts(n, p, p - stride))
                gaps = np.diff(found)
                assert found[0] == 0 and found[-1] == n - p and (gaps > 0).all() and (gaps <= stride).all()
    for bad in (-1, 8, 1.0, -0.1, (1, 2)):
        with pytest.raises(ValueError, match="overlap"):
            grid_starts((20, 20, 20), (8, 8, 8), bad)


def test_a_grid_gives_its_own_number_of_patches_and_covers_every_volume():
    volumes = [gq.Volume(n, {"image": ramp(shape)}) for n, shape in enumerate([(20, 9, 8), (8, 8, 8), (5, 30, 8)])]
    with gq.GPUQueue(volumes, 8, None, batch_size=3, device="cpu", sampler=gq.GridSampler(2)) as queue:
        for _ in range(2):
            seen = {volume.id: torch.zeros(volume.grid().shape) for volume in volumes}
            numbers = Counter()
            for batch in queue:
                for volume, (i, j, k) in zip(batch["volume"], batch["start"].clamp(min=0).tolist()):
                    seen[volume][i : i + 8, j : j + 8, k : k + 8] += 1
                    numbers[volume] += 1
            assert numbers == {"0": 6, "1": 1, "2": 5} and all((count > 0).all() for count in seen.values())
        at_hand = [gq.Volume("x", {"image": ramp((12, 8, 8))})]
        assert [len(batch["volume"]) for batch in queue.patches(at_hand)] == [2]
    mixed = gq.MixedSampler([(gq.GridSampler(2), "once"), (gq.UniformSampler(), 1)])
    batches, _ = drawn(volumes[0], 8, 10, 10, sampler=mixed)
    order = batches[0]["index"].argsort()
    assert batches[0]["start"][order][:6].tolist() == grid_starts((20, 9, 8), (8, 8, 8), 2).tolist()
    with pytest.raises(ValueError, match="UniformSampler has no number of patches"):
        gq.GPUQueue(volumes, 8, None, device="cpu")
    with pytest.raises(ValueError, match="DataLoader of your own"):
        gq.GPUQueue(torch.utils.data.DataLoader(volumes, collate_fn=list), 8, None, sampler=gq.GridSampler())


def test_mixed_samplers_keep_their_shares_and_what_they_miss():
    label = np.zeros((16, 16, 16), np.uint8)
    label[5, 5, 5] = 1
    parts = [(gq.LabelSampler(weights={1: 1, 2: 1}), 1), (gq.UniformSampler(), 3)]
    batches, stats = drawn(gq.Volume("a", {"label": label}), 4, 2000, sampler=gq.MixedSampler(parts))
    labels = Counter(p["drawn_label"] for batch in batches for p in batch["parameters"])
    assert close_to(labels[1] / 2000, 0.25, 2000) and labels[1] + labels[None] == 2000
    assert stats.missing_labels == pytest.approx({2: 250})
    for bad in ([], [(gq.UniformSampler(), 0)], [(gq.UniformSampler(), "twice")], [(gq.GridSampler(), "once")]):
        with pytest.raises(ValueError, match="MixedSampler"):
            gq.MixedSampler(bad)


def test_whole_volumes_are_delivered_without_a_patch_size(backend):
    volumes = [gq.Volume(n, {"image": ramp(shape)}) for n, shape in enumerate([(7, 8, 9), (10, 5, 6)])]
    batches, _ = drawn(volumes, None, 2, 1, backend=backend, augment=[gq.RandomFlip(0, 1.0)])
    assert len(batches) == 4
    for batch in batches:
        assert torch.equal(batch["image"][0].flip(1), volumes[int(batch["volume"][0])]["image"])
    with gq.GPUQueue(volumes, None, 1, batch_size=2, device="cpu") as queue, pytest.raises(gq.StageError, match="=1"):
        list(queue)


def test_a_grid_of_one_voxel_axes_and_a_uniform_draw_have_no_voxel():
    grid = Grid((10, 8, 1), np.eye(4))
    assert gq.GridSampler(0).count(grid, (5, 4, 1)) == 4
    batches, _ = drawn(gq.Volume("a", {"image": ramp((10, 8, 1))}), (5, 4, 1), 3)
    assert all(p["drawn_voxel"] is None and p["drawn_label"] is None for p in batches[0]["parameters"])
