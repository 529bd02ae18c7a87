"""How volumes come from a DataLoader that is not ours: in its own order, one pass an epoch."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from gpuqueue.errors import WorkerError
from gpuqueue.volumes.failure import Failure
from gpuqueue.volumes.loader import Idle, Loaded, Order, ReadSettings
from gpuqueue.volumes.workers import FORK_LOCK, first_death, how_it_ended


class ForeignReader:
    """Reads from anyone's DataLoader. It cannot be hurried: closing waits for the read in hand."""

    def __init__(self, loader: Any, settings: ReadSettings, order: Order) -> None:
        self._loader, self._settings, self._order = loader, settings, order
        self._items: Iterator[Any] | None = None
        self._children: list[BaseProcess] = []  # for the words of an error only
        self._waiting: list[Any] = []
        self._position = 0
        self._ended: Failure | None = None  # why this pass cannot go on

    def start(self) -> None:
        """Nothing starts before the first volume is asked for."""

    def next(self, stop: threading.Event) -> Loaded | Failure | Idle | None:
        """The next volume, or a Failure where the loader raises, ends too soon or cannot go back; then that one again
        until the next pass, whichever volume is asked for."""
        epoch, index = next(self._order)
        if index < 0:
            return Idle()
        if index == 0:
            self._ended = None
        elif self._ended is not None:
            return self._ended
        item = self._settings.guarded(index, lambda: self._pull(epoch, index))
        if isinstance(item, Failure):
            self._ended, self._items = item, None
            return item
        return self._settings.load(lambda: item, index)

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
            before = set(multiprocessing.active_children())
            self._items = iter(self._loader)
            started = [child for child in multiprocessing.active_children() if child not in before]
            if started:  # persistent workers start once
                self._children = sorted(started, key=lambda child: child.pid or 0)

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
                raise ValueError(f"the loader ended after {index} volumes; more were planned from its length") from None
            except Exception as error:
                if not self._children:
                    raise
                problem = self._explained(error)
            else:
                self._waiting = list(item) if isinstance(item, (list, tuple)) else [item]
                continue
            raise problem  # here, not above: the loader's traceback would keep its iterator, and so its workers, alive
        return self._waiting.pop(0)

    def _explained(self, error: Exception) -> Exception:
        """An error of a loader with workers, without its traceback; a worker's death by how it ended."""
        may_be_dead = isinstance(error, (RuntimeError, ConnectionError, EOFError))
        if may_be_dead and (death := first_death(self._children, wait_seconds=0.5)):
            return WorkerError(f"worker {death[0]} of the DataLoader died ({how_it_ended(death[1])})", stage="reading")
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)

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
