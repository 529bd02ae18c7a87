"""A stream carried out: L, P, D and A over a feed of volumes, into batches. No policy lives here."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from gpuqueue.errors import GPUQueueError, QueueClosed, StageError
from gpuqueue.patches.batch import Batch, Patch, PatchMaker, Wanted, assemble
from gpuqueue.stream.commands import Command
from gpuqueue.stream.resume import Position
from gpuqueue.stream.shards import Entry
from gpuqueue.volumes.feed import Feed
from gpuqueue.volumes.residents import Memory


class Numbering:
    """Which k each P is, and at which visit: a volume's patches count on over its entries, then freely (for streams
    that were handed in). `before`: a position to go on from."""

    def __init__(self, entries: Iterable[Entry], before: Position | None = None) -> None:
        ranges: defaultdict[int, list[range]] = defaultdict(list)
        for entry in entries:
            ranges[entry.volume].append(range(entry.first, entry.first + entry.patches))
        self._left: dict[int, Iterator[int]] = {
            volume: chain(*parts, count(max(part.stop for part in parts))) for volume, parts in ranges.items()
        }
        self._turns: Counter[int] = Counter() if before is None else Counter(before.turns)
        for volume, given in (before.consumed if before else {}).items():
            for _ in range(given):
                self.next(volume)

    def turn(self, volume: int) -> None:
        """The volume is loaded or redrawn."""
        self._turns[volume] += 1

    def next(self, volume: int) -> tuple[int, int]:
        """k and visit of the volume's next patch."""
        return next(self._left.setdefault(volume, count())), self._turns[volume] - 1


class Executor:
    """Runs one epoch's commands. `batches()` yields what is gathered, before the user's stages.

    Patches wait in a list until their batch is full, or until a volume among them is discarded: then they are gathered
    into their places of the batch at once, so that a D frees its volume when the stream says so.
    """

    def __init__(
        self,
        feed: Feed,
        memory: Memory,
        maker: PatchMaker,
        batch_size: int,
        device: torch.device,
        stop: threading.Event,
        return_parameters: bool = False,
    ) -> None:
        self._feed, self._memory, self._maker = feed, memory, maker
        self._batch_size, self._device, self._stop = batch_size, device, stop
        self._return_parameters = return_parameters
        self._waiting: list[tuple[int, int, int]] = []  # volume, k, visit
        self._patches: list[Patch] = []
        self._out: dict[str, Tensor] = {}
        self._warm: set[Any] | None = None

    def batches(
        self, commands: Iterable[Command], numbering: Numbering, epoch: int
    ) -> Iterator[tuple[Batch, dict[str, str]]]:
        """Each batch with the roles of its keys; the last one may be short. Raises QueueClosed once `stop` is set."""
        self._warm_up(frozenset())  # what all kernels share, while the first volume is being read
        for op, volume in commands:
            if self._stop.is_set():
                raise QueueClosed("the iterator was ended")  # the feed may be serving another epoch already
            if op in "LA":
                numbering.turn(volume)
            if op == "L":
                self._feed.allow()
            elif op == "P":
                self._waiting.append((volume, *numbering.next(volume)))
                if len(self._waiting) + len(self._patches) == self._batch_size:
                    yield self._finish(epoch)
            elif op == "D":
                if any(waiting == volume for waiting, _, _ in self._waiting):
                    self._gather(epoch)
                self._feed.take(volume, self._stop)  # a load that failed without a patch is not passed over
                self._feed.release(volume)
        if self._waiting or self._patches:
            yield self._finish(epoch)

    def _gather(self, epoch: int) -> None:
        residents = {volume: self._feed.take(volume, self._stop) for volume, _, _ in self._waiting}
        for resident in residents.values():
            self._warm_up(self._maker.kernels(resident))
            self._memory.wait(resident)
        wanted = [Wanted(residents[volume], epoch, k, visit) for volume, k, visit in self._waiting]
        patches = self._maker.draw(wanted)
        if not self._patches:
            self._out = self._maker.allocate(wanted[0].resident, self._batch_size, self._device)
        first = len(self._patches)
        try:
            self._maker.gather_into(
                patches, {key: tensor[first : first + len(patches)] for key, tensor in self._out.items()}
            )
        except GPUQueueError:
            raise
        except Exception as error:
            which = ", ".join(f"{item.resident.id!r} k={item.index}" for item in wanted)
            raise StageError(
                f"gather failed in epoch {epoch} for the patches {which}: {type(error).__name__}: {error}",
                stage="gather",
                volume=wanted[0].resident.id,
                epoch=epoch,
                index=wanted[0].index,
            ) from error
        self._patches += patches
        self._waiting = []

    def _warm_up(self, kernels: frozenset[Any]) -> None:
        if self._warm is None or not kernels <= self._warm:
            self._maker.warm_up(kernels, self._device)
            self._warm = (self._warm or set()) | kernels

    def _finish(self, epoch: int) -> tuple[Batch, dict[str, str]]:
        if self._waiting:
            self._gather(epoch)
        patches, out = self._patches, self._out
        self._patches, self._out = [], {}
        if len(patches) < self._batch_size:
            out = {key: tensor[: len(patches)].clone() for key, tensor in out.items()}
        roles = patches[0].wanted.resident.roles
        batch = assemble(patches, out, self._return_parameters)
        return batch, roles


class Background:
    """Runs an iterator in a thread that keeps at most `limit` items ready; errors come out at their place."""

    def __init__(
        self,
        items: Iterator[Any],
        limit: int,
        stop: threading.Event,
        on_stop: Callable[[], None],
        device: torch.device | None = None,
    ) -> None:
        self._items, self._limit, self._stop, self._on_stop, self._device = items, limit, stop, on_stop, device
        self._ready: deque[Any] = deque()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="gpuqueue-gather", daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._changed:
            while not self._ready and not self._ended.is_set():
                self._changed.wait(1.0)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
        if self._error is not None and not self._stop.is_set():
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # else its traceback holds it, for the collector to find
        raise StopIteration

    def close(self) -> None:
        """Stops the thread, which may be waiting for a volume or for room, and waits for it."""
        self._stop.set()
        self._on_stop()
        with self._changed:
            self._changed.notify_all()
        self._ended.wait(10)
        self._ready.clear()
        self._error = None

    def _run(self) -> None:
        try:
            if self._device is not None and self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # threads start on device 0 (H57)
            for item in self._items:
                with self._changed:
                    while len(self._ready) >= self._limit and not self._stop.is_set():
                        self._changed.wait(1.0)
                    if self._stop.is_set():
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
                del item
        except BaseException as error:
            self._error = error
        finally:
            self._items = iter(())  # an epoch left early gives its batch in the making back
            with self._changed:
                self._ended.set()
                self._changed.notify_all()
