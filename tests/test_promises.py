"""The promises of the design, each as a test over the public names."""

from __future__ import annotations

import random
import time
from collections import Counter

import numpy as np
import pytest
import slow
import torch
from scipy.spatial.transform import Rotation

import gpuqueue as gq
from gpuqueue.volumes.grid import reoriented, respaced


def idvol(n, shape=(10, 11, 12)):
    return gq.Volume(n, {"image": np.full(shape, n, np.float32)})


class Tracked(torch.utils.data.Dataset):
    """Volumes that count how many were asked for."""

    def __init__(self, n, seconds=0.0):
        self.n, self.seconds, self.calls = n, seconds, []
        self.ids = [f"v{i}" for i in range(n)]

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.calls.append(index)
        time.sleep(self.seconds)
        return idvol(f"{index}").replace({"image": np.full((10, 11, 12), index, np.float32)})


def oblique(spacing, degrees=(12, -20, 31), origin=(500.0, -300.0, 90.0)):
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", degrees, degrees=True).as_matrix() * spacing
    affine[:3, 3] = origin
    return affine


def test_the_first_batch_comes_as_soon_as_its_own_volumes_are_in():
    """Promise 1: with 8 places for volumes that take 0.2 s each, the first batch does not wait for the second one."""
    dataset = Tracked(8, seconds=0.2)
    with gq.GPUQueue(dataset, 4, 16, volumes_in_memory=8, batch_size=2, shuffle=False, device="cpu") as queue:
        began = time.perf_counter()
        next(iter(queue))
        seconds = time.perf_counter() - began
    alone = dataset.seconds
    assert seconds < 4 * alone, f"{seconds:.2f} s: waited for the queue to fill (8 loads take {8 * alone} s)"


@pytest.mark.parametrize("strategy", ["sliding", "basic", "merge_incomplete", "sequential"])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_residents_never_exceed_the_streams_peak_and_lookahead(strategy, lookahead):
    """Promise 2."""
    with gq.GPUQueue(
        Tracked(11), 4, 5, volumes_in_memory=4, batch_size=3, strategy=strategy, lookahead=lookahead, device="cpu"
    ) as queue:
        peak = gq.check(queue.stream(0)).most_resident
        for _ in range(2):
            assert sum(len(batch["volume"]) for batch in queue) == 55
        assert peak <= queue.stats().most_resident_volumes <= peak + lookahead
        assert queue.stats().most_resident_bytes <= (peak + lookahead) * 10 * 11 * 12 * 4


@pytest.mark.parametrize("capacity", [1, 7, 8, 50, 1000])
def test_every_volume_gives_exactly_its_number_of_patches(capacity):
    """Promise 3; H10 with its values: ten volumes, 8 patches each."""
    volumes = [idvol(n) for n in range(10)]
    for batch_size in (1, 3, 10):
        with gq.GPUQueue(volumes, 4, 8, volumes_in_memory=capacity, batch_size=batch_size, device="cpu") as queue:
            for _ in range(2):
                seen = Counter(v for batch in queue for v in batch["volume"])
                assert seen == {str(n): 8 for n in range(10)}


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_do_not_change_the_counts(workers):
    """Promise 3 and H10, with worker processes."""
    loader = gq.volume_loader(Tracked(10), num_workers=workers)
    with gq.GPUQueue(loader, 4, 8, volumes_in_memory=4, batch_size=3, device="cpu") as queue:
        for _ in range(2):
            batches = list(queue)
            assert Counter(v for batch in batches for v in batch["volume"]) == {f"v{n}": 8 for n in range(10)}
            for batch in batches:
                for row, volume in enumerate(batch["volume"]):
                    assert (batch["image"][row] == int(volume[1:])).all()


GRIDS = {
    "anisotropic": ((24, 30, 17), np.diag([1.0, 0.8, 2.5, 1.0])),
    "oblique": ((22, 19, 26), oblique((0.9, 1.3, 2.0))),
    "LPS flipped": ((20, 25, 23), np.diag([-1.1, -0.9, 1.6, 1.0]) + np.array([[0, 0, 0, 40.0]] * 3 + [[0] * 4])),
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("resampled", [False, True], ids=["own grid", "orientation and spacing"])
@pytest.mark.parametrize("label_grid", ["same", "own"])
def test_a_patch_is_a_crop_of_the_slowly_augmented_volume(grid, resampled, label_grid):
    """Promise 5: flips, affine and elastic composed, against SciPy in float64 over the whole volume, then cropped."""
    shape, affine = GRIDS[grid]
    rng = np.random.default_rng(3)
    image = rng.random((2, *shape)).astype(np.float32)
    coarse = shape if label_grid == "same" else (12, 14, 11)
    label = rng.integers(0, 4, coarse).astype(np.uint8)
    label_affine = affine.copy()
    if label_grid == "own":
        label_affine[:3, :3] *= np.array(shape) / np.array(coarse)
        label_affine[:3, 3] += (label_affine - affine)[:3, :3] @ np.full(3, 0.5)
    volume = gq.Volume(
        "case",
        {"image": image, "label": label},
        {"image": affine, "label": label_affine},
        same_grid=label_grid == "same",
    )
    settings = {"orientation": "RAS", "spacing": (1.2, 1.0, 1.7)} if resampled else {}
    queue = gq.GPUQueue(
        [volume],
        (9, 12, 10),
        12,
        batch_size=5,
        device="cpu",
        seed=5,
        return_parameters=True,
        augment=[gq.RandomFlip((0, 1, 2)), gq.RandomAffine(0.15, 20, 3), gq.RandomElasticDeformation((7, 8, 6), 1.2)],
        pad={"image": "mean", "label": 9},
        **settings,
    )
    reference = volume.grid()
    if resampled:
        reference = respaced(reoriented(reference, "RAS"), (1.2, 1.0, 1.7))
    pads = image.astype(np.float64).mean(axis=(1, 2, 3))
    agree = voxels = flips = 0
    for batch in queue:
        for row, parameters in enumerate(batch["parameters"]):
            start = batch["start"][row].numpy()
            drawn = reference.affine, reference.shape
            rest = parameters["affine"], parameters["control_points"]
            flips += np.linalg.det(parameters["affine"][:3, :3]) < 0
            whole = slow.linear(image, slow.source_points(*drawn, affine, *rest), pads)
            expected = slow.crop(whole, start, (9, 12, 10), 0)
            assert np.abs(batch["image"][row].numpy() - expected).max() < 1e-4
            key_affine = affine if label_grid == "same" else label_affine
            whole = slow.nearest(label[None], slow.source_points(*drawn, key_affine, *rest), [9])
            expected = slow.crop(whole, start, (9, 12, 10), 0)
            agree += (batch["label"][row].numpy() == expected).sum()
            voxels += expected.size
            origin = reference.affine @ [*start, 1]
            assert np.allclose(batch["affine"][row].numpy() @ [0, 0, 0, 1], origin)
    queue.close()
    assert agree / voxels >= 0.999
    assert 0 < flips < 12


def test_a_delivered_batch_is_the_consumers_own():
    """Promise 8, H52: writing into batches changes neither volumes nor later batches."""
    rng = np.random.default_rng(0)
    arrays = {n: rng.random((12, 12, 12)).astype(np.float32) for n in range(3)}
    copies = {n: array.copy() for n, array in arrays.items()}
    volumes = [gq.Volume(n, {"image": array}) for n, array in arrays.items()]
    augment = [gq.RandomFlip((0, 1, 2), 0.3), gq.RandomAffine(p=0.5), gq.RandomElasticDeformation(p=0.5)]
    make = lambda: gq.GPUQueue(volumes, 6, 6, batch_size=4, augment=augment, device="cpu", pad={"image": 0})  # noqa: E731
    with make() as queue:
        wanted = [batch["image"].clone() for _ in range(3) for batch in queue]
    with make() as queue:
        kept = []
        for _ in range(3):
            for batch in queue:
                assert torch.equal(batch["image"], wanted[len(kept)])
                batch["image"].fill_(0)
                kept.append(batch["image"])
    assert all((batch == 0).all() for batch in kept)
    assert len({batch.untyped_storage().data_ptr() for batch in kept}) == len(kept)
    assert all((arrays[n] == copies[n]).all() for n in arrays)


def test_global_random_state_is_neither_read_nor_written():
    """Promise 10, H22."""

    def run(disturb):
        with gq.GPUQueue(
            gq.volume_loader(Tracked(5), num_workers=1),
            4,
            4,
            batch_size=4,
            device="cpu",
            return_parameters=True,
            augment=[gq.RandomFlip((0, 1, 2)), gq.RandomAffine(), gq.RandomElasticDeformation()],
        ) as queue:
            out = []
            for _ in range(2):
                out += [(b["volume"], b["start"].tolist(), b["parameters"][0]["affine"].tolist()) for b in queue]
                disturb()
        return out

    def disturb():
        torch.rand(1000), np.random.rand(1000), random.random()
        with gq.GPUQueue([idvol(n) for n in range(4)], 4, 4, device="cpu", same_every_epoch=True) as validation:
            list(validation)

    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    plain = run(lambda: None)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all() and before[2] == random.getstate()
    torch.manual_seed(2), np.random.seed(2), random.seed(2)
    assert run(disturb) == plain


class TakesTwo(Exception):
    """An error whose constructor a DataLoader cannot call."""

    def __init__(self, *, a, b):
        super().__init__("special 42")
        self.a, self.b = a, b


class Failing(Tracked):
    def __getitem__(self, index):
        if index == 5:
            raise TakesTwo(a=1, b=2)
        return super().__getitem__(index)


class BadSampler(gq.UniformSampler):
    def draw(self, prepared, grid, patch_size, random):
        if grid.shape[0] == 10 and random.uniform() < 0.2:
            raise KeyError("no such class")
        return super().draw(prepared, grid, patch_size, random)


def bad_stage(batch):
    if 3 in batch["index"].tolist():
        raise ZeroDivisionError("stage broke")
    return batch


def bad_collate(items):
    raise OSError("collate broke")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("patch_queue_size", [0, None])
@pytest.mark.parametrize("where", ["dataset", "collate", "sampler", "stage"])
def test_a_failure_anywhere_reaches_the_consumers_next_call(where, workers, patch_queue_size):
    """Promise 6, H23 and H24: first cause, stage and volume are named, and nothing hangs."""
    dataset = Failing(8) if where == "dataset" else Tracked(8)
    loader = gq.volume_loader(dataset, num_workers=workers)
    if where == "collate":
        loader = torch.utils.data.DataLoader(dataset, batch_size=1, num_workers=workers, collate_fn=bad_collate)
    queue = gq.GPUQueue(
        loader,
        4,
        6,
        batch_size=4,
        device="cpu",
        patch_queue_size=patch_queue_size,
        sampler=BadSampler() if where == "sampler" else None,
        augment=[bad_stage] if where == "stage" else [],
    )
    with pytest.raises(gq.StageError) as caught:
        for _ in queue:
            pass
    error = caught.value
    wanted = {
        "dataset": ("reading", "TakesTwo", "special 42", "v5"),
        "collate": ("reading", "OSError", "collate broke", "0"),
        "sampler": ("sampling", "KeyError", "no such class", "v"),
        "stage": ("bad_stage", "ZeroDivisionError", "stage broke", "v"),
    }[where]
    stage, kind, message, volume = wanted
    assert error.stage == stage and error.volume.startswith(volume) and error.epoch == 0
    assert kind in str(error) and message in str(error) and repr(error.volume) in str(error)
    assert "__init__" not in str(error).split("Traceback")[0]
    if where in ("sampler", "stage"):
        assert isinstance(error.__cause__, (KeyError, ZeroDivisionError)) and error.index is not None
    with pytest.raises(gq.StageError):  # the next epoch runs, and fails as it must
        for _ in queue:
            pass
    queue.close()
