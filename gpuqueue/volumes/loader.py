"""How volumes are read ahead: an ordinary DataLoader, driven in stream order for the life of a queue.

Every trap here was measured: worker exceptions are returned as records (a DataLoader rebuilds them badly or not at
all), arrays are put into shared memory inside the dataset's call (a failure in the queue's feeder thread would hang), a short
`timeout` is used as a poll (so that closing never waits for a read), and one lock keeps forks apart from compiling and
importing threads (a child forked in between hangs).
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from gpuqueue.errors import WorkerError
from gpuqueue.volumes.volume import Volume, as_volume

FORK_LOCK = threading.RLock()  # held while workers start, while kernels compile, and while modules are imported late
_POLL_SECONDS = 0.25
_MAX_AUTO_WORKERS = 8

Prepare = Callable[[Volume], tuple[Volume, Any]]


def as_list(items: Sequence[Any]) -> list[Any]:
    """The collate function of `volume_loader`: nothing is stacked."""
    return list(items)


def volume_loader(
    dataset: Any,
    num_workers: int | str = "auto",
    batch_size: int = 1,
    shuffle: bool = False,
    prefetch_factor: int = 2,
    timeout: float = 300.0,
    **options: Any,
) -> DataLoader[Any]:
    """An ordinary DataLoader that yields lists of Volume.

    Given to `GPUQueue`, its dataset is read in stream order with these workers; `batch_size` and `shuffle` then do not
    matter. Alone, it feeds `queue.patches(volumes)`.

    Args:
        dataset: A map-style dataset of Volume or of dicts of arrays, or a list of Volume.
        num_workers: Reader processes; "auto" is one for each CPU this process may use, less one, at most 8, and 0 for
            volumes that are in memory already.
        prefetch_factor: Volumes each worker reads ahead; num_workers x prefetch_factor volumes wait in shared memory.
        timeout: Seconds that one read may take before the worker counts as hung; 0 is no limit.
        options: Others of DataLoader's, such as `multiprocessing_context` and `worker_init_fn`.

    >>> import numpy as np
    >>> loader = volume_loader([Volume("a", {"image": np.zeros((2, 2, 2))})])
    >>> [volumes[0].id for volumes in loader]
    ['a']
    """
    if num_workers == "auto":
        in_memory = isinstance(dataset, (list, tuple))
        num_workers = 0 if in_memory else min(_MAX_AUTO_WORKERS, max(1, available_cpus() - 1))
    if not isinstance(num_workers, int) or num_workers < 0:
        raise ValueError(f"num_workers={num_workers!r}: 'auto', or a whole number of 0 or more")
    if not len(dataset):
        raise ValueError("the dataset is empty: there is no volume to load")
    if num_workers:
        options = {"prefetch_factor": prefetch_factor, "timeout": timeout} | options
    return DataLoader(
        dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers, collate_fn=as_list, **options
    )


def available_cpus() -> int:
    """CPUs that this process may use: its affinity, limited by the control group's quota."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus


@dataclass(frozen=True, eq=False)
class Loaded:
    """A volume that was read and prepared."""

    volume: Volume
    prepared: Any


@dataclass(frozen=True, eq=False)
class Failure:
    """What went wrong while reading one volume, as plain data that survives the way from a worker."""

    volume_id: str
    kind: str
    message: str
    trace: str
    exception: BaseException | None = None  # only in the process where it was raised


@dataclass(frozen=True)
class Idle:
    """Comes back where there was nothing to read: the order had ended."""


Order = Iterator[tuple[int, int]]  # (epoch, index) of the volumes to read; index -1 where there is nothing to read


@dataclass(frozen=True)
class ReadSettings:
    """How items become volumes, in this process or a worker."""

    ids: Sequence[str] | None
    roles: Mapping[str, str] | None
    same_grid: bool | float
    prepare: Prepare

    def id_of(self, index: int) -> str:
        """The id of a volume before it is read."""
        return self.ids[index] if self.ids is not None else str(index)

    def load(self, get: Callable[[], Any], index: int) -> Loaded | Failure:
        """The item, as a prepared volume; any exception as a Failure."""
        try:
            volume = as_volume(get(), self.id_of(index), self.roles, self.same_grid)
            if self.ids is not None and volume.id != self.ids[index]:
                volume = copy.copy(volume)
                volume.id = self.ids[index]
            loaded = Loaded(*self.prepare(volume))
            if get_worker_info() is not None:
                _share(loaded)
            return loaded
        except Exception as error:
            here = get_worker_info() is None
            return Failure(
                self.id_of(index), type(error).__name__, str(error), traceback.format_exc(), error if here else None
            )


def _share(loaded: Loaded) -> None:
    """Moves arrays into shared memory now, where a failure (no space, say) is an ordinary exception."""
    for key, array in loaded.volume.arrays.items():
        if array.untyped_storage().nbytes() > array.numel() * array.element_size():
            array = array.clone()  # a view would take its whole storage along
        loaded.volume.arrays[key] = array.share_memory_()
    pickle.dumps(loaded.prepared)


class _ReadingDataset(torch.utils.data.Dataset[Any]):
    """The user's dataset behind one call that never raises."""

    def __init__(self, dataset: Any, settings: ReadSettings, busy: torch.Tensor) -> None:
        self.dataset, self.settings, self.busy = dataset, settings, busy

    def __getitem__(self, request: tuple[int, int]) -> Loaded | Failure | Idle:
        _, index = request
        if index < 0:
            return Idle()
        info = get_worker_info()
        worker = info.id if info is not None else 0
        self.busy[worker, 0] = index
        loaded = self.settings.load(lambda: self.dataset[index], index)
        self.busy[worker, 0] = -1
        return loaded


@dataclass(frozen=True)
class _WorkerStart:
    """What a worker does first: die quietly when told to, then the user's own initialisation."""

    busy: torch.Tensor
    user: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # never inside the C call that makes a shared file
        self.busy[worker, 1] = os.getpid()
        if self.user is not None:
            self.user(worker)


class _InOrder(torch.utils.data.Sampler[tuple[int, int]]):
    """The sampler: hands out what `order` yields, across epochs; asked again by nobody."""

    def __init__(self, order: Order) -> None:
        self.order = order

    def __iter__(self) -> Order:
        return self.order


class Reader:
    """Reads volumes in an endless order, by the workers of a `volume_loader`.

    `next()` may be called from any one thread; `stop` (an Event) ends its wait.
    """

    def __init__(self, loader: DataLoader[Any], settings: ReadSettings, order: Order, seed: int) -> None:
        workers = loader.num_workers
        self._busy = torch.full((max(1, workers), 2), -1, dtype=torch.int64).share_memory_()
        self._settings, self._seed = settings, seed
        self._limit = loader.timeout
        self._children: list[multiprocessing.process.BaseProcess] = []
        start = _WorkerStart(self._busy, loader.worker_init_fn)
        options: dict[str, Any] = {}
        if workers:
            options = {
                "prefetch_factor": loader.prefetch_factor,
                "timeout": _POLL_SECONDS,
                "multiprocessing_context": loader.multiprocessing_context,
                "worker_init_fn": start,
            }
        self._loader: DataLoader[Any] = DataLoader(
            _ReadingDataset(loader.dataset, settings, self._busy),
            batch_size=None,
            sampler=_InOrder(order),
            num_workers=workers,
            generator=torch.Generator().manual_seed(seed % 2**63),  # else a DataLoader draws from the global state
            **options,
        )
        self._iterator: Iterator[Any] | None = None

    def start(self) -> None:
        """Starts the workers, from a short thread of its own: an iterator made in the main thread would make the death
        of a worker interrupt whatever the main thread runs."""
        if self._loader.num_workers == 0:
            self._iterator = iter(self._loader)
            return
        failed: list[BaseException] = []

        def create() -> None:
            try:
                before = set(multiprocessing.active_children())
                self._iterator = iter(self._loader)
                self._children = [child for child in multiprocessing.active_children() if child not in before]
            except BaseException as error:
                failed.append(error)

        with FORK_LOCK:
            thread = threading.Thread(target=create, name="gpuqueue-start", daemon=True)
            thread.start()
            thread.join()
        if failed:
            raise failed[0]

    def next(self, stop: threading.Event) -> Loaded | Failure | Idle | None:
        """The next volume; None once `stop` is set. Raises WorkerError when a worker died or a read took too long."""
        if self._iterator is None:
            self.start()
        began = time.monotonic()
        while not stop.is_set():
            try:
                assert self._iterator is not None
                item: Loaded | Failure | Idle = next(self._iterator)
                return item
            except Exception as error:
                if self._loader.num_workers == 0:
                    raise
                self._raise_if_dead(error)
                if "timed out" not in str(error):
                    raise
            if self._limit and time.monotonic() - began > self._limit:
                raise WorkerError(
                    f"reading {self._being_read()} took longer than {self._limit:g} s; is its disk reachable? "
                    "volume_loader(..., timeout=seconds) sets the limit",
                    stage="reading",
                )
        return None

    def _raise_if_dead(self, error: Exception) -> None:
        time.sleep(0.02)  # an exit code may read None for a moment
        for child in self._children:
            if child.exitcode is None:
                continue
            worker = self._busy[:, 1].tolist().index(child.pid) if child.pid in self._busy[:, 1].tolist() else -1
            index = int(self._busy[worker, 0]) if worker >= 0 else -1
            volume_id = self._settings.id_of(index) if index >= 0 else ""
            how = f"exit code {child.exitcode}"
            if child.exitcode < 0:
                name = signal.Signals(-child.exitcode).name
                how = f"killed by signal {-child.exitcode} ({name}); the system does that when memory runs out"
            raise WorkerError(
                f"loader worker {worker} died ({how})" + (f" while reading volume {volume_id!r}" if volume_id else ""),
                stage="reading",
                volume=volume_id,
            ) from error

    def _being_read(self) -> str:
        ids = [self._settings.id_of(index) for index in self._busy[:, 0].tolist() if index >= 0]
        return "volume " + " or ".join(map(repr, ids)) if ids else "a volume"

    def close(self) -> None:
        """Ends the workers at once, whatever they are reading."""
        for child in self._children:
            with suppress(Exception):
                child.terminate()
        with FORK_LOCK:
            self._iterator = None
        for child in self._children:
            with suppress(Exception):
                child.join(timeout=5)
        self._children = []


class ForeignReader:
    """Reads from anyone's DataLoader, in its own order, one pass an epoch."""

    def __init__(self, loader: Any, settings: ReadSettings, order: Order) -> None:
        self._loader, self._settings, self._order = loader, settings, order
        self._items: Iterator[Any] | None = None
        self._waiting: list[Any] = []
        self._position = 0

    def start(self) -> None:
        """Nothing starts before the first volume is asked for."""

    def next(self, stop: threading.Event) -> Loaded | Failure | Idle | None:
        """The next volume, or a Failure where the loader raises, ends too soon or cannot go back."""
        epoch, index = next(self._order)
        if index < 0:
            return Idle()
        return self._settings.load(lambda: self._pull(epoch, index), index)

    def _begin(self, epoch: int) -> None:
        """Starts the loader's next pass; its sampler is told the epoch if it asks for one."""
        for sampler in (
            getattr(self._loader, "sampler", None),
            getattr(getattr(self._loader, "batch_sampler", None), "sampler", None),
        ):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
        self._waiting, self._position = [], 0
        self._items = None
        with FORK_LOCK:
            self._items = iter(self._loader)

    def _pull(self, epoch: int, index: int) -> Any:
        if index == 0:
            self._begin(epoch)
        if index != self._position:
            raise ValueError(
                f"the stream loads volume {index} where the loader gives volume {self._position}; a DataLoader of your "
                "own gives each volume once, in its order: take the strategy 'sliding', or gpuqueue.volume_loader"
            )
        self._position += 1
        assert self._items is not None
        while not self._waiting:
            try:
                item = next(self._items)
            except StopIteration:
                self._items = None
                raise ValueError(f"the loader ended after {index} volumes; more were planned from its length") from None
            except Exception as error:
                self._items = None  # and no traceback that keeps it, and so its workers, alive
                raise error.with_traceback(None) from None
            self._waiting = list(item) if isinstance(item, (list, tuple)) else [item]
        return self._waiting.pop(0)

    def close(self) -> None:
        """Drops the loader's iterator."""
        self._items = None


def count_volumes(loader: Any) -> int:
    """How many volumes one pass of a foreign DataLoader gives; ValueError where that cannot be known."""
    batch_size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    try:
        if batch_size is not None and sampler is not None:
            return len(loader) * batch_size if getattr(loader, "drop_last", False) else len(sampler)
        return len(loader)
    except TypeError:
        raise ValueError(
            f"{type(loader).__name__} has no length, so an epoch cannot be planned; give a map-style dataset, or call "
            "queue.patches(volumes) in your own loop over the loader"
        ) from None
