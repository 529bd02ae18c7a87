"""Ranks: shares of an epoch, weights, and two real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import pytest

import gpuqueue as gq


def volumes(n):
    return [gq.Volume(f"v{i}", {"image": np.full((6, 6, 6), i, np.float32)}) for i in range(n)]


def queue_of(n, patches=3, batch_size=4, **settings):
    return gq.GPUQueue(volumes(n), 4, patches, batch_size=batch_size, device="cpu", **settings)


@pytest.mark.parametrize("uneven", ["pad", "drop"])
def test_all_ranks_deliver_the_same_number_of_batches(uneven):
    """H61: worlds 1 to 8, 1 to 17 volumes of three patches, batch 4; equal to len()."""
    for world in range(1, 9):
        for n in (1, 2, 5, 8, 17):
            if uneven == "drop" and 3 * n < world:
                with pytest.raises(ValueError, match="ranks"):
                    queue_of(n, rank=0, world_size=world, uneven=uneven)
                continue
            counted = set()
            for rank in range(world):
                with queue_of(n, rank=rank, world_size=world, uneven=uneven, patch_queue_size=0) as queue:
                    counted |= {(len(queue), sum(1 for _ in queue))}
            assert len(counted) == 1
            ((length, batches),) = counted
            assert length == batches > 0


def test_each_volume_is_read_by_one_rank_where_the_cut_allows():
    """H60: 12 volumes over 3 ranks with injected places: disjoint sets of four, each read once an epoch in all."""
    seen, loads = [], 0
    for rank in range(3):
        with queue_of(12, rank=rank, world_size=3, lookahead=0, patch_queue_size=0) as queue:
            seen.append({v for batch in queue for v in batch["volume"]})
            loads += queue.stats().loads
    assert [len(s) for s in seen] == [4, 4, 4] and len(set.union(*seen)) == 12 and loads == 12


def test_validation_sees_every_volume_once_over_all_ranks():
    """One patch each, no shuffling: repeats by padding are fewer than the ranks and marked by k >= N_v."""
    for world in (1, 2, 3, 5):
        seen, repeats = Counter(), 0
        for rank in range(world):
            with queue_of(7, 1, 1, shuffle=False, same_every_epoch=True, rank=rank, world_size=world) as queue:
                for batch in queue:
                    if batch["index"][0] < 1:
                        seen.update(batch["volume"])
                    else:
                        repeats += 1
        assert seen == {f"v{i}": 1 for i in range(7)} and repeats < world


def test_the_environment_names_the_rank(monkeypatch):
    monkeypatch.setenv("RANK", "1"), monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        queue_of(5) as by_environment,
        queue_of(5, rank=1, world_size=2) as given,
        queue_of(5, rank=0, world_size=1) as one,
    ):
        assert [b["volume"] for b in by_environment] == [b["volume"] for b in given]
        assert len(one) == 4 and len(given) == 2
    with pytest.raises(ValueError, match="rank=2"):
        queue_of(5, rank=2, world_size=2)


def shares(**settings):
    with queue_of(6, 20, 8, **settings) as queue:
        return Counter(v for batch in queue for v in batch["volume"])


@pytest.mark.parametrize("strategy", ["sliding", "basic", "sequential", "reuse_incomplete"])
def test_weights_give_exact_shares_by_id_and_by_group(strategy):
    by_id = shares(volume_weights={"v0": 3, "v1": 0} | {f"v{i}": 1 for i in range(2, 6)}, strategy=strategy)
    total = 120
    assert sum(by_id.values()) == total and by_id["v1"] == 0
    assert by_id["v0"] == pytest.approx(total * 3 / 7, abs=1) and by_id["v5"] == pytest.approx(total / 7, abs=1)
    groups = (lambda v: "rare" if v == "v5" else "common", {"rare": 1, "common": 1})
    by_group = shares(volume_weights=groups, strategy=strategy)
    assert by_group["v5"] == 60 and sum(by_group.values()) == total
    with pytest.raises(ValueError, match="'v2'"):
        queue_of(6, volume_weights={"v0": 1, "v1": 1})
    with pytest.raises(ValueError, match="group 'x'"):
        queue_of(6, volume_weights=(lambda v: "x", {"y": 1}))


TRAIN = textwrap.dedent(
    """
    import json, os, sys
    import numpy as np, torch, gpuqueue as gq
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    folder, stop_after = sys.argv[1], int(sys.argv[2])
    volumes = [gq.Volume(f"v{i}", {"image": np.full((6, 6, 6), i, np.float32)}) for i in range(5)]
    queue = gq.GPUQueue(volumes, 4, 3, batch_size=2, device="cpu", augment=[gq.RandomFlip()])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv3d(1, 1, 3))
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    path = f"{folder}/state{rank}.json"
    if os.path.exists(path):
        queue.load_state_dict(json.load(open(path)))
    log, done = open(f"{folder}/log{rank}.txt", "a"), 0
    while queue.state_dict()["epoch"] < 3:
        for batch in queue:
            model(batch["image"]).square().mean().backward()
            optimiser.step(); optimiser.zero_grad()
            print(batch["epoch"], batch["volume"], batch["index"].tolist(), file=log, flush=True)
            with open(path, "w") as file: json.dump(queue.state_dict(), file)
            done += 1
            if done == stop_after:
                torch.distributed.barrier(); os._exit(7)
    queue.close()
    torch.distributed.destroy_process_group()
    """
)


def torchrun(script, folder, stop_after):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, folder]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, str(stop_after)], capture_output=True, text=True, timeout=200, env=environment)


def test_two_processes_train_together_and_resume_where_they_were_killed(tmp_path):
    """DistributedDataParallel over an odd number of volumes, by gloo; killed in the second epoch, resumed, and equal
    to a run that was never interrupted."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    logs = {}
    for name, stops in (("whole", [-1]), ("killed", [5, -1])):
        (tmp_path / name).mkdir()
        for stop in stops:
            ran = torchrun(str(script), str(tmp_path / name), stop)
            assert (ran.returncode == 0) == (stop == -1), ran.stderr
        logs[name] = [(tmp_path / name / f"log{rank}.txt").read_text() for rank in range(2)]
    assert logs["killed"] == logs["whole"]
    assert logs["whole"][0] != logs["whole"][1]
    assert len(logs["whole"][0].splitlines()) == len(logs["whole"][1].splitlines()) == 3 * 4
    assert json.loads((tmp_path / "whole" / "state0.json").read_text())["epoch"] == 2
