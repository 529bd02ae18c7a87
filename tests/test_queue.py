"""GPUQueue as a user meets it: epochs, lengths, breaks, seeds, counts, refusals."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch

import gpuqueue as gq


def ramp(shape, id="ramp"):
    i, j, k = np.meshgrid(*[np.arange(n) for n in shape], indexing="ij")
    return gq.Volume(id, {"image": (10000 * i + 100 * j + k).astype(np.float32)})


def idvol(n, shape=(8, 8, 8)):
    return gq.Volume(n, {"image": np.full(shape, n, np.float32)})


def queue_of(volumes, patches, batch_size, **settings):
    return gq.GPUQueue(volumes, 4, patches, batch_size=batch_size, device="cpu", **settings)


class Slow(torch.utils.data.Dataset):
    """Constant volumes whose read takes a while."""

    def __init__(self, n, seconds, shape=(32, 32, 32)):
        self.n, self.seconds, self.shape = n, seconds, shape
        self.ids = [str(i) for i in range(n)]

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return idvol(index, self.shape)


@pytest.mark.parametrize("drop_last, sizes", [(False, [16] * 6 + [4]), (True, [16] * 6)])
def test_the_last_batch_is_short_or_dropped_and_the_length_says_so(drop_last, sizes):
    """H11: ten volumes of ten patches, batch 16."""
    with queue_of([idvol(n) for n in range(10)], 10, 16, drop_last=drop_last) as queue:
        assert [len(batch["volume"]) for batch in queue] == sizes and len(queue) == len(sizes)
        assert all(len(batch["image"]) == size for batch, size in zip(queue, sizes))


@pytest.mark.parametrize("total, kept, dropped", [(95, 6, 5), (96, 6, 6), (97, 7, 6)])
def test_the_length_is_the_counted_number_of_batches_at_any_time(total, kept, dropped):
    """H12: around an exact multiple, before, during and after iteration, twice in a row."""
    counts = {"0": 50, "1": total - 50}
    for drop_last, expected in ((False, kept), (True, dropped)):
        with queue_of([idvol(0), idvol(1)], counts, 16, drop_last=drop_last) as queue:
            for _ in range(2):
                assert len(queue) == expected
                assert sum(len(queue) == expected for _ in queue) == expected


class Tagged(torch.utils.data.Dataset):
    """Volumes that carry how often they were read before."""

    ids = [str(i) for i in range(6)]

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return idvol(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_an_epoch_early_is_safe(workers):
    """H13: three batches, a break, then a whole epoch, five times."""
    import multiprocessing

    began = time.monotonic()
    with queue_of(gq.volume_loader(Tagged(), num_workers=workers), 5, 4, volumes_in_memory=3) as queue:
        for turn in range(5):
            for number, batch in enumerate(queue):
                assert batch["epoch"] == 2 * turn
                if number == 2:
                    break
            seen = Counter()
            for batch in queue:
                assert batch["epoch"] == 2 * turn + 1
                assert all((image == int(v)).all() for image, v in zip(batch["image"], batch["volume"]))
                seen.update(zip(batch["volume"], batch["index"].tolist()))
            assert seen == {(v, k): 1 for v in Tagged.ids for k in range(5)}
            assert len(multiprocessing.active_children()) <= workers
            assert sum(t.name.startswith("gpuqueue-") for t in threading.enumerate()) <= 8
    assert time.monotonic() - began < 60


def test_a_new_iterator_ends_the_old_one():
    with queue_of([idvol(n) for n in range(4)], 6, 4) as queue:
        old = iter(queue)
        next(old)
        new = iter(queue)
        assert sum(len(batch["volume"]) for batch in new) == 24
        assert next(old, None) is None


def test_a_queue_that_nobody_holds_still_serves_its_iterator():
    assert sum(1 for _ in queue_of([idvol(n) for n in range(4)], 6, 4)) == 6


def test_loading_overlaps_delivery():
    """H14 with its values: 60 volumes of 32 cubed, reads of 0.2 s by 4 workers, 16 patches each, batch 4, steps of
    0.02 s: the producer alone needs 3.0 s, the consumer 4.8 s; the epoch takes at most 1.35 times the slower."""
    loader = gq.volume_loader(Slow(60, 0.2), num_workers=4)
    with gq.GPUQueue(loader, 16, 16, batch_size=4, device="cpu", volumes_in_memory=8, lookahead=4) as queue:
        batches = iter(queue)
        next(batches)
        began = time.perf_counter()
        waits = []
        while True:
            time.sleep(0.02)
            asked = time.perf_counter()
            if next(batches, None) is None:
                break
            waits.append(time.perf_counter() - asked)
        seconds = time.perf_counter() - began
    assert len(waits) == 239
    assert seconds <= 1.35 * 4.8
    assert max(waits[10:]) <= 0.5


def test_each_volume_can_have_its_own_number_of_patches():
    """H15: 1, 5, 0 and 12 patches; the volume without any is never loaded."""

    class Counting(list):
        asked = Counter()

        def __getitem__(self, index):
            self.asked[index] += 1
            return super().__getitem__(index)

    volumes = Counting([gq.Volume(name, {"image": np.zeros((6, 6, 6))}) for name in "abcd"])
    counts = {"a": 1, "b": 5, "c": 0, "d": 12}
    for given in (counts, counts.get):
        for drop_last, length in ((False, 5), (True, 4)):
            with queue_of(volumes, given, 4, drop_last=drop_last) as queue:
                seen = Counter(v for batch in queue for v in batch["volume"])
                assert len(queue) == length and (drop_last or seen == {"a": 1, "b": 5, "d": 12})
    assert volumes.asked[2] == 0 and volumes.asked[3] > 0


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_queue_inside_a_dataloader_is_refused(context):
    """H16: with the line to write instead."""
    queue = queue_of([idvol(0)], 4, 2)
    began = time.monotonic()
    with pytest.raises(ValueError, match="num_workers"):
        next(iter(torch.utils.data.DataLoader(queue, batch_size=2, num_workers=2, multiprocessing_context=context)))
    with pytest.raises(ValueError, match="for batch in queue"):
        next(iter(torch.utils.data.DataLoader(queue, batch_size=2)))
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("drop_last, sizes", [(False, [4] * 5 + [1]), (True, [4] * 5)])
def test_no_batch_mixes_epochs(drop_last, sizes):
    """H17: seven volumes of three patches, batch 4, three epochs."""
    with queue_of([idvol(n) for n in range(7)], 3, 4, drop_last=drop_last) as queue:
        for epoch in range(3):
            batches = list(queue)
            assert [len(batch["volume"]) for batch in batches] == sizes
            assert {batch["epoch"] for batch in batches} == {epoch}
            seen = Counter((v, k) for b in batches for v, k in zip(b["volume"], b["index"].tolist()))
            assert set(seen.values()) == {1} and len(seen) == sum(sizes)


SCRIPT = """
import hashlib, json, random, sys
import numpy as np, torch, gpuqueue as gq
seed, other, workers = map(int, sys.argv[1:])
random.seed(other), np.random.seed(other), torch.manual_seed(other)
rng = np.random.default_rng(0)
volumes = [gq.Volume(n, {"image": rng.random((10, 11, 12)).astype(np.float32)}) for n in range(6)]
loader = gq.volume_loader(volumes, num_workers=workers)
queue = gq.GPUQueue(loader, 5, 8, batch_size=3, device="cpu", seed=seed, backend="torch",
                    augment=[gq.RandomFlip((0, 1)), gq.RandomAffine(), gq.RandomElasticDeformation()])
hash_of = lambda x: hashlib.sha1(x.numpy().tobytes()).hexdigest()
out = []
for epoch in range(3):
    out.append([(b["volume"], b["start"].tolist(), hash_of(b["image"])) for b in queue])
queue.close()
print(json.dumps(out))
"""


def run_script(*arguments):
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(ran.stdout)


def test_one_seed_governs_everything_in_any_process():
    """H19, H20: two processes with other global seeds and workers agree to the byte; epochs and seeds differ."""
    first, second, other = run_script(123, 1, 0), run_script(123, 2, 2), run_script(124, 1, 0)
    assert first == second
    assert first != other
    assert first[0] != first[1] != first[2] != first[0]


def test_a_seed_fixes_the_sequence_not_each_element():
    """H21"""

    def parameters():
        with queue_of([idvol(0)], 10, 10, augment=[gq.RandomAffine()], seed=10, return_parameters=True) as queue:
            (batch,) = queue
            return [p["affine"].tobytes() for p in batch["parameters"]]

    assert len(set(parameters())) == 10
    assert parameters() == parameters()


def test_augmentation_per_volume_is_one_draw_for_each_load():
    settings = {"augment": [gq.RandomAffine()], "augment_per": "volume", "return_parameters": True}
    with queue_of([idvol(0), idvol(1)], 6, 4, **settings) as queue:
        drawn = {}
        for batch in queue:
            for volume, p in zip(batch["volume"], batch["parameters"]):
                drawn.setdefault(volume, set()).add(p["affine"].tobytes())
        assert [len(found) for found in drawn.values()] == [1, 1] and drawn["0"] != drawn["1"]
    with queue_of([idvol(0)], 2, 2, strategy="L0 P0 P0 A0 P0 P0 D0", **settings) as queue:
        rows = [p["affine"].tobytes() for batch in queue for p in batch["parameters"]]
        assert rows[0] == rows[1] != rows[2] == rows[3]
        again = queue.replay("0", 0, 3)
        assert again["parameters"][0]["affine"].tobytes() == rows[3]


def test_forgetting_set_epoch_does_not_repeat_the_order_and_set_epoch_wins():
    """H63"""
    with queue_of([idvol(n) for n in range(8)], 2, 4) as queue:
        orders = [[batch["volume"] for batch in queue] for _ in range(2)]
        assert orders[0] != orders[1]
        queue.set_epoch(0)
        assert [batch["volume"] for batch in queue] == orders[0]
        assert [batch["volume"] for batch in queue] == orders[1]
        queue.batch_sampler.sampler.set_epoch(0)
        assert [batch["volume"] for batch in queue] == orders[0]


def test_validation_is_the_same_every_epoch_and_in_the_datasets_order():
    with queue_of(
        [idvol(n) for n in range(5)], 1, 2, shuffle=False, same_every_epoch=True, strategy="sequential"
    ) as queue:
        runs = [[(b["volume"], b["start"].tolist(), b["index"].tolist()) for b in queue] for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert [v for volumes, _, _ in runs[0] for v in volumes] == list("01234")


def test_batches_per_epoch_cuts_or_continues_the_epoch():
    for number in (2, 11):
        with queue_of([idvol(n) for n in range(4)], 3, 3, batches_per_epoch=number) as queue:
            for _ in range(2):
                batches = list(queue)
                assert len(batches) == len(queue) == number and all(len(b["volume"]) == 3 for b in batches)
                pairs = [(v, k) for b in batches for v, k in zip(b["volume"], b["index"].tolist())]
                assert len(set(pairs)) == len(pairs)


def test_volumes_of_different_shapes_share_batches():
    """H73: ids and starts are right for each element."""
    volumes = [ramp(shape, str(shape)) for shape in [(30, 40, 50), (64, 20, 33), (25, 25, 25)]]
    with gq.GPUQueue(volumes, 16, 8, batch_size=6, device="cpu") as queue:
        mixed = 0
        for batch in queue:
            assert batch["image"].shape == (6, 1, 16, 16, 16)
            mixed += len(set(batch["volume"])) > 1
            first = batch["image"][:, 0, 0, 0, 0].numpy()
            assert (first == batch["start"].numpy() @ (10000, 100, 1)).all()
            for volume, start in zip(batch["volume"], batch["start"].numpy()):
                shape = np.array(eval(volume))
                assert (start >= 0).all() and (start + 16 <= shape).all()
        assert mixed >= 2


@pytest.mark.parametrize("stream", ["list", "text", "generator", "callable"])
def test_a_stream_of_ones_own_is_run_as_it_is(stream):
    text = "L1 P1 L0 P0 P1 D1 P0 D0 L1 P1 D1"
    commands = gq.parse(text)
    strategy = {
        "list": commands,
        "text": text,
        "generator": (c for c in commands),
        "callable": lambda visits, capacity, rng: commands,
    }[stream]
    counts = {"0": 2, "1": 3}
    with queue_of([idvol(0), idvol(1)], counts, 2, strategy=strategy, patch_queue_size=0) as queue:
        if stream == "generator":
            with pytest.raises(TypeError):
                len(queue)
        else:
            assert len(queue) == 3 and queue.stream(0) == commands
        pairs = [p for b in queue for p in zip(b["volume"], b["index"].tolist())]
        assert pairs == [("1", 0), ("0", 0), ("1", 1), ("0", 1), ("1", 2)]


@pytest.mark.parametrize("patch_queue_size", [0, None])
def test_a_broken_stream_is_named_where_it_breaks(patch_queue_size):
    broken = gq.parse("L0 P0 P1 D0")
    with pytest.raises(gq.StreamError, match="P1"):
        queue_of([idvol(0), idvol(1)], 2, 1, strategy=broken)
    queue = queue_of([idvol(0), idvol(1)], 2, 1, strategy=lambda *_: broken, patch_queue_size=patch_queue_size)
    with queue, pytest.raises(gq.StreamError, match="P1"):
        list(queue)


def test_replay_makes_the_same_patch_again():
    rng = np.random.default_rng(0)
    volumes = [gq.Volume(n, {"image": rng.random((9, 9, 9))}) for n in range(3)]
    augment = [gq.RandomFlip((0, 1, 2)), gq.RandomAffine(), gq.RandomElasticDeformation()]
    with queue_of(volumes, 4, 4, augment=augment) as queue:
        list(queue)
        for batch in queue:
            for row, (volume, k) in enumerate(zip(batch["volume"], batch["index"].tolist())):
                again = queue.replay(volume, batch["epoch"], k)
                assert torch.equal(again["image"][0], batch["image"][row])
                assert torch.equal(again["start"][0], batch["start"][row])
        with pytest.raises(ValueError, match="no volume has the id 'x'"):
            queue.replay("x", 0, 0)


def test_patches_from_a_handful_of_volumes():
    """The epoch is how often an id came before, unless set_epoch was called; batches never mix epochs."""
    volumes = [idvol(n) for n in range(6)]
    with queue_of(volumes, 4, 3, return_parameters=True) as queue:
        for turn in range(2):
            seen = Counter()
            for handful in gq.volume_loader(volumes, batch_size=3):
                for batch in queue.patches(handful):
                    assert batch["epoch"] == turn
                    assert all((image == int(v)).all() for image, v in zip(batch["image"], batch["volume"]))
                    seen.update(zip(batch["volume"], batch["index"].tolist()))
            assert seen == {(str(v), k): 1 for v in range(6) for k in range(4)}
        mixed = list(queue.patches([volumes[0], idvol(9)]))
        assert {(b["epoch"], v) for b in mixed for v in b["volume"]} == {(2, "0"), (0, "9")}
        queue.set_epoch(7)
        assert {b["epoch"] for b in queue.patches(volumes[:2])} == {7}


class Dicts(torch.utils.data.Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return {
            "id": f"case{index}",
            "image": torch.full((1, 8, 9, 10), float(index)),
            "label": np.full((1, 8, 9, 10), index),
            "affine": np.diag([2.0, 2, 2, 1]),
            "age": 63,
            "note": "x",
        }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [None, list], ids=["batch of one", "list"])
def test_a_dataloader_of_ones_own_keeps_its_order(workers, collate):
    options = {"collate_fn": list, "batch_size": 2} if collate else {"batch_size": 1}
    loader = torch.utils.data.DataLoader(Dicts(), num_workers=workers, **options)
    with queue_of(loader, 4, 3, strategy="sequential") as queue:
        for epoch in range(2):
            batches = list(queue)
            assert len(batches) == len(queue) == 7
            order = [v for b in batches for v in b["volume"]]
            assert order == sorted(order) and Counter(order) == {f"case{n}": 4 for n in range(5)}
            for batch in batches:
                assert batch["epoch"] == epoch and batch["affine"][0, 0, 0] == 2
                assert [int(x[0, 0, 0, 0]) for x in batch["label"]] == [int(v[4:]) for v in batch["volume"]]


def test_stacked_batches_of_a_dataloader_are_refused_with_the_collate_to_use():
    stacked = torch.utils.data.DataLoader(Dicts(), batch_size=2)
    with queue_of(stacked, 4, 3) as queue, pytest.raises(gq.StageError, match="collate_fn=list"):
        next(iter(queue))


def test_the_synchronous_mode_runs_in_the_callers_thread():
    """For a debugger: no thread, no process, and a stage sees the main thread."""
    names = []

    def stage(batch):
        names.append(threading.current_thread().name)
        return batch

    with queue_of(gq.volume_loader([idvol(0)], num_workers=0), 4, 2, augment=[stage], patch_queue_size=0) as queue:
        before = threading.active_count()
        for _ in queue:
            assert threading.active_count() == before
    assert set(names) == {"MainThread"}


def test_a_closed_queue_says_so():
    queue = queue_of([idvol(0)], 4, 2)
    next(iter(queue))
    queue.close()
    queue.close()
    with pytest.raises(gq.QueueClosed):
        iter(queue)


V = idvol(0)
REFUSED = {
    "empty": (dict(loader=[]), "empty"),
    "duplicate ids": (dict(loader=[V, V]), "'0' occurs twice"),
    "patch of zero": (dict(patch_size=0), "patch_size=0"),
    "patch of two numbers": (dict(patch_size=(4, 4)), "or three"),
    "patch larger than the volume": (dict(patch_size=(4, 9, 4), on_small="raise"), r"'0'.*\(8, 8, 8\).*\(4, 9, 4\)"),
    "no capacity": (dict(volumes_in_memory=0), "volumes_in_memory=0"),
    "negative lookahead": (dict(lookahead=-1), "lookahead=-1"),
    "batch of zero": (dict(batch_size=0), "batch_size=0"),
    "negative patches": (dict(patches_per_volume=-1), "patches_per_volume=-1"),
    "a number too few": (dict(patches_per_volume={"1": 3}), "'0'"),
    "unknown strategy": (dict(strategy="slidng"), "slidng"),
    "unknown backend": (dict(backend="cupy"), "cupy"),
    "unknown policy": (dict(on_small="crop"), "on_small"),
    "unknown axis codes": (dict(orientation="RAX"), "RAX"),
    "axis codes that repeat": (dict(orientation="RLS"), "RLS"),
    "spacing of zero": (dict(spacing=0), "spacing=0"),
    "pad of a word": (dict(pad={"image": "edge"}), "edge"),
    "elastic twice": (dict(augment=[gq.RandomElasticDeformation(), gq.RandomElasticDeformation()]), "one Random"),
    "affine after elastic": (dict(augment=[gq.RandomElasticDeformation(), gq.RandomAffine()]), "before"),
    "spatial after a stage": (dict(augment=[dict.copy, gq.RandomFlip()]), "before"),
    "no transform": (dict(augment=["flip"]), "flip"),
    "rank alone": (dict(rank=1), "world_size"),
    "no cuda": (dict(device="cuda"), "CUDA"),
    "unknown device": (dict(device="gpu"), "'gpu' is unknown"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_make_no_sense_are_refused_at_once(name):
    settings, message = REFUSED[name]
    if name == "no cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    settings = {"loader": [V], "patch_size": 4, "device": "cpu"} | settings
    with pytest.raises(ValueError, match=message):
        gq.GPUQueue(**settings)


def test_volumes_of_a_queue_share_keys_and_channels():
    two = gq.Volume("two", {"image": np.zeros((2, 8, 8, 8))})
    other = gq.Volume("other", {"image": np.zeros((8, 8, 8)), "label": np.zeros((8, 8, 8), int)})
    for odd in (two, other):
        with pytest.raises(ValueError, match=f"{odd.id}.*'0'"):
            queue_of([V, odd], 4, 2)

    class Late(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return (V, two)[index]

    with queue_of(Late(), 4, 2, shuffle=False) as queue, pytest.raises(gq.VolumeError, match="two.*2 channels"):
        list(queue)


def test_a_patch_larger_than_the_volume_is_padded_whole():
    """H07: shape (20, 64, 64), patch 32; image pad -1000 and label pad 0 in the same planes."""
    volume = gq.Volume("a", {"image": np.ones((20, 64, 64)), "label": np.ones((20, 64, 64), np.uint8)})
    with pytest.raises(ValueError, match="20.*32"):
        gq.GPUQueue([volume], 32, 1, on_small="raise", device="cpu")
    with gq.GPUQueue([volume], 32, 4, pad={"image": -1000, "label": 0}, device="cpu") as queue:
        for batch in queue:
            for image, label in zip(batch["image"][:, 0], batch["label"][:, 0]):
                planes = image.amax((1, 2))
                assert torch.equal(planes, image.amin((1, 2)))
                assert (planes == 1).sum() == 20 and (planes == -1000).sum() == 12 and (planes[6:26] == 1).all()
                assert torch.equal(label.amax((1, 2)), (planes == 1).long())


def test_stages_may_change_the_batch_and_dtypes_come_last():
    def normalise(batch):
        assert batch["image"].dtype == torch.float32 and batch["label"].dtype == torch.int64
        batch["image"] = batch["image"] / 2
        batch["extra"] = len(batch["volume"])
        return batch

    volume = gq.Volume("a", {"image": np.full((8, 8, 8), 3.0), "label": np.full((8, 8, 8), 300)})
    dtypes = {"image": torch.float16, "label": torch.uint8}
    with queue_of([volume], 4, 4, augment=[normalise], dtypes=dtypes) as queue:
        (batch,) = queue
    assert batch["image"].dtype == torch.float16 and (batch["image"] == 1.5).all()
    assert batch["label"].dtype == torch.uint8 and (batch["label"] == 255).all() and batch["extra"] == 4


def test_all_starts_are_legal_and_drawn():
    """H01: a patch as large as the volume has one start; the last start is drawn as often as the others."""
    with gq.GPUQueue([ramp((8, 8, 8))], 8, 20, device="cpu") as queue:
        assert all((batch["start"] == 0).all() for batch in queue)
    with gq.GPUQueue([ramp((10, 8, 8))], 8, 3000, batch_size=500, device="cpu") as queue:
        starts = torch.cat([batch["start"] for batch in queue])
        share = torch.bincount(starts[:, 0], minlength=3) / len(starts)
        assert starts[:, 1:].max() == 0 and ((share - 1 / 3).abs() < 0.035).all()
    with gq.GPUQueue([ramp((12, 8, 8))], (8, 8, 1), 200, device="cpu") as queue:
        assert set(torch.cat([batch["start"] for batch in queue])[:, 2].tolist()) == set(range(8))


def test_a_strategy_of_ones_own_must_keep_the_counts():
    def swapped(visits, capacity, rng):
        return gq.parse("L0 L1 P0 P0 P0 P1 D0 D1")

    with (
        queue_of([idvol(0), idvol(1)], 2, 1, strategy=swapped) as queue,
        pytest.raises(gq.StreamError, match="3 patch"),
    ):
        list(queue)


class Dice(torch.utils.data.Dataset):
    """Volumes of what the three common generators say in the worker that reads them."""

    ids = [f"d{i}" for i in range(40)]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        numbers = np.array([random.random(), np.random.rand(), torch.rand(1).item()], np.float32)
        return gq.Volume(self.ids[index], {"image": numbers.reshape(3, 1, 1, 1)})


def test_workers_do_not_draw_the_same_numbers():
    """H18: 40 items by 4 workers give 40 values of each generator, and 40 augmentations."""
    settings = {"device": "cpu", "augment": [gq.RandomAffine(degrees=30)], "return_parameters": True}
    with gq.GPUQueue(gq.volume_loader(Dice(), num_workers=4), 1, 1, **settings) as queue:
        batches = list(queue)
    assert [len(torch.cat([b["image"] for b in batches])[:, c].unique()) for c in range(3)] == [40] * 3
    with queue_of([idvol(n) for n in range(40)], 1, 8, augment=settings["augment"], return_parameters=True) as queue:
        assert len({p["affine"].tobytes() for batch in queue for p in batch["parameters"]}) == 40
