"""The CUDA ordering protocol without a GPU: late copies and gathers, over the real residents and queue."""

from __future__ import annotations

import fake_cuda
import numpy as np
import pytest
import torch

import gpuqueue as gq
from gpuqueue.patches.batch import PatchMaker
from gpuqueue.volumes import residents
from gpuqueue.volumes.residents import CudaMemory

ORDERS = ["copies last", "consumer last", 1, 2, 3]


def run_queue(monkeypatch, order, volumes, **settings):
    """Two epochs on the fake device; returns (id, values) of every patch, read after everything has run."""
    with fake_cuda.fake_cuda(monkeypatch, order) as device:
        monkeypatch.setattr(residents, "memory_for", lambda _: CudaMemory(torch.device("cpu")))
        monkeypatch.setattr("gpuqueue.engine.memory_for", residents.memory_for)
        monkeypatch.setattr(PatchMaker, "gather_into", deferred_gather(device))
        settings = {"volumes_in_memory": 2, "batch_size": 3, "patch_queue_size": 0} | settings
        seen = []
        with gq.GPUQueue(volumes, 4, 6, device="cpu", **settings) as queue:
            for _ in range(2):
                for batch in queue:
                    seen.append((batch["volume"], batch["image"]))
                    for _ in range(device.random.randrange(4)):
                        device.step()
            device.run_until(lambda: not any(stream.work for stream in device.streams))
        return seen


def deferred_gather(device, plain=PatchMaker.gather_into):
    def gather_into(self, patches, out):
        device.launch(lambda: plain(self, patches, out))

    return gather_into


def volumes(n=6, order="C"):
    return [gq.Volume(i, {"image": np.full((8, 9, 10 + i % 2), i, np.int16, order=order)}) for i in range(1, n + 1)]


def mismatches(seen):
    return sum(int((patch != int(v)).any()) for ids, images in seen for v, patch in zip(ids, images))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lies", ["C", "F"])
def test_every_patch_shows_its_own_volume_whatever_runs_late(monkeypatch, order, lies):
    """H56: constant-id volumes through few reused blocks; none is read early or overwritten early."""
    seen = run_queue(monkeypatch, order, volumes(order=lies))
    assert sum(len(ids) for ids, _ in seen) == 72 and mismatches(seen) == 0


def without_ready(memory, resident):
    """`wait` with its wait removed."""


def without_free(memory, resident):
    """`release` that forgets its event."""
    for block in resident.blocks:
        memory._idle.append(block)
    resident.arrays, resident.blocks = {}, []


@pytest.mark.parametrize("name, broken", [("wait", without_ready), ("release", without_free)])
def test_a_removed_wait_is_caught(monkeypatch, name, broken):
    """Each wait of the protocol is needed: without it some order gives wrong patches."""
    monkeypatch.setattr(CudaMemory, name, broken)
    assert any(mismatches(run_queue(monkeypatch, order, volumes())) for order in ORDERS)


def test_blocks_are_reused_and_close_gives_them_back(monkeypatch):
    made = []
    with fake_cuda.fake_cuda(monkeypatch, "consumer last") as device:
        memory = CudaMemory(torch.device("cpu"))
        for turn in range(20):
            resident = memory.load(volumes()[turn % 2], None)
            memory.wait(resident)
            made.append(resident.blocks[0].buffer.data_ptr())
            assert torch.equal(resident.arrays["image"], resident.arrays["image"])
            memory.release(resident)
        assert len(set(made)) <= 2
        memory.close()
        assert not any(stream.work for stream in device.streams) and not memory._idle
