"""Ways in which a queue ends, each run by name in a process of its own; the tests read what it prints, a line of JSON.

python endings.py <workers> <fork or spawn> <patch_queue_size or null> <folder> <ending> ...
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import glob
import json
import multiprocessing
import multiprocessing.resource_tracker
import os
import pathlib
import signal
import sys
import threading
import time
from collections import Counter

import nibabel
import numpy as np
import torch

import gpuqueue as gq

LIMIT = 90  # seconds for all endings of one call
POOL = "gpuqueue-gather_"  # the numba backend's threads, which live as long as the process


class TakesTwo(Exception):
    """An error whose constructor a DataLoader cannot call."""

    def __init__(self, *, a, b):
        super().__init__("special 42")


class BadText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Volumes(torch.utils.data.Dataset):
    """Six constant volumes; reading the fourth does what `fault` says, until the file `repaired` exists."""

    ids = [f"v{i}" for i in range(6)]

    def __init__(self, fault="", repaired="/"):
        self.fault, self.repaired = fault, repaired

    def __len__(self):
        return 6

    def __getitem__(self, index):
        volume = gq.Volume(f"v{index}", {"image": np.full((8, 8, 8), index, np.float32)})
        if index != 3 or os.path.exists(self.repaired):
            return volume
        return getattr(self, self.fault.replace(" ", "_"), lambda v: v)(volume)

    def exception(self, volume):
        secret_array = np.array([1.0, np.nan, 5.0])  # for the summary of locals
        raise TakesTwo(a=1, b=len(secret_array))

    def bad_text(self, volume):
        raise BadText

    def missing_file(self, volume):
        nibabel.load("x.nii.gz")

    def sys_exit(self, volume):
        sys.exit("stop")

    def stop_iteration(self, volume):
        raise StopIteration

    def killed(self, volume):
        os.kill(os.getpid(), signal.SIGKILL)

    def exits(self, volume):
        os._exit(3)

    def hang(self, volume):
        time.sleep(1000)

    def hang_in_compiled_code(self, volume):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as code that never looks at signals
        time.sleep(1000)

    def stopped(self, volume):
        os.kill(os.getpid(), signal.SIGSTOP)

    def interrupt(self, volume):
        raise KeyboardInterrupt

    def flat(self, volume):
        return {"image": np.zeros((4, 4))}

    def wrong_shape(self, volume):
        return {"image": np.zeros((1, 2, 3, 4, 5, 6))}

    def nan(self, volume):
        return gq.Volume("v3", {"image": np.full((8, 8, 8), np.nan)})

    def channels(self, volume):
        return gq.Volume("v3", {"image": np.zeros((2, 8, 8, 8))})

    def not_cpu(self, volume):
        return {"image": torch.zeros(1, 8, 8, 8, device="meta")}

    def lambda_inside(self, volume):
        volume.note = lambda: 0
        return volume

    def nothing(self, volume):
        return None


def files(folder, damage):
    """Six .nii.gz volumes, the fourth of them damaged."""
    entries = []
    for index in range(6):
        path = pathlib.Path(folder) / f"case{index}.nii.gz"
        voxels = np.random.default_rng(index).integers(0, 999, (8, 8, 8))
        nibabel.save(nibabel.Nifti1Image(voxels.astype(np.int16), np.eye(4)), path)
        entries.append({"id": f"v{index}", "image": path})
    path = entries[3]["image"]
    whole = path.read_bytes()
    if damage == "truncated gz":
        path.write_bytes(whole[: len(whole) // 2])
    else:
        path.write_bytes(whole[:400] + bytes(b ^ 255 for b in whole[400:420]) + whole[420:])
    return gq.VolumeDataset(entries), path, whole


def bad_stage(batch):
    if 2 in batch["index"].tolist():
        raise ZeroDivisionError("stage broke")
    return batch


def forgetful_stage(batch):
    return None


class BadSampler(gq.UniformSampler):
    def draw(self, prepared, grid, patch_size, random):
        raise KeyError("no such class")


def left_behind(before):
    """Threads, children, descriptors and shared memory that were not there before; waits a little for them to go."""
    deadline = time.monotonic() + 8
    while True:
        now = resources()
        more = {name: sorted(set(now[name]) - set(before[name])) for name in now}
        if not any(more.values()) or time.monotonic() > deadline:
            return {name: value for name, value in more.items() if value}
        time.sleep(0.05)


def resources():
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            descriptors.append(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    descriptors = [d for d in descriptors if "/proc/" not in d and "/dev/pts" not in d]
    return {
        "threads": [t.name for t in threading.enumerate() if "ueue" in t.name and not t.name.startswith(POOL)],
        "children": [child.name for child in multiprocessing.active_children()],
        "descriptors": descriptors,
        "shared memory": [path for path in glob.glob("/dev/shm/torch_*") if f"_{os.getpid()}_" in path],
    }


def one_epoch(queue, act=lambda number: None):
    """What an epoch gave: its counts, or its error."""
    began = time.monotonic()
    told = {}
    try:
        seen = Counter()
        for number, batch in enumerate(queue):
            for image, volume in zip(batch["image"], batch["volume"]):
                seen[volume] += 1
                assert image.min() < image.max() or image.max() == int(volume[1:])
            act(number)
        told["counts"] = dict(sorted(seen.items()))
    except BaseException as error:
        told |= {
            "error": type(error).__name__,
            "text": str(error),
            "cause": type(error.__cause__).__name__,
            "volume": getattr(error, "volume", None),
            "stage": getattr(error, "stage", None),
        }
    return told | {"seconds": time.monotonic() - began}


class Consumer(Exception):
    pass


def leave(number):
    if number == 1:
        raise Consumer


def run(name, workers, context, size, folder):
    """One ending: an epoch, the next one, then the queue is closed, or dropped."""
    before = resources()
    repaired = os.path.join(folder, f"repaired {name}")
    options = {"multiprocessing_context": context} if workers else {}
    path = None
    if name in ("corrupt file", "truncated gz"):
        dataset, path, whole = files(folder, name)
    else:
        dataset = Volumes(name, repaired)
    timeout = 1 if name in ("hang", "hang in compiled code", "stopped") else 300
    queue = gq.GPUQueue(
        gq.volume_loader(dataset, num_workers=workers, timeout=timeout, **options), 4, 4, batch_size=4, device="cpu",
        volumes_in_memory=3, patch_queue_size=size, sampler=BadSampler() if name == "bad sampler" else None,
        augment={"bad stage": [bad_stage], "forgetful stage": [forgetful_stage]}.get(name, []),
    )  # fmt: skip
    first = {"break": break_early, "consumer exception": lambda q: one_epoch(q, leave)}.get(name, one_epoch)(queue)
    pathlib.Path(repaired).touch()
    if path is not None:
        path.write_bytes(whole)
    second = one_epoch(queue)
    began = time.monotonic()
    if name == "dropped":
        iterator = iter(queue)
        next(iterator)
        del iterator, queue
    else:
        queue.close()
        queue.close()
    told = {"first": first, "second": second, "close": time.monotonic() - began}
    return told | {"left": left_behind(before)}


def break_early(queue):
    for number, _ in enumerate(queue):
        if number == 1:
            break
    return {}


def consume_for_long(queue):
    with contextlib.suppress(gq.QueueClosed):  # as it is told while the interpreter exits
        for _ in range(100):
            for _ in queue:
                time.sleep(0.05)


def live(kind, workers, context, size):
    """A queue in use when the process ends, or is told to; prints its workers' ids once it runs."""
    slow = Volumes("hang" if kind == "hanging" else "")
    options = {"multiprocessing_context": context} if workers else {}
    queue = gq.GPUQueue(
        gq.volume_loader(slow, num_workers=workers, **options), 4, 4, batch_size=4, device="cpu", shuffle=False,
        volumes_in_memory=2, lookahead=4, patch_queue_size=size,
    )  # fmt: skip
    iterator = iter(queue)
    next(iterator)
    if kind == "hanging":
        time.sleep(1)  # until the fourth volume is being read
    print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
    if kind == "held":
        return iterator  # to the global name below
    if kind == "exit inside":
        for _ in iterator:
            sys.exit(5)
    if kind == "daemon thread":
        threading.Thread(target=consume_for_long, args=(queue,), daemon=True).start()
        time.sleep(0.3)
        return None
    try:
        for _ in range(10000):
            for _ in queue:
                time.sleep(0.001)
    except KeyboardInterrupt:
        print(json.dumps(one_epoch(queue) | {"children": len(multiprocessing.active_children())}), flush=True)
    return None


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    workers, context, size, folder = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]
    if folder == "live":
        held = live(sys.argv[5], workers, context, size)
        sys.exit()
    gc.disable()  # nothing may depend on the collector
    if context == "spawn":
        multiprocessing.resource_tracker.ensure_running()  # one pipe, for the life of the process
    for name in sys.argv[5:]:
        print(json.dumps({"name": name} | run(name, workers, context, size, folder)), flush=True)
