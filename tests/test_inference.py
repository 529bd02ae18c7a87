"""Windows put together again: identity models give back what went in, on any grid, for any windows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import slow
import torch
from scipy.spatial.transform import Rotation

import gpuqueue as gq
from gpuqueue.aggregator import MODES, axis_weights
from gpuqueue.patches.samplers.grid import grid_starts
from gpuqueue.volumes.grid import reoriented, respaced

BACKENDS = ["torch", "numba"]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def ramp(shape):
    i, j, k = np.meshgrid(*[np.arange(n) for n in shape], indexing="ij")
    return (10000 * i + 100 * j + k).astype(np.float32)


def identity(windows):
    return windows


def aggregate(values, size, overlap, mode, batch_size=7):
    """Windows of `values` (C, I, J, K) through an Aggregator alone."""
    aggregator = gq.Aggregator(values.shape[1:], overlap, mode)
    starts = grid_starts(values.shape[1:], size, overlap)
    for first in range(0, len(starts), batch_size):
        some = starts[first : first + batch_size]
        windows = [values[:, i : i + size[0], j : j + size[1], k : k + size[2]] for i, j, k in some]
        aggregator.add_batch(torch.stack(windows), np.concatenate([some, some + size], axis=1))
    return aggregator.result()


@pytest.mark.parametrize("overlap", [0, 2, 4, 5])
@pytest.mark.parametrize("mode", MODES)
def test_every_voxel_is_written_in_float32(mode, overlap, backend):
    """H68 with its values."""
    values = torch.rand(20, 21, 22, generator=torch.Generator().manual_seed(0)) * 2 - 1
    volume = gq.Volume("a", {"image": values})
    prediction = gq.predict(identity, volume, 8, overlap=overlap, mode=mode, device="cpu", backend=backend)
    assert prediction.values.dtype == torch.float32 and prediction.values.shape == (1, 20, 21, 22)
    assert (prediction.values[0] - values).abs().max() <= 1e-5


@pytest.mark.parametrize("mode", ["crop", "average"])
def test_any_size_and_overlap_gives_back_the_input_exactly(mode):
    """H69: N from 8 to 40, patch from 4 to N, every overlap, and N = 320, patch 102, overlap 4."""
    sizes = [(n, p, o) for n in range(8, 41) for p in range(4, n + 1) for o in range(p)]
    assert len(sizes) > 9000
    for n, p, overlap in [*sizes, (320, 102, 4)]:
        values = torch.arange(1.0, n + 1).reshape(1, n, 1, 1)
        assert torch.equal(aggregate(values, (p, 1, 1), (overlap, 0, 0), mode, 40), values), (n, p, overlap)


COMBINATIONS = [(n, p, o) for n, p in [(8, 4), (9, 5), (13, 7), (17, 6), (23, 23)] for o in (0, 1, p // 2, p - 1)]


@pytest.mark.parametrize("mode", ["crop", "average"])
def test_predict_gives_back_the_input_exactly(mode, backend):
    """H69 on predict: 20 sizes, patches and overlaps, another one on each axis; also where the volume is smaller."""
    for n, p, overlap in COMBINATIONS:
        volume = gq.Volume("a", {"image": ramp((n, 9, 6))})
        overlaps = (overlap, 2, 0)
        prediction = gq.predict(
            identity, volume, (p, 5, 8), overlap=overlaps, batch_size=5, mode=mode, device="cpu", backend=backend
        )
        assert torch.equal(prediction.values, volume["image"]), (n, p, overlap)


def test_a_window_of_one_voxel_covers_every_slice():
    """H70 with its values."""
    seen = []

    def count(windows):
        seen.extend(windows)
        return torch.ones_like(windows)

    volume = gq.Volume("a", {"image": np.zeros((45, 34, 45), np.uint8)})
    prediction = gq.predict(count, volume, (9, 9, 1), overlap=0.25, batch_size=64, device="cpu")
    assert (prediction.values == 1).all()
    assert len(seen) == 45 * len(grid_starts((45, 34, 1), (9, 9, 1), 0.25))


def test_voxels_that_no_window_covers_are_an_error():
    """H71: also a gap in the middle, and windows that lie on no grid."""
    for places in ([(0, 0, 0)], [(0, 0, 0), (0, 0, 6)], [(0, 0, 0), (0, 0, 4), (2, 0, 3)]):
        for mode in MODES:
            aggregator = gq.Aggregator((4, 4, 10), 0, mode)
            starts = np.array(places)
            aggregator.add_batch(torch.ones(len(places), 1, 4, 4, 4), np.concatenate([starts, starts + 4], axis=1))
            with pytest.raises(ValueError, match="no window"):
                aggregator.result()
    with pytest.raises(ValueError, match="no window"):
        gq.Aggregator((4, 4, 4)).result()


@pytest.mark.parametrize("mode", MODES)
def test_the_number_of_channels_is_the_models(mode, backend):
    """H72: five channels c * x, and the largest one's number."""
    factors = torch.arange(5.0).reshape(5, 1, 1, 1)
    volume = gq.Volume("a", {"image": np.random.default_rng(0).random((12, 13, 14)) - 0.5})

    def model(windows):
        return windows * factors

    settings = {"overlap": 3, "mode": mode, "device": "cpu", "backend": backend}
    values = gq.predict(model, volume, 6, **settings).values
    assert values.shape == (5, 12, 13, 14) and (values - volume["image"] * factors).abs().max() <= 1e-5
    labels = gq.predict(model, volume, 6, output="label", **settings)
    assert labels.values.dtype == torch.int64
    assert torch.equal(labels.values, torch.where(volume["image"] > 0, 4, 0))
    assert labels.volume().roles == {"label": "label"} and labels.volume("label_seg")["label_seg"].max() == 4


@pytest.mark.parametrize("mode", MODES)
def test_weights_are_symmetric_and_nowhere_zero(mode):
    for size in (1, 2, 3, 8, 97, 512):
        weights = axis_weights(mode, size)
        assert weights.shape == (size,) and (weights > 0).all() and (weights == weights[::-1]).all()
        assert np.prod([weights[0]] * 3, dtype=np.float32) > 0 and weights[size // 2] == weights.max()


@pytest.mark.parametrize("mode", MODES)
def test_windows_anywhere_are_weighed_as_one_by_one(mode):
    """Locations on no grid, one of them twice, some beyond the border: against plain NumPy."""
    rng = np.random.default_rng(0)
    shape, size = (9, 8, 7), (5, 4, 4)
    starts = np.concatenate([grid_starts(shape, size, 1), rng.integers(-2, 6, (20, 3)), [[1, 1, 1], [1, 1, 1]]])
    windows = rng.random((len(starts), 2, *size))
    total, weight = np.zeros((2, *shape)), np.zeros(shape)
    i, j, k = (axis_weights(mode, n) for n in size)
    product = i[:, None, None] * j[:, None] * k
    for window, start in zip(windows, starts):
        for place in np.ndindex(*size):
            voxel = tuple(start + place)
            shared = [(1 // 2, 1 - 1 // 2)] * 3
            cut = mode == "crop" and any(
                (s > 0 and p < low) or (s + n < limit and p >= n - high)
                for s, p, n, limit, (low, high) in zip(start, place, size, shape, shared)
            )
            if min(voxel) < 0 or any(v >= n for v, n in zip(voxel, shape)) or cut:
                continue
            if mode == "crop":
                total[(slice(None), *voxel)], weight[voxel] = window[(slice(None), *place)], 1
            else:
                total[(slice(None), *voxel)] += product[place] * window[(slice(None), *place)]
                weight[voxel] += product[place]
    aggregator = gq.Aggregator(shape, 1, mode)
    locations = np.concatenate([starts, starts + size], axis=1)
    for first in range(0, len(starts), 4):
        aggregator.add_batch(
            torch.from_numpy(windows[first : first + 4]), torch.from_numpy(locations[first : first + 4])
        )
    result = aggregator.result()
    assert result.dtype == torch.float64 and np.allclose(result.numpy(), total / weight)


def test_outputs_that_do_not_fit_are_refused():
    volume = gq.Volume("a", {"image": np.zeros((8, 8, 8))})
    wrong = {
        "must keep the shape": lambda x: x[..., 1:],
        "takes its main output": lambda x: (x, x),
        r"got \(2, 4, 4, 4\)": lambda x: x[:, 0],
    }
    for message, model in wrong.items():
        with pytest.raises(ValueError, match=message):
            gq.predict(model, volume, 4, batch_size=2, overlap=0, device="cpu")
    for settings in (
        {"mode": "mean"},
        {"overlap": 4},
        {"margin": -1},
        {"output": "classes"},
        {"key": "t2"},
        {"batch_size": 0},
    ):
        with pytest.raises(ValueError):
            gq.predict(identity, volume, 4, device="cpu", **settings)
    with pytest.raises(ValueError, match="one"):
        gq.predict(identity, volume, 4, output="label", device="cpu")
    with pytest.raises(ValueError, match="locations"):
        gq.Aggregator((8, 8, 8)).add_batch(torch.zeros(2, 1, 4, 4, 4), [[0, 0, 0, 4, 4, 4]])


# Grids ---------------------------------------------------------------------------------------------------------------

FILES = {
    "LPS": "ct_pulmonary/image.nii.gz", "RAS": "hippocampus/hippocampus_001_image.nii.gz",
    "PSR": "mr_spine_t2/image.nii.gz", "LAS": "mr_spine_template/image.nii.gz",
    "oblique": "mr_stroke/FLAIR.nii.gz", "anisotropic": "mr_tumour1/image.nii.gz",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_real_volumes_come_back_on_their_own_grid(name, backend, shared_data):
    """Six orientations, windows in RAS: exact in crop mode, within 1e-5 of the value range in the others; and on the
    volume's own axes."""
    volume = gq.VolumeDataset([{"id": name, "image": str(shared_data / "real" / FILES[name])}])[0]
    spread = float(volume["image"].max() - volume["image"].min())
    for mode, orientation in itertools.product(MODES, (None, "RAS")):
        prediction = gq.predict(
            identity, volume, (48, 40, 24), overlap=(12, 8, 4), mode=mode, orientation=orientation, device="cpu",
            backend=backend,
        )  # fmt: skip
        difference = (prediction.values - volume["image"]).abs().max()
        assert difference == 0 if mode == "crop" else difference <= 1e-5 * spread
        assert (prediction.affine == volume.affines["image"]).all()


@pytest.mark.parametrize("spacing, orientation", [(1.5, "RAS"), ((0.8, 1.1, 2.0), None), (0.7, "LSP")])
def test_another_grid_costs_one_linear_round_trip(spacing, orientation, backend):
    """There and back against SciPy's two steps; edges stand beyond the outer voxels; labels come from the nearest."""
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", (12, -20, 31), degrees=True).as_matrix() * (0.9, 1.3, 2.0)
    affine[:3, 3] = 500, -300, 90
    image = np.random.default_rng(0).random((22, 19, 16)).astype(np.float32)
    volume = gq.Volume("a", {"image": image}, affine)
    reference = reoriented(volume.grid(), orientation) if orientation else volume.grid()
    reference = respaced(reference, np.broadcast_to(spacing, 3))
    there = slow.linear(
        image[None], slow.source_points(reference.affine, reference.shape, affine, np.eye(4), None), [0.5]
    )
    back = slow.source_points(affine, image.shape, reference.affine, np.eye(4), None)
    inside = np.clip(back, 0, np.array(reference.shape).reshape(3, 1, 1, 1) - 1)
    for mode in ("crop", "gaussian"):
        settings = {"spacing": spacing, "orientation": orientation, "mode": mode, "overlap": 0.5, "device": "cpu"}
        found = gq.predict(identity, volume, 12, pad={"image": 0.5}, backend=backend, **settings)
        assert np.abs(found.values.numpy() - slow.linear(there, inside, [0])).max() < 1e-4
        two = gq.predict(
            lambda x: torch.cat([x, 1 - x], 1),
            volume,
            12,
            output="label",
            pad={"image": 0.5},
            backend=backend,
            **settings,
        )
        assert ((found.values < 0.5) == two.values)[(found.values - 0.5).abs() > 0.05].all()
    numbers = gq.predict(lambda x: (x * 9).long(), volume, 12, backend=backend, **settings | {"mode": "crop"}).values
    assert numbers.dtype == torch.int64 and set(numbers.unique().tolist()) <= set(range(10))


def test_a_ramp_survives_another_grid():
    """Linear values are exact under linear reading, away from where the border was blended with the padding."""
    affine = np.diag([1.0, 1.5, 2.0, 1.0])
    i, j, k = np.meshgrid(*[np.arange(n) for n in (24, 20, 18)], indexing="ij")
    volume = gq.Volume("a", {"image": (3.0 * i + 2 * j - k).astype(np.float32)}, affine)
    values = gq.predict(identity, volume, 12, spacing=1.3, device="cpu").values
    inner = (slice(None), *[slice(3, -3)] * 3)
    assert (values - volume["image"])[inner].abs().max() < 1e-3


def test_a_margin_shows_the_border_from_inside_a_window():
    """With crop and a margin of half the overlap, no output within 2 voxels of a window's side is ever used."""
    rim = torch.zeros(8, 8, 8)
    rim[2:-2, 2:-2, 2:-2] = 1

    def inner(windows):
        return torch.where(rim.bool(), windows, -1)

    volume = gq.Volume("a", {"image": ramp((13, 11, 9))})
    settings = {"overlap": 4, "mode": "crop", "device": "cpu"}
    assert torch.equal(gq.predict(inner, volume, 8, margin=2, **settings).values, volume["image"])
    assert (gq.predict(inner, volume, 8, **settings).values == -1).any()


# Models --------------------------------------------------------------------------------------------------------------


def test_several_volumes_share_batches_and_come_one_by_one():
    rng = np.random.default_rng(0)
    volumes = [gq.Volume(n, {"image": rng.random(shape)}) for n, shape in enumerate([(9, 8, 8), (20, 9, 8), (5, 6, 7)])]
    sizes, asked = [], []

    def model(windows):
        sizes.append(len(windows))
        return windows

    class Asked(list):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    found = gq.predict(model, Asked(volumes), 8, overlap=2, batch_size=4, device="cpu")
    first = next(found)
    assert first.id == "0" and torch.equal(first.values, volumes[0]["image"]) and asked == [0, 1]
    rest = list(found)
    assert [prediction.id for prediction in rest] == ["1", "2"]
    assert all(torch.equal(p.values, volumes[int(p.id)]["image"]) for p in rest)
    assert sizes == [4, 4, 1]
    loader = gq.volume_loader(volumes, batch_size=2)
    assert [p.id for p in gq.predict(model, loader, 8, device="cpu")] == ["0", "1", "2"]


def test_the_model_runs_in_evaluation_mode_without_gradients_under_the_callers_autocast():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = torch.nn.Conv3d(1, 2, 1)
            self.frozen = torch.nn.Dropout().eval()

        def forward(self, windows):
            assert not self.training and not self.convolution.training and not torch.is_grad_enabled()
            self.seen = self.convolution(windows)
            return self.seen

    model = Model().train()
    model.frozen.eval()
    volume = gq.Volume("a", {"image": np.ones((8, 8, 8))})
    for mode in MODES:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values = gq.predict(model, volume, 4, mode=mode).values
        assert model.seen.dtype == torch.bfloat16 and values.dtype == torch.float32 and not values.requires_grad
    assert model.training and model.convolution.training and not model.frozen.training
    with pytest.raises(ZeroDivisionError):
        model.forward = lambda windows: 1 / 0
        gq.predict(model, volume, 4)
    assert model.training and model.convolution.training


def test_stages_come_before_the_model_and_may_see_all_keys():
    volume = gq.Volume(
        "case", {"label": np.ones((8, 8, 8), np.uint8), "image": ramp((8, 8, 8)), "image_b": ramp((8, 8, 8))}
    )

    def add_label(batch):
        assert batch["volume"] == ["case"] * len(batch["image"]) and batch["image"].dtype == torch.float32
        return batch | {"image_b": batch["image_b"] + batch["label"]}

    found = gq.predict(identity, volume, 4, stages=[add_label], key="image_b", device="cpu")
    assert torch.equal(found.values, volume["image"] + 1)

    def broken(batch):
        raise KeyError("gone")

    with pytest.raises(gq.StageError, match="broken.*case"):
        gq.predict(identity, volume, 4, stages=[broken], device="cpu")


def test_a_model_of_whole_numbers_keeps_them_in_crop_mode():
    volume = gq.Volume("a", {"label": np.random.default_rng(0).integers(0, 2**20, (9, 9, 9))})
    found = gq.predict(lambda x: x, volume, 5, mode="crop", overlap=2, device="cpu").values
    assert found.dtype == torch.int64 and torch.equal(found, volume["label"].long())


def test_dice_is_that_of_monais_inferer_with_the_same_windows():
    """The demo's network after a few steps on a block of tissue, windows of 32, overlap a quarter."""
    from monai.inferers import sliding_window_inference

    from gpuqueue.demo import make_network

    rng = np.random.default_rng(0)
    i, j, k = np.meshgrid(*[np.linspace(-1, 1, n) for n in (52, 60, 44)], indexing="ij")
    label = (i**2 + j**2 + k**2 < 0.7).astype(np.uint8) + (i**2 + j**2 + k**2 < 0.2)
    image = (label * 0.8 + rng.normal(0, 0.5, label.shape)).astype(np.float32)
    volume = gq.Volume("a", {"image": image, "label": label})
    network = make_network(1, 3, 0)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-2)
    with gq.GPUQueue([volume], 32, 60, batch_size=4, device="cpu", augment=[gq.RandomFlip((0, 1, 2))]) as queue:
        for batch in queue:
            loss = torch.nn.functional.cross_entropy(network(batch["image"]), batch["label"][:, 0])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    network.eval()
    with torch.no_grad():
        theirs = sliding_window_inference(volume["image"][None], (32,) * 3, 4, network, overlap=0.25).argmax(1)[0]
    ours = gq.predict(network, volume, 32, overlap=0.25, output="label").values[0]
    truth = volume["label"][0]
    for number in (1, 2):
        dice = [
            2 * ((found == number) & (truth == number)).sum() / ((found == number).sum() + (truth == number).sum())
            for found in (ours, theirs)
        ]
        assert abs(dice[0] - dice[1]) <= 0.01 and dice[0] > 0.6
