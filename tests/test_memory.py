"""Nothing grows: descriptors, threads, processes, shared memory, resident memory of the whole process tree.

Each test measures in a process of its own, where nothing else allocates; `-m soak` runs the long form.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

START = """
import ctypes, gc, json, multiprocessing, os, resource, threading, time
import numpy as np, psutil, torch, gpuqueue as gq
torch.set_num_threads(1)

MB = 2**20

def tree():
    return [psutil.Process(), *psutil.Process().children(recursive=True)]

def pss():
    ctypes.CDLL(None).malloc_trim(0)  # what is free but not yet given back is no growth
    return sum(p.memory_full_info().pss for p in tree()) / MB

def rss():
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss / MB

def files():
    return len(os.listdir("/proc/self/fd"))

class Made(torch.utils.data.Dataset):
    def __init__(self, n, side):
        self.n, self.side, self.ids = n, side, [f"v{i}" for i in range(n)]
    def __len__(self):
        return self.n
    def __getitem__(self, index):
        return gq.Volume(f"v{index}", {"image": np.full((self.side,) * 3, index, np.float32)})

def queue_of(dataset, workers, patches, **settings):
    settings = {"batch_size": 4, "device": "cpu"} | settings
    return gq.GPUQueue(gq.volume_loader(dataset, num_workers=workers), 16, patches, **settings)
"""


def measured(script: str, limit: float = 120, **values):
    """What the script prints last, as JSON. `values` are set before it runs."""
    lines = [START, *[f"{name} = {value!r}" for name, value in values.items()], textwrap.dedent(script)]
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=limit)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("kept_in_memory", [False, True])
def test_kept_batches_cost_no_descriptor(kept_in_memory):
    """H27 with its values: limit 256, 2 workers, 400 volumes of 16^3, every batch kept. The volumes of a list, which
    workers keep too, cost them none either."""
    told = measured(
        """
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        dataset = Made(400, 16)
        with queue_of([dataset[i] for i in range(400)] if kept_in_memory else dataset, 2, 1) as queue:
            kept = []
            for _ in range(2):
                for batch in queue:
                    kept.append(batch)
                    if len(kept) == 1:
                        first = files()
            worker = max(p.num_fds() for p in tree()[1:])
            print(json.dumps([len(kept), first, files(), worker]))
        """,
        kept_in_memory=kept_in_memory,
    )
    batches, first, last, worker = told
    assert batches == 200 and abs(last - first) <= 20 and worker < 60


SCALES = [pytest.param(30_000, id="short"), pytest.param(300_000, id="whole", marks=pytest.mark.soak)]


@pytest.mark.parametrize("entries", SCALES)
def test_looking_entries_up_in_workers_copies_no_memory(entries):
    """H28: paths of 200 characters, 4 processes that look up every entry and id twice; with all 300000 they may grow by
    60 MB together, with fewer by as much less."""
    grown = measured(
        """
        from gpuqueue.volumes.loader import Reader, ReadSettings
        class Paths(gq.VolumeDataset):
            def __getitem__(self, index):
                self._entries[index]["image"]
                raise KeyError  # so that nothing is made, or sent
        dataset = Paths([{"id": f"{i:0200}", "image": f"{i:0200}.nii"} for i in range(entries)])
        settings = ReadSettings(dataset.ids, None, True, None)
        loader = gq.volume_loader(dataset, num_workers=1)
        reading = Reader(loader, settings, iter(()), 0)._loader.dataset  # what a worker gets
        def uss():
            return psutil.Process().memory_full_info().uss / MB
        def look_up(answers):
            for index in range(1000):
                reading.settings.id_of(index), reading.settings.guarded(index, lambda: reading.dataset[index])
            before = uss()
            for _ in range(2):
                for index in range(entries):
                    reading.settings.id_of(index), reading.settings.guarded(index, lambda: reading.dataset[index])
            answers.put(uss() - before)
        context = multiprocessing.get_context("fork")
        answers = context.Queue()
        workers = [context.Process(target=look_up, args=(answers,)) for _ in range(4)]
        for worker in workers: worker.start()
        print(json.dumps(sum(answers.get() for _ in workers)))
        for worker in workers: worker.join()
        """,
        entries=entries,
    )
    assert grown < 60 * entries / 300_000, f"{grown:.1f} MB"


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.soak)])  # the long run below has workers
def test_memory_is_flat_over_epochs(workers):
    """H29 with its values: 100 volumes of 64^3, 10 epochs, without the garbage collector; early breaks among them."""
    grown, threads, open_files = measured(
        """
        gc.disable()
        with queue_of(Made(100, 64), workers, 4) as queue:
            sizes = []
            for epoch in range(10):
                for batch in queue:
                    pass
                for _ in range(3):
                    next(iter(queue))
                sizes.append((rss(), threading.active_count(), files()))
        print(json.dumps([last - first for first, last in zip(sizes[1], sizes[-1])]))
        """,
        workers=workers,
    )
    assert grown < 30 and threads <= 1 and abs(open_files) <= 2


def test_handfuls_of_volumes_leave_with_their_batches():
    """H29: 8 MB in each handful, 60 of them, without the garbage collector."""
    grown = measured(
        """
        gc.disable()
        dataset = Made(480, 64)
        with queue_of(dataset, 0, 4) as queue:
            for handful in range(60):
                for batch in queue.patches([dataset[8 * handful + i] for i in range(8)]):
                    pass
                if handful == 9:
                    before = rss()
        print(json.dumps(rss() - before))
        """
    )
    assert grown < 30


def test_a_patch_costs_its_own_size_whatever_its_volume():
    """H30 with its values: 1000 patches of 16^3 of a volume of 256^3 or 64^3: memory beyond them, and the ratio of the
    times, with an affine map as well as without."""
    told = measured(
        """
        def run(side, augment):
            volume = gq.Volume("a", {"image": np.zeros((side,) * 3, np.float32)})
            with queue_of([volume], 0, 1000, batch_size=20, augment=augment) as queue:
                for batch in queue:  # compiles
                    pass
                before = rss()
                with open("/proc/self/clear_refs", "w") as peak:
                    peak.write("5")
                began, kept = time.perf_counter(), []
                for batch in queue:
                    kept.append(batch)
                seconds = time.perf_counter() - began
            peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
            return int(peak.split()[1]) / 1024 - before - 16, seconds
        def ratio(augment):
            (extra, large), (_, small) = run(256, augment), run(64, augment)
            return extra, min(large, run(256, augment)[1]) / min(small, run(64, augment)[1])
        print(json.dumps([ratio([]), ratio([gq.RandomAffine()])]))
        """
    )
    for extra, ratio in told:
        assert extra < 40 and ratio < 3, (extra, ratio)


def test_two_thousand_tiny_volumes_come_whole():
    told = measured(
        """
        from collections import Counter
        began, seen = time.perf_counter(), Counter()
        with queue_of(Made(2000, 16), 2, 1, batch_size=16) as queue:
            for batch in queue:
                seen.update(batch["volume"])
                assert (batch["image"].amax((1, 2, 3, 4)) == torch.tensor([int(v[1:]) for v in batch["volume"]])).all()
        print(json.dumps([len(seen), sum(seen.values()), files(), len(tree())]))
        """
    )
    assert told[:2] == [2000, 2000] and told[2] < 30 and told[3] == 1


LENGTHS = [pytest.param(6, 20, id="short"), pytest.param(20, 60, id="long", marks=pytest.mark.soak)]


@pytest.mark.parametrize("epochs, volumes", LENGTHS)
def test_a_long_run_is_as_small_at_its_end_as_at_its_start(epochs, volumes, tmp_path):
    """Promise 7: PSS of the process tree from the second epoch on grows by less than 20 MB, descriptors, threads and
    processes are equal, shared memory is as before; files, two workers, augmentation, batches with early breaks."""
    told = measured(
        """
        import nibabel
        entries = []
        for index in range(volumes):
            path = f"{folder}/case{index}.nii.gz"
            voxels = np.random.default_rng(index).integers(0, 2000, (72, 64, 60 + index % 7)).astype(np.int16)
            nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)
            label = f"{folder}/label{index}.nii.gz"
            nibabel.save(nibabel.Nifti1Image((voxels > 1000).astype(np.uint8), np.eye(4)), label)
            entries.append({"image": path, "label": label})
        def shared():
            return [name for name in os.listdir("/dev/shm") if any(f"torch_{p.pid}_" in name for p in tree())]
        augment = [gq.RandomFlip(), gq.RandomAffine(), gq.RandomElasticDeformation()]
        sizes = []
        with queue_of(gq.VolumeDataset(entries), 2, 8, augment=augment) as queue:
            for epoch in range(epochs):
                for batch in queue:
                    pass
                time.sleep(0.3)  # what was read ahead is in
                sizes.append((pss(), threading.active_count(), files(), len(tree()), len(shared())))
                for number, batch in enumerate(queue):
                    if number == epoch:
                        break
        del batch
        print(json.dumps([sizes[1], sizes[-1], shared(), len(tree())]))
        """,
        limit=280,
        epochs=epochs,
        volumes=volumes,
        folder=str(tmp_path),
    )
    (small, *before), (large, *after), left, processes = told
    assert large - small < 20, f"{large - small:.1f} MB"
    assert after[0] <= before[0] and abs(after[1] - before[1]) <= 2 and after[2:] == before[2:]
    assert left == [] and processes == 1
