"""Promise 4: the same patches for any workers, prefetch, batch size and backend, on any ranks, fresh or resumed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import gpuqueue as gq
from gpuqueue.stream.commands import check, checked, parse
from gpuqueue.stream.resume import fast_forward


class Noise(torch.utils.data.Dataset):
    """Noise volumes of different shapes, the same at every read."""

    def __init__(self, n=7):
        self.ids = [f"case{i}" for i in range(n)]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        shape = (9 + index, 11, 10)
        arrays = {"image": rng.random(shape).astype(np.float32), "label": rng.integers(0, 3, shape).astype(np.uint8)}
        return gq.Volume(self.ids[index], arrays, np.diag([1, 1.5, 1, 1]))


def make(workers=0, prefetch=2, batch_size=3, dataset=None, **settings):
    loader = gq.volume_loader(dataset or Noise(), num_workers=workers, prefetch_factor=prefetch)
    settings = {"volumes_in_memory": 3, "backend": "torch"} | settings
    augment = [gq.RandomFlip((0, 1, 2)), gq.RandomAffine(), gq.RandomElasticDeformation()]
    return gq.GPUQueue(
        loader, 5, 4, batch_size=batch_size, augment=augment, device="cpu", return_parameters=True, seed=3, **settings
    )


def patches(batch):
    """What identifies each patch of a batch, to the byte."""
    for row, (volume, k) in enumerate(zip(batch["volume"], batch["index"].tolist())):
        p = batch["parameters"][row]
        yield (
            batch["epoch"],
            volume,
            k,
            tuple(batch["start"][row].tolist()),
            p["affine"].tobytes(),
            p["control_points"].tobytes(),
            batch["image"][row].numpy().tobytes(),
            batch["label"][row].numpy().tobytes(),
        )


def epochs(queue, number=2):
    with queue:
        return [[patch for batch in queue for patch in patches(batch)] for _ in range(number)]


TRUTH = epochs(make())


@pytest.mark.parametrize(
    "settings",
    [
        dict(workers=1),
        dict(workers=4),
        dict(workers=2, prefetch=1),
        dict(workers=1, prefetch=4),
        dict(batch_size=1),
        dict(batch_size=8),
        dict(lookahead=3),
        dict(lookahead=0, patch_queue_size=0),
        dict(patch_queue_size=20),
    ],
    ids=str,
)
def test_the_same_patches_in_the_same_order(settings):
    assert epochs(make(**settings)) == TRUTH


def test_backends_agree_on_everything_but_rounding():
    with make() as by_torch, make(backend="numba") as by_numba:
        for a, b in zip(by_torch, by_numba):
            assert a["volume"] == b["volume"] and torch.equal(a["start"], b["start"])
            for p, q in zip(a["parameters"], b["parameters"]):
                assert (p["affine"] == q["affine"]).all() and (p["control_points"] == q["control_points"]).all()
            assert (a["image"] - b["image"]).abs().max() < 1e-4
            assert (a["label"] == b["label"]).float().mean() > 0.999


def test_one_rank_or_eight_give_the_same_patches():
    """H62 (rank 2 alone reproduces its own), padding apart: k >= N_v marks a repeat."""
    for epoch in range(2):
        ranks = [epochs(make(rank=rank, world_size=8))[epoch] for rank in range(8)]
        assert len({len(rank) for rank in ranks}) == 1
        together = [patch for rank in ranks for patch in rank if patch[2] < 4]
        assert sorted(together) == sorted(TRUTH[epoch])
        assert all(set(a) != set(b) for n, a in enumerate(ranks) for b in ranks[:n])
    assert epochs(make(rank=2, world_size=8))[1] == ranks[2]


@pytest.mark.parametrize("strategy", ["sliding", "reuse_incomplete", "basic"])
@pytest.mark.parametrize("augment_per", ["patch", "volume"])
def test_a_resumed_queue_continues_with_the_very_next_batch(strategy, augment_per):
    """At every batch of a short epoch, and two epochs beyond, to the byte."""
    settings = {"strategy": strategy, "augment_per": augment_per}
    truth, states = [], []
    with make(**settings) as queue:
        for epoch in range(3):
            for batch in queue:
                truth.append(list(patches(batch)))
                states.append(json.loads(json.dumps(queue.state_dict())))
            per_epoch = len(truth) // (epoch + 1)
    assert len(json.dumps(states[0])) < 4000
    for number in [*range(per_epoch), per_epoch + 3]:
        with make(workers=1 if number == 2 else 0, lookahead=number % 3, **settings) as queue:
            queue.load_state_dict(states[number])
            rest = []
            while len(rest) < len(truth) - number - 1:
                rest += [list(patches(batch)) for batch in queue]
            assert rest == truth[number + 1 :]


def test_resuming_reloads_only_what_is_resident_then():
    class Counting(Noise):
        asked = []

        def __getitem__(self, index):
            self.asked.append(index)
            return super().__getitem__(index)

    with make(dataset=Counting(12), lookahead=0, patch_queue_size=0) as queue:
        batches = iter(queue)
        for _ in range(12):
            next(batches)
        state = queue.state_dict()
    Counting.asked.clear()
    with make(dataset=Counting(12), lookahead=0, patch_queue_size=0) as queue:
        queue.load_state_dict(state)
        next(iter(queue))
        assert len(Counting.asked) <= 4 and len(set(Counting.asked)) == len(Counting.asked)


def test_a_state_keeps_its_meaning_after_breaks_and_set_epoch():
    with make() as queue:
        assert queue.state_dict()["epoch"] == 0 and queue.state_dict()["batches"] == 0
        for number, _ in enumerate(queue):
            if number == 3:
                break
        state = queue.state_dict()
        assert (state["epoch"], state["batches"]) == (0, 4)
        following = [b["volume"] for b in queue]
        assert (queue.state_dict()["epoch"], queue.state_dict()["batches"]) == (2, 0)
    with make() as queue:
        queue.load_state_dict(state)
        queue.set_epoch(0)  # as Lightning does; the position stays
        first = next(iter(queue))
        assert list(patches(first)) == TRUTH[0][12:15]
        queue.load_state_dict(state)
        queue.set_epoch(1)
        assert [b["volume"] for b in queue] == following


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(batch_size=4), "batch_size"),
        (dict(dataset=Noise(6)), "ids"),
        (dict(strategy="basic"), "strategy"),
        (dict(volumes_in_memory=4), "capacity"),
        (dict(rank=0, world_size=2), "world_size"),
        (dict(spacing=2), "spacing"),
        (dict(sampler=type("Other", (gq.UniformSampler,), {})()), "sampler"),
        (dict(shuffle=False), "shuffle"),
    ],
    ids=str,
)
def test_a_state_of_another_queue_is_refused_by_name(change, name):
    with make() as queue:
        state = queue.state_dict()
    with make(**change) as other, pytest.raises(ValueError, match=f"another queue.*{name}"):
        other.load_state_dict(state)


def test_a_state_is_versioned_and_the_same_on_every_rank():
    states = []
    for rank in range(2):
        with make(rank=rank, world_size=2) as queue:
            next(iter(queue))
            states.append(queue.state_dict())
    assert states[0] == states[1]
    with make() as queue, pytest.raises(ValueError, match="version 99"):
        queue.load_state_dict(queue.state_dict() | {"version": 99})


def test_streams_that_cannot_be_found_again_are_refused():
    foreign = torch.utils.data.DataLoader(Noise(), batch_size=1, collate_fn=lambda items: items[0])
    with gq.GPUQueue(foreign, 5, 4, device="cpu") as queue, pytest.raises(ValueError, match="volume_loader"):
        queue.state_dict()
    with make(strategy=(c for c in [])) as queue, pytest.raises(ValueError, match="generator"):
        queue.state_dict()


@pytest.mark.parametrize("patches_done", range(9))
def test_going_on_from_anywhere_is_a_valid_stream_with_the_same_patches(patches_done):
    text = "L0 P0 L1 A0 P0 P1 D0 L2 P1 D1 L0 P2 P0 A2 P2 P0 D0 D2"
    whole = parse(text)
    position = fast_forward(whole, patches_done)
    rest = list(checked(position.commands))
    done = [c.volume for c in whole if c.op == "P"]
    assert [c.volume for c in rest if c.op == "P"] == done[patches_done:]
    assert sum(position.consumed.values()) == min(patches_done, 8)
    assert check(rest).most_resident <= check(whole).most_resident
