"""Reading ahead: what a worker sends, how its end is told, what it may not touch."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuqueue as gq
from gpuqueue.volumes import workers as workers_module
from gpuqueue.volumes.failure import describe_value, failure_of
from gpuqueue.volumes.loader import FlatText, available_cpus
from gpuqueue.volumes.transport import packed, shared_copies
from gpuqueue.volumes.workers import FORK_LOCK, end, noting_context


class Read(torch.utils.data.Dataset):
    """Constant volumes; `read(index)` gives more keys of each."""

    def __init__(self, n, read=lambda index: None):
        self.n, self.read = n, read
        self.ids = [f"v{i}" for i in range(n)]

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        more = self.read(index) or {}
        return gq.Volume(f"v{index}", {"image": np.full((6, 6, 6), index, np.float32)} | more)


def values(number):
    return np.full((6, 6, 6), number, np.float32)


def queue_of(dataset, workers, timeout=300, **options):
    loader = gq.volume_loader(dataset, num_workers=workers, timeout=timeout, **options)
    return gq.GPUQueue(loader, 6, 1, batch_size=1, device="cpu", shuffle=False)


# What travels --------------------------------------------------------------------------------------------------------


@given(
    shape=st.tuples(*[st.integers(1, 5)] * 4),
    order=st.permutations(range(4)),
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.uint16, torch.int32, torch.bfloat16, torch.float32]),
    step=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None)
def test_arrays_travel_with_their_values_dtype_and_memory_order(shape, order, dtype, step):
    whole = torch.arange(np.prod(shape)).reshape([shape[axis] for axis in order]).to(dtype)
    tensor = whole.permute([order.index(axis) for axis in range(4)])[::step]
    copies = shared_copies([tensor, torch.zeros(3), tensor])
    assert len({copy.untyped_storage().data_ptr() for copy in copies}) == 1 and copies[0].is_shared()
    for copy in (copies[0], copies[2]):
        assert copy.dtype == dtype and torch.equal(copy.to(torch.int64), tensor.to(torch.int64))
        if step == 1:
            assert copy.permute(order).is_contiguous()
    assert not tensor.is_shared()


def test_only_a_few_bytes_go_through_the_pipe():
    """A worker that is killed in the middle of a long message would leave the consumer reading for ever."""
    volume = gq.Volume("a", {"image": np.zeros((2, 30, 30, 30)), "label": np.zeros((30, 30, 30), np.uint8)})
    positions = np.arange(200_000)
    parcel = packed(volume, {"positions": positions, "pads": np.zeros(2)})
    assert len(ForkingPickler.dumps(parcel)) < 4096  # one write to a pipe, whole or not at all
    arrived, prepared = parcel.opened()
    assert (prepared["positions"] == positions).all() and prepared["positions"].flags.writeable
    assert arrived.layout == volume.layout and arrived.id == "a" and volume.arrays.keys() == arrived.arrays.keys()


def test_the_volumes_a_dataset_keeps_are_not_moved_into_shared_memory():
    """H27: a worker that served every volume of a list holds as many descriptors as after the first ones."""
    volumes = [gq.Volume(n, {"image": values(n), "label": np.zeros((6, 6, 6), np.uint8)}) for n in range(40)]
    with queue_of(volumes, 2) as queue:
        assert len(list(queue)) == 40
        open_files = [len(os.listdir(f"/proc/{child.pid}/fd")) for child in multiprocessing.active_children()]
        for _ in range(2):
            assert len(list(queue)) == 40
        again = [len(os.listdir(f"/proc/{child.pid}/fd")) for child in multiprocessing.active_children()]
    assert max(again) <= max(open_files) + 2 and max(again) < 40


@pytest.mark.parametrize("workers", [0, 1])
def test_alone_the_loader_yields_lists_of_volumes(workers):
    loader = gq.volume_loader(Read(5), num_workers=workers, batch_size=2)
    lists = list(loader)
    assert [[volume.id for volume in volumes] for volumes in lists] == [["v0", "v1"], ["v2", "v3"], ["v4"]]
    assert all((v.arrays["image"] == int(v.id[1:])).all() for volumes in lists for v in volumes)


def test_no_space_in_shared_memory_is_an_error_that_names_the_volume():
    def read(index):
        if index == 2:

            def full(self):
                raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

            torch.Tensor.share_memory_ = full  # in the worker only

    with queue_of(Read(4, read), 1) as queue, pytest.raises(gq.StageError, match="'v2'.*No space left on device"):
        list(queue)


@pytest.mark.parametrize("options, text", [
    ({"num_workers": -1}, "num_workers=-1"), ({"num_workers": "many"}, "many"), ({"dataset": []}, "empty"),
    ({"sampler": [0, 1]}, "Subset"), ({"batch_sampler": [[0, 1]]}, "Subset"),
])  # fmt: skip
def test_loader_options_that_would_be_ignored_or_make_no_sense_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        gq.volume_loader(**({"dataset": Read(3)} | options))


def test_auto_leaves_a_cpu_to_the_consumer_and_starts_nothing_for_volumes_in_memory():
    assert gq.volume_loader([gq.Volume("a", {"image": values(0)})]).num_workers == 0
    assert gq.volume_loader(Read(3)).num_workers == min(8, max(1, available_cpus() - 1))
    assert 1 <= available_cpus() <= (os.cpu_count() or 1)


def test_flat_text_is_the_list_it_was_made_of():
    texts = ["case1", "", "Zürich", "x" * 300]
    flat = FlatText(texts)
    assert list(flat) == texts and len(flat) == 4 and flat[-1] == texts[-1]
    with pytest.raises(IndexError):
        flat[4]


# What workers are ----------------------------------------------------------------------------------------------------


def test_workers_draw_different_numbers():
    """H18 with its values: 4 workers, 40 items, 40 distinct values of each source."""
    read = lambda index: {  # noqa: E731
        "image_a": values(random.random()), "image_b": values(np.random.rand()), "image_c": values(float(torch.rand(1)))
    }  # fmt: skip
    with queue_of(Read(40, read), 4) as queue:
        batches = list(queue)
    for key in ("image_a", "image_b", "image_c"):
        assert len({float(batch[key].max()) for batch in batches}) == 40


def test_workers_touch_no_gpu_and_keep_one_thread_for_torch():
    """H55 (the part without a GPU)."""
    read = lambda index: {  # noqa: E731
        "image_cuda": values(torch.cuda.is_initialized()), "image_threads": values(torch.get_num_threads())
    }  # fmt: skip
    with queue_of(Read(4, read), 2) as queue:
        assert {(float(b["image_cuda"].max()), float(b["image_threads"].max())) for b in queue} == {(0, 1)}


def test_the_users_own_initialisation_runs_in_each_worker():
    marks = torch.zeros(2).share_memory_()
    with queue_of(Read(4), 2, worker_init_fn=lambda worker: marks[worker].fill_(worker + 1)) as queue:
        assert len(list(queue)) == 4
    assert marks.tolist() == [1, 2]


def test_an_initialisation_that_raises_is_told():
    def start(worker):
        raise OSError("no licence server")

    with queue_of(Read(4), 2, worker_init_fn=start) as queue:
        with pytest.raises(gq.WorkerError, match="no licence server"):
            list(queue)
        with pytest.raises(gq.QueueClosed, match="no licence server"):
            list(queue)


def test_the_time_a_worker_takes_to_start_is_no_reading_time():
    with queue_of(Read(3), 1, timeout=0.5, worker_init_fn=lambda worker: time.sleep(1.2)) as queue:
        assert len(list(queue)) == 3


def test_slow_reads_under_the_limit_are_not_hung():
    """Each takes 0.4 s of 1 s; the consumer waits for several in a row, and is away for longer than the limit."""
    with queue_of(Read(6, lambda index: time.sleep(0.4)), 1, timeout=1) as queue:
        iterator = iter(queue)
        next(iterator)
        time.sleep(1.5)
        assert sum(1 for _ in iterator) == 5


def test_a_worker_is_born_without_the_lock_of_its_fork():
    """Else whatever takes it there, in another thread, waits for ever."""

    def read(index):
        taken = []
        thread = threading.Thread(target=lambda: taken.append(FORK_LOCK.acquire(timeout=5)))
        thread.start()
        thread.join()
        return {"image_taken": values(taken[0])}

    with queue_of(Read(1, read), 1) as queue:
        assert next(iter(queue))["image_taken"].all()


def test_workers_start_when_nobody_compiles_or_imports():
    held, released = threading.Event(), []

    def compile_kernels():
        with FORK_LOCK:
            held.set()
            time.sleep(0.5)
            released.append(time.monotonic())

    thread = threading.Thread(target=compile_kernels)
    thread.start()
    held.wait()
    with queue_of(Read(2), 1) as queue:
        iterator = iter(queue)
        assert released and time.monotonic() >= released[0]
        next(iterator)
    thread.join()


def test_a_process_of_the_users_own_is_not_taken_for_a_worker():
    made: list[multiprocessing.process.BaseProcess] = []
    mine = noting_context(None, made)
    ours = multiprocessing.Process(target=time.sleep, args=(60,))
    theirs = mine.Process(target=time.sleep, args=(60,))
    ours.start(), theirs.start()
    assert made == [theirs] and isinstance(theirs, type(multiprocessing.get_context().Process()))
    end(made)
    assert not theirs.is_alive() and ours.is_alive()
    ours.kill()
    ours.join()


def test_a_process_that_cannot_be_told_is_killed_and_its_shared_memory_removed(tmp_path):
    def stuck():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"/dev/shm/torch_{os.getpid()}_1_0", "w").close()  # as one killed while it makes a file leaves it
        ready.set()
        time.sleep(60)

    ready = multiprocessing.Event()
    child = multiprocessing.Process(target=stuck)
    child.start()
    assert ready.wait(10) and os.path.exists(f"/dev/shm/torch_{child.pid}_1_0")
    began = time.monotonic()
    end([child, multiprocessing.Process()])  # one that never started is passed over
    assert not child.is_alive() and time.monotonic() - began < 10
    assert not os.path.exists(f"/dev/shm/torch_{child.pid}_1_0")


@pytest.mark.parametrize("code, words", [(3, "exit code 3"), (-9, "memory"), (-7, "/dev/shm"), (-64, "signal 64")])
def test_exit_codes_are_put_in_words(code, words):
    assert words in workers_module.how_it_ended(code)


# What an error carries -----------------------------------------------------------------------------------------------


class Unprintable:
    def __repr__(self):
        raise RuntimeError

    shape = property(lambda self: 1 / 0)


VARIABLES = [
    (np.arange(6, dtype=np.int16).reshape(2, 3), "ndarray (2, 3) int16 0 to 5"),
    (torch.tensor([1.0, torch.inf, torch.nan], dtype=torch.bfloat16), "Tensor (3,) bfloat16 1 to 1, 2 not finite"),
    (torch.zeros(2, requires_grad=True), "Tensor (2,) float32 0 to 0"), (np.zeros(0), "ndarray (0,) float64"),
    (np.array([None, 1]), "ndarray (2,) object"), (np.array([1j]), "ndarray (1,) complex128"),
    (torch.zeros(2, device="meta"), "Tensor (2,) float32 on meta"), ("a" * 10**6, None), (10**5000, None),
    (Unprintable(), "Unprintable"), ([1, 2], "list of 2"), (None, "None"),
]  # fmt: skip


def test_variables_are_told_in_a_few_words():
    for value, text in VARIABLES:
        told = describe_value(value)
        assert len(told) <= 60 if text is None else told == text


def test_what_is_kept_of_an_error_is_bounded():
    def deep(n, pile):
        return deep(n - 1, pile) if n else 1 / 0

    for error in (ValueError("x" * 10**6), "deep"):
        try:
            if error == "deep":
                deep(500, list(range(1000)))
            raise error
        except Exception as caught:
            failure = failure_of(caught, "v0", 1, __file__ if error != "deep" else "")
        assert len(failure.message) <= 2000 and len(failure.trace) < 20000 and failure.exception is None
        assert failure.trace.startswith("In loader worker 1:")
