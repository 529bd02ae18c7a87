"""However a queue ends, it ends soon, with the first cause, and leaves nothing behind: DESIGN's promises 6 and 7.

Whatever might hang runs in a process of its own, under a limit; `endings.py` says what happens there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from endings import TakesTwo

import gpuqueue as gq
from gpuqueue.stream.strategies import basic

SCRIPT = str(pathlib.Path(__file__).with_name("endings.py"))
SOON = 8.0  # seconds in which every ending is over, other than a limit on reading
WHOLE = {f"v{n}": 4 for n in range(6)}

# ending: type of the error, what its text must hold, and whether the queue can go on afterwards
READING = {
    "corrupt file": ("StageError", ["'v3'", "VolumeError", "case3.nii.gz", "CRC"], True),
    "truncated gz": ("StageError", ["'v3'", "VolumeError", "case3.nii.gz", "EOFError"], True),
    "wrong shape": ("StageError", ["'v3'", "(1, 2, 3, 4, 5, 6)"], True),
    "flat": ("StageError", ["'v3'", "no arrays"], True),
    "nan": ("StageError", ["'v3'", "512 of 512 voxels are NaN", "on_nonfinite"], True),
    "channels": ("VolumeError", ["'v3'", "2 channels", "1 channels"], False),
    "not cpu": ("StageError", ["'v3'", "meta", "return CPU data"], True),  # H55: as CUDA tensors are refused
    "nothing": ("StageError", ["'v3'", "NoneType"], True),
    "exception": ("StageError", ["'v3'", "TakesTwo", "special 42"], True),  # H23
    "bad text": ("StageError", ["'v3'", "BadText"], True),
    "missing file": ("StageError", ["'v3'", "FileNotFoundError", "x.nii.gz"], True),  # H25
    "sys exit": ("StageError", ["'v3'", "SystemExit: stop"], True),
    "stop iteration": ("StageError", ["'v3'", "StopIteration"], True),
}
CONSUMING = {
    "bad stage": ("StageError", ["ZeroDivisionError: stage broke", "bad_stage", "'v"], None),
    "forgetful stage": ("StageError", ["forgetful_stage", "NoneType", "'v"], None),
    "bad sampler": ("StageError", ["sampling failed", "no such class", "'v"], None),
    "consumer exception": ("Consumer", [], True),
    "break": (None, [], True),
    "dropped": (None, [], True),
}
OF_WORKERS = {
    "lambda inside": ("StageError", ["'v3'", "pickle", "lambda"], True),
    "killed": ("WorkerError", ["worker [01] died", "signal 9", "SIGKILL", "memory", "'v3'"], False),
    "exits": ("WorkerError", ["worker [01] died", "exit code 3", "'v3'"], False),  # H25
    "interrupt": ("WorkerError", ["worker [01] died", "'v3'"], False),
    "hang": ("WorkerError", ["'v3'", "longer than 1 s", "worker [01]", "timeout="], False),
    "hang in compiled code": ("WorkerError", ["'v3'", "longer than 1 s"], False),
    "stopped": ("WorkerError", ["'v3'", "longer than 1 s"], False),
}
HERE = {"interrupt": ("KeyboardInterrupt", [], None)}
CASES = [
    *[(0, "fork", size, name) for size in (0, None) for name in READING | CONSUMING | HERE],
    *[(2, "fork", None, name) for name in READING | CONSUMING | OF_WORKERS],
    *[
        (2, "fork", 0, name)
        for name in READING | CONSUMING | OF_WORKERS
        if name not in ("hang in compiled code", "stopped")
    ],
    *[(1, "spawn", None, name) for name in ("exception", "killed", "break")],
]


@functools.cache
def all_outcomes() -> dict[tuple, dict[str, dict]]:
    """What the script told of every ending of each kind of queue, some kinds at once: they mostly wait."""
    kinds = list(dict.fromkeys(case[:3] for case in CASES))
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(kinds, pool.map(run_script, kinds)))


def run_script(kind: tuple[int, str, int | None]) -> dict[str, dict]:
    """By ending; one after which the script stopped is missing."""
    workers, context, size = kind
    names = [case[3] for case in CASES if case[:3] == kind]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, SCRIPT, str(workers), context, json.dumps(size), folder, *names]
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=150)
    told = {line["name"]: line for line in map(json.loads, ran.stdout.splitlines())}
    return told | {"": {"return code": ran.returncode, "stderr": ran.stderr}}


@pytest.mark.parametrize("workers, context, size, name", CASES, ids=lambda value: str(value))
def test_every_ending_names_its_cause_soon_and_leaves_nothing(workers, context, size, name):
    """H23, H24, H25 and more: error, text, time, what is left, and whether the next epoch works."""
    told = all_outcomes()[workers, context, size]
    assert name in told, told[""]
    kind, words, goes_on = (READING | CONSUMING | (OF_WORKERS if workers else HERE))[name]
    first, second = told[name]["first"], told[name]["second"]
    assert first.get("error") == kind, first
    for word in words:
        assert re.search(re.escape(word).replace(re.escape("[01]"), "[01]"), first["text"]), first["text"]
    start = 30 if context == "spawn" else 0  # workers that import torch
    assert first.get("seconds", 0) < SOON + start and second["seconds"] < SOON and told[name]["close"] < SOON
    assert told[name]["left"] == {}
    if goes_on:
        assert second.get("counts") == WHOLE, second
    elif kind == "WorkerError":
        assert second["error"] == "QueueClosed" and first["text"] in second["text"]
    elif goes_on is False:
        assert second["error"] == kind


@pytest.mark.parametrize("size", [0, None])
def test_an_error_from_a_worker_tells_what_its_last_variables_were(size):
    told = all_outcomes()[2, "fork", size]
    text = told["exception"]["first"]["text"]
    assert "secret_array = ndarray (3,) float64 1 to 5, 1 not finite" in text and "In loader worker" in text
    assert text.splitlines()[-1] == "TakesTwo: special 42" and "loader.py" not in text
    lines = told["missing file"]["first"]["text"].splitlines()
    assert all("FileNotFoundError" in line and "x.nii.gz" in line for line in (lines[0], lines[-1]))  # H25


def test_endings_are_silent():
    for told in all_outcomes().values():
        assert told[""]["return code"] == 0 and not told[""]["stderr"].strip(), told[""]


# The process itself ends ---------------------------------------------------------------------------------------------


def start(
    kind: str, workers: int, size: int | None = None, context: str = "fork"
) -> tuple[subprocess.Popen, list[int]]:
    """A process with a queue in use, and the ids of its workers."""
    arguments = [sys.executable, SCRIPT, str(workers), context, json.dumps(size), "live", kind]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    line = process.stdout.readline()
    if not line:
        pytest.fail(process.communicate()[1])
    return process, json.loads(line)


def seconds_until_gone(pids: list[int], limit: float) -> float:
    """How long until none of these processes is alive."""
    began = time.monotonic()
    while [pid for pid in pids if is_alive(pid)] and time.monotonic() - began < limit:
        time.sleep(0.05)
    return time.monotonic() - began


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def finish(process: subprocess.Popen, pids: list[int], limit: float = 15) -> tuple[str, str]:
    """What it still printed; fails where it, or a process or shared memory of it, stays."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"the process did not end in {limit} s")
    assert seconds_until_gone(pids, limit) < limit, "workers outlive their parent"
    left = [p for p in os.listdir("/dev/shm") if any(p.startswith(f"torch_{pid}_") for pid in [process.pid, *pids])]
    assert not left
    return out, err


@pytest.mark.parametrize("workers, size", [(0, None), (2, 0), (2, None)])
def test_ctrl_c_reaches_the_consumer_and_the_next_epoch_works(workers, size):
    """As a terminal sends it: to the process and its workers."""
    process, pids = start("iterating", workers, size)
    assert len(pids) == workers
    time.sleep(0.3)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    out, err = finish(process, pids)
    assert time.monotonic() - began < SOON and process.returncode == 0 and err == ""
    told = json.loads(out)
    assert told["counts"] == WHOLE and told["children"] == workers


@pytest.mark.parametrize("kind, code, workers", [
    ("held", 0, 0), ("held", 0, 2), ("exit inside", 5, 2), ("daemon thread", 0, 2),
])  # fmt: skip
def test_the_interpreter_exits_with_a_queue_in_use(kind, code, workers):
    process, pids = start(kind, workers)
    out, err = finish(process, pids)
    assert (process.returncode, out, err) == (code, "", "")


@pytest.mark.parametrize("how, kind, context", [
    (signal.SIGTERM, "iterating", "fork"), (signal.SIGKILL, "hanging", "fork"), (signal.SIGKILL, "hanging", "spawn"),
])  # fmt: skip
def test_workers_end_with_their_parent(how, kind, context):
    """H26: within 15 s of the parent's death, in the middle of a read that hangs too."""
    process, pids = start(kind, 3 if context == "fork" else 1, None, context)
    assert pids and all(map(is_alive, pids))
    process.send_signal(how)
    finish(process, pids)
    assert process.returncode == -how


# Threads, forks, the garbage collector -------------------------------------------------------------------------------


class Tiny(torch.utils.data.Dataset):
    """Constant volumes; `read(index)` is called first."""

    def __init__(self, n=6, read=lambda index: None):
        self.n, self.read = n, read
        self.ids = [f"v{i}" for i in range(n)]

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        self.read(index)
        return gq.Volume(f"v{index}", {"image": np.full((8, 8, 8), index, np.float32)})


def queue_of(dataset, workers=0, loader=None, **settings):
    settings = {"batch_size": 4, "device": "cpu"} | settings
    return gq.GPUQueue(loader or gq.volume_loader(dataset, num_workers=workers), 4, 4, **settings)


def counted(batches):
    """Patches of each volume; every patch shows its own volume."""
    seen = Counter()
    for batch in batches:
        assert [int(image.mean()) for image in batch["image"]] == [int(v[1:]) for v in batch["volume"]]
        seen.update(batch["volume"])
    return dict(sorted(seen.items()))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [0, None])
def test_close_while_another_thread_waits_in_next(workers, size):
    """The waiting thread is told, soon; nothing is left (the fixture looks)."""
    queue = queue_of(Tiny(read=lambda index: time.sleep(0.2)), workers, patch_queue_size=size)
    told = []

    def consume():
        try:
            told.append(counted(queue))
        except gq.QueueClosed as error:
            told.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    time.sleep(0.3)
    began = time.monotonic()
    queue.close()
    consumer.join(SOON)
    assert time.monotonic() - began < SOON / 2 and isinstance(told[0], gq.QueueClosed)
    with pytest.raises(gq.QueueClosed):
        iter(queue)


@pytest.mark.parametrize("size", [0, None])
def test_a_new_iterator_in_another_thread_ends_the_old_one(size):
    queue = queue_of(Tiny(read=lambda index: time.sleep(0.1)), 0, patch_queue_size=size)
    told = []
    consumer = threading.Thread(target=lambda: told.append(sum(1 for _ in queue)))
    consumer.start()
    time.sleep(0.25)
    assert counted(queue) == WHOLE
    consumer.join(SOON)
    assert told[0] < 6
    queue.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_queues_live_side_by_side(workers):
    """Two in one loop, and two in two threads; each reads its own volumes."""
    a, b = (queue_of(Tiny(n), workers, volumes_in_memory=2, shuffle=n == 6) for n in (6, 9))
    for _ in range(2):
        pairs = list(itertools.zip_longest(a, b))
        assert counted(p for p, _ in pairs if p) == WHOLE and counted(q for _, q in pairs if q) == {
            f"v{n}": 4 for n in range(9)
        }
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda queue: [counted(queue) for _ in range(3)], (a, b)))
    assert results == [[WHOLE] * 3, [{f"v{n}": 4 for n in range(9)}] * 3]
    a.close()
    assert counted(b) == {f"v{n}": 4 for n in range(9)}
    b.close()


def garbage_queue(workers):
    """A queue under way that only the garbage collector can end; returns its engine."""
    queue = queue_of(Tiny(), workers)
    iterator = iter(queue)
    next(iterator)
    engine = queue._engine
    holder = [queue, iterator]
    holder.append(holder)
    return engine


@contextlib.contextmanager
def no_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["dataset", "stage", "own stage", "planning"])
def test_the_collector_may_end_a_queue_in_any_thread(where):
    """In the loading, the gathering, and the thread that starts workers; soon, with nothing to wait for."""
    collect = lambda *_: gc.collect()  # noqa: E731
    with no_collector():
        engine = garbage_queue(2)
        began = time.monotonic()
        if where == "own stage":
            gc.collect()
        stages = [lambda batch: [batch, collect()][0]] if where == "stage" else []
        strategy = (lambda *a: [collect(), basic(*a)][1]) if where == "planning" else "sliding"
        dataset = Tiny(read=collect if where == "dataset" else lambda index: None)
        workers = 2 if where == "planning" else 0
        with queue_of(dataset, workers, augment=stages, strategy=strategy) as queue:
            assert counted(queue) == WHOLE
        while not engine.closed or multiprocessing.active_children():
            assert time.monotonic() - began < SOON
            time.sleep(0.02)
        assert time.monotonic() - began < SOON


def test_a_stage_may_close_its_own_queue():
    """In the thread that gathers, which closing would wait for."""
    began = time.monotonic()
    queue = queue_of(Tiny(), 2, augment=[lambda batch: [batch, queue.close()][0]])
    with pytest.raises(gq.QueueClosed):
        list(queue)
    assert time.monotonic() - began < SOON


def in_a_fork(target):
    """What `target` returns in a forked child; fails where it hangs."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=lambda: answers.put(target()))
    child.start()
    try:
        return answers.get(timeout=20)
    finally:
        child.kill()
        child.join()
        answers.close()


def test_a_forked_child_leaves_the_queue_of_its_parent_alone():
    """H16: it has none of the threads; its collector must not end the parent's workers; iterating says so at once."""
    queue = queue_of(Tiny(), 2, volumes_in_memory=2)
    iterator = iter(queue)
    first = next(iterator)

    def child():
        texts = []
        for call in (lambda: next(iterator), lambda: iter(queue)):
            try:
                call()
            except ValueError as error:
                texts.append(str(error))
        queue.close()
        return texts

    assert ["fork" in text for text in in_a_fork(child)] == [True, True]
    assert counted([first, *iterator]) == WHOLE == counted(queue)
    queue.close()


def test_interrupted_planning_and_reading_in_this_thread_leave_no_trace():
    """Ctrl-C in a notebook, where everything runs in the caller's thread: the next epoch is that of a fresh queue."""
    interrupt = iter([0, 0, 0, 1] + [0] * 1000)

    def read(index):
        if next(interrupt):
            raise KeyboardInterrupt

    counts = {f"v{n}": n + 1 for n in range(6)}

    def told(queue):
        return [(b["volume"], b["index"].tolist(), b["image"].mean((1, 2, 3, 4)).tolist()) for b in queue]

    make = lambda dataset: gq.GPUQueue(dataset, 4, counts, batch_size=4, patch_queue_size=0, device="cpu")  # noqa: E731
    with make(gq.volume_loader(Tiny(read=read), 0)) as queue, make(gq.volume_loader(Tiny(), 0)) as fresh:
        with pytest.raises(KeyboardInterrupt):
            list(queue)
        fresh.set_epoch(1)
        assert [told(queue) for _ in range(2)] == [told(fresh) for _ in range(2)]


def test_a_strategy_that_fails_in_one_epoch_fails_in_that_epoch():
    """Planning runs ahead while the epoch before is delivered, which it must not end."""

    def strategy(visits, capacity, rng):
        made.append(1)
        if len(made) > 3:
            raise ZeroDivisionError("planning broke")
        return basic(visits, capacity, rng)

    made: list[int] = []
    for size in (0, None):
        made.clear()
        with queue_of(Tiny(), strategy=strategy, patch_queue_size=size) as queue:
            assert counted(queue) == WHOLE
            with pytest.raises(ZeroDivisionError, match="planning broke"):
                while True:
                    assert counted(queue) == WHOLE
            with pytest.raises(ZeroDivisionError):
                list(queue)


def test_no_volume_with_patches_is_no_endless_search():
    """An epoch without a load ends; planning ahead does not look for one for ever."""
    with gq.GPUQueue(Tiny(), 4, dict.fromkeys(Tiny().ids, 0), batch_size=4, device="cpu") as queue:
        assert list(queue) == [] == list(queue)


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_a_hundred_epochs_early_costs_nothing(workers):
    """H13: descriptors, threads and processes are what they were after the first ones."""
    with queue_of(Tiny(), workers, volumes_in_memory=2) as queue:
        sizes = []
        for turn in range(100):
            for number, batch in enumerate(queue):
                assert batch["epoch"] == turn
                if number == turn % 5:
                    break
            sizes.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
        assert counted(queue) == WHOLE
        early, late = (max(s[n] for s in part) for part in (sizes[5:25], sizes[80:]) for n in (0,))
        assert late <= early + 2 and max(s[1] for s in sizes[80:]) <= max(s[1] for s in sizes[5:25]) + 1
        assert len(multiprocessing.active_children()) == workers


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_that_is_kept_keeps_nothing_busy(workers):
    """Its traceback holds the iterator; the next epochs run, and closing ends everything."""

    def read(index):
        if index == 3 and not os.path.exists(repaired):
            raise ValueError("once")

    repaired = os.path.join(tempfile.mkdtemp(), "repaired")
    kept = []
    queue = queue_of(Tiny(read=read), workers)
    for _ in range(3):
        try:
            for batch in queue:
                kept.append(batch)
        except gq.StageError as error:
            kept.append(error)
    pathlib.Path(repaired).touch()
    assert counted(queue) == WHOLE and sum(isinstance(k, gq.StageError) for k in kept) == 3
    queue.close()
    assert not [t.name for t in threading.enumerate() if t.name in ("gpuqueue-load", "gpuqueue-gather")]


def compiling(index):
    import numba

    @numba.njit
    def add(x):
        return x + index

    assert add(1) == 1 + index
    assert torch.ones(300, 300).mm(torch.ones(300, 300))[0, 0] == 300


def test_a_dataset_may_compile_and_use_torch_in_its_workers():
    """Also right after this process did."""
    compiling(0)
    with queue_of(Tiny(4, read=compiling), loader=gq.volume_loader(Tiny(4, read=compiling), 2, timeout=60)) as queue:
        assert counted(queue) == {f"v{n}": 4 for n in range(4)}


SIDE_BY_SIDE = """
import sys, time
import numpy as np, gpuqueue as gq
sys.path.insert(0, {folder!r})
from test_endings import Tiny, compiling, counted, queue_of
first = gq.GPUQueue([gq.Volume(n, {{"image": np.zeros((9, 9, 9))}}) for n in range(3)], 4, 4, device="cpu",
                    augment=[gq.RandomAffine()])
second = queue_of(None, loader=gq.volume_loader(Tiny(4, read=compiling), 2, timeout=10))
one = iter(first)
time.sleep(0.1)
print(counted(second), sum(1 for _ in one))
first.close(), second.close()
"""


def test_workers_are_not_forked_while_another_queue_compiles():
    """One queue loads its kernels in a thread while the workers of another start and compile theirs: a child forked
    in the middle of the former would hang."""
    script = SIDE_BY_SIDE.format(folder=str(pathlib.Path(__file__).parent))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert ran.stdout == "{'v0': 4, 'v1': 4, 'v2': 4, 'v3': 4} 2\n", ran.stderr


# DataLoaders of one's own --------------------------------------------------------------------------------------------


def end_persistent_workers():
    """They live as long as their loader, and torch takes 5 s for each where the collector ends it."""
    for child in multiprocessing.active_children():
        child.terminate()
        child.join(5)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_dataloader_of_ones_own_survives_breaks_and_errors(persistent):
    def read(index):
        if index == 4 and not os.path.exists(repaired):
            raise TakesTwo(a=1, b=2)

    repaired = os.path.join(tempfile.mkdtemp(), "repaired")
    loader = torch.utils.data.DataLoader(Tiny(read=read), batch_size=None, num_workers=2, persistent_workers=persistent)
    for seed in range(3):  # in whichever order patches are asked for, the first cause is told
        with queue_of(None, loader=loader, seed=seed, strategy="basic") as queue:
            with pytest.raises(gq.StageError, match=r"(?s)reading volume '4'.*special 42") as caught:
                list(queue)
            assert "AssertionError" not in str(caught.value)
    pathlib.Path(repaired).touch()
    with queue_of(None, loader=loader) as queue:
        for _ in range(5):
            next(iter(queue))
        assert counted(queue) == WHOLE == counted(queue)
    end_persistent_workers()


DEAD_WORKER = """
import os, pathlib, sys, tempfile
import gpuqueue as gq, torch
sys.path.insert(0, {folder!r})
from test_endings import WHOLE, Tiny, counted, queue_of
repaired = pathlib.Path(tempfile.mkdtemp(), "repaired")
def read(index):
    if index == 3 and not repaired.exists():
        os._exit(3)
with queue_of(None, loader=torch.utils.data.DataLoader(Tiny(read=read), batch_size=None, num_workers=2)) as queue:
    try:
        list(queue)
    except gq.StageError as error:
        print(error)
    repaired.touch()
    print(counted(queue) == WHOLE)
"""


def test_a_dead_worker_of_a_dataloader_of_ones_own_is_told_by_its_exit_code():
    """H25. In a process of its own: a DataLoader iterated in the main thread, as other tests do, leaves torch's handler
    there, which then raises in the main thread instead."""
    script = DEAD_WORKER.format(folder=str(pathlib.Path(__file__).parent))
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert re.search(r"worker [01] of the DataLoader died \(exit code 3\)", ran.stdout), ran.stderr
    assert ran.stdout.endswith("True\n"), ran.stderr


def test_shuffled_passes_over_the_same_epoch_are_told_apart():
    """The id of a place is another one in the next pass; that is no id that occurs twice."""
    loader = torch.utils.data.DataLoader(Tiny(), shuffle=True, batch_size=None)
    with queue_of(None, loader=loader) as queue:
        for _ in range(4):
            queue.set_epoch(0)
            assert counted(queue) == WHOLE
