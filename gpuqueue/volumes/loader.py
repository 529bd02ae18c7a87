"""How volumes are read ahead: an ordinary DataLoader, driven in stream order for the life of a queue.

Every trap here was measured: worker exceptions are returned as records (a DataLoader rebuilds them badly or not at
all), volumes are packed into shared memory inside the dataset's call (a failure in the queue's feeder thread would
hang), a short `timeout` is used as a poll (so that closing never waits for a read), and one lock keeps forks apart from
compiling and importing threads (a child forked in between hangs).
"""

from __future__ import annotations

import copy
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from gpuqueue.errors import WorkerError
from gpuqueue.volumes.failure import Failure, failure_of
from gpuqueue.volumes.transport import Parcel, packed, with_shared_arrays
from gpuqueue.volumes.volume import Volume, as_volume
from gpuqueue.volumes.workers import (
    FORK_LOCK,
    IDLE,
    STARTING,
    WorkerStart,
    end,
    first_death,
    how_it_ended,
    new_board,
    noting_context,
)

_POLL_SECONDS = 0.25
_START_SECONDS = 120.0  # a spawned worker imports torch, from a slow disk maybe
_MAX_AUTO_WORKERS = 8

Prepare = Callable[[Volume], tuple[Volume, Any]]
T = TypeVar("T")


def as_list(items: Sequence[Any]) -> list[Any]:
    """The collate function of `volume_loader`: nothing is stacked."""
    if get_worker_info() is None:
        return list(items)
    return [with_shared_arrays(item) if isinstance(item, Volume) else item for item in items]


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

    Raises:
        ValueError: No volumes, or options that make no sense here, with the remedy.

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
    if refused := [name for name in ("sampler", "batch_sampler") if options.get(name) is not None]:
        raise ValueError(
            f"{refused[0]}=: a queue reads in its own order; choose volumes with torch's Subset(dataset, ...)"
        )
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


@dataclass(frozen=True)
class Idle:
    """Comes back where there was nothing to read: the order had ended."""


Order = Iterator[tuple[int, int]]  # (epoch, index) of the volumes to read; index -1 where there is nothing to read


class FlatText(Sequence[str]):
    """Texts in one block of bytes: forked workers that look one up copy no pages (reference counts would, H28).

    >>> FlatText(["a", "", "ß"])[2]
    'ß'
    """

    def __init__(self, texts: Sequence[str]) -> None:
        encoded = [text.encode() for text in texts]
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        place = range(len(self))[index]
        return self._bytes[self._ends[place] : self._ends[place + 1]].tobytes().decode()


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

    def read(self, get: Callable[[], Any], index: int) -> Loaded:
        """The item, as a prepared volume."""
        volume = as_volume(get(), self.id_of(index), self.roles, self.same_grid)
        if self.ids is not None and volume.id != self.ids[index]:
            volume = copy.copy(volume)
            volume.id = self.ids[index]
        return Loaded(*self.prepare(volume))

    def guarded(self, index: int, call: Callable[[], T]) -> T | Failure:
        """What `call` returns; any exception as a Failure."""
        try:
            return call()
        except (Exception, SystemExit) as error:  # a dataset that exits must not end a thread in silence
            info = get_worker_info()
            return failure_of(error, self.id_of(index), None if info is None else info.id, __file__)

    def load(self, get: Callable[[], Any], index: int) -> Loaded | Failure:
        """The item, as a prepared volume; any exception as a Failure."""
        return self.guarded(index, lambda: self.read(get, index))


class _ReadingDataset(torch.utils.data.Dataset[Any]):
    """The user's dataset behind one call that never raises."""

    def __init__(self, dataset: Any, settings: ReadSettings, board: torch.Tensor) -> None:
        self.dataset, self.settings, self.board = dataset, settings, board

    def __getitem__(self, request: tuple[int, int]) -> Loaded | Parcel | Failure | Idle:
        _, index = request
        if index < 0:
            return Idle()
        info = get_worker_info()
        if info is None:
            return self.settings.load(lambda: self.dataset[index], index)
        self.board[info.id, 1] = _milliseconds()
        self.board[info.id, 0] = index
        parcel = self.settings.guarded(index, lambda: self._packed(index))
        self.board[info.id, 0] = IDLE
        return parcel

    def _packed(self, index: int) -> Parcel:
        loaded = self.settings.read(lambda: self.dataset[index], index)
        return packed(loaded.volume, loaded.prepared)


def _milliseconds() -> int:
    return int(time.monotonic() * 1000)  # one clock for all processes of a machine


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
        self._board, self._settings, self._limit = new_board(workers), settings, loader.timeout
        self._children: list[BaseProcess] = []
        self._began, self._created = time.monotonic(), threading.Event()
        self._created.set()
        options: dict[str, Any] = {}
        if workers:
            if settings.ids is not None:
                settings = dataclasses.replace(settings, ids=FlatText(settings.ids))
            options = {
                "prefetch_factor": loader.prefetch_factor,
                "timeout": _POLL_SECONDS,
                "multiprocessing_context": noting_context(loader.multiprocessing_context, self._children),
                "worker_init_fn": WorkerStart(self._board, loader.worker_init_fn),
            }
        self._loader: DataLoader[Any] = DataLoader(
            _ReadingDataset(loader.dataset, settings, self._board),
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
                with FORK_LOCK:
                    self._iterator = iter(self._loader)
            except BaseException as error:
                failed.append(error)
            finally:
                self._created.set()

        self._created.clear()
        threading.Thread(target=create, name="gpuqueue-start", daemon=True).start()
        self._created.wait()  # not join(): that a signal interrupted
        if failed:
            raise failed.pop()

    def next(self, stop: threading.Event) -> Loaded | Failure | Idle | None:
        """The next volume; None once `stop` is set. Raises WorkerError when a worker died or a read took too long."""
        asked = time.monotonic()
        while not stop.is_set():
            answer = self._ask()
            if isinstance(answer, Parcel):
                return Loaded(*answer.opened())
            if not isinstance(answer, str):
                return answer
            if stop.is_set():
                break
            if "DataLoader timed out" not in answer:
                raise self._explained(answer)
            self._check_time(asked)
        return None

    def _ask(self) -> Loaded | Parcel | Failure | Idle | str:
        """The next item, or what the DataLoader says instead; its exception would keep its iterator, and so the
        workers, alive."""
        if self._iterator is None:
            return "the reader is closed"
        try:
            item: Loaded | Parcel | Failure | Idle = next(self._iterator)
            return item
        except Exception as error:
            if self._loader.num_workers == 0:
                raise
            return f"{type(error).__name__}: {error}"

    def _explained(self, problem: str) -> WorkerError:
        """A worker's death, as an error with its number, how it ended, and what it was reading."""
        death = first_death(self._children, wait_seconds=2.0)  # it may be seen late
        if death is None:
            return WorkerError(f"the loader failed: {problem}", stage="reading")
        worker, exitcode = death
        index = int(self._board[worker, 0])
        volume_id = self._settings.id_of(index) if index >= 0 else ""
        when = f" while reading volume {volume_id!r}" if volume_id else " while starting" if index == STARTING else ""
        return WorkerError(
            f"loader worker {worker} died ({how_it_ended(exitcode)}){when}", stage="reading", volume=volume_id
        )

    def _check_time(self, asked: float) -> None:
        """WorkerError where a read, a start, or the way of a volume from its worker takes too long."""
        board, now = self._board.tolist(), time.monotonic()
        for worker, (index, since) in enumerate(board):
            if index == STARTING and now - self._began > _START_SECONDS:
                raise WorkerError(f"loader worker {worker} did not start in {_START_SECONDS:g} s", stage="reading")
            if self._limit and index >= 0 and _milliseconds() - since > 1000 * self._limit:
                volume_id = self._settings.id_of(index)
                raise WorkerError(
                    f"reading volume {volume_id!r} took longer than {self._limit:g} s in loader worker {worker}; is "
                    "its disk reachable? volume_loader(..., timeout=seconds) sets the limit",
                    stage="reading",
                    volume=volume_id,
                )
        if self._limit and now - asked > self._limit and all(index == IDLE for index, _ in board):
            raise WorkerError(f"no volume came from idle loader workers in {self._limit:g} s", stage="reading")

    def close(self) -> None:
        """Ends the workers at once, whatever they are reading. Idempotent."""
        self._created.wait(_START_SECONDS)
        end(self._children)
        self._children.clear()
        self._iterator = None
