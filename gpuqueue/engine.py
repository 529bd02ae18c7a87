"""What runs behind a queue: feed, executor and threads, apart from the object that users hold.

The facade may be dropped at any moment; threads refer to the engine only, so the facade's finaliser can close it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpuqueue.errors import QueueClosed
from gpuqueue.executor import Background, Executor, Numbering
from gpuqueue.patches.batch import Batch, PatchMaker, Stage, cast, run_stages
from gpuqueue.profiling.stats import Stats
from gpuqueue.stream.commands import Command
from gpuqueue.stream.planner import Planner, Plans
from gpuqueue.stream.resume import Position, fast_forward
from gpuqueue.volumes.feed import Feed, VolumeReader
from gpuqueue.volumes.loader import Order
from gpuqueue.volumes.residents import Memory, memory_for


@dataclass(frozen=True, eq=False)
class PatchSource:
    """How patches become batches: the maker, and what happens to a batch before it is delivered.

    `gather_device` is where volumes stay and patches are gathered, `device` where batches are delivered.
    """

    maker: PatchMaker
    batch_size: int
    drop_last: bool
    dtypes: Mapping[str, torch.dtype]
    gather_device: torch.device
    device: torch.device
    batches_ahead: int
    return_parameters: bool

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages after the gather."""
        return self.maker.augmentation.stages

    def finished(
        self, executor: Executor, commands: Iterator[Command], numbering: Numbering, epoch: int
    ) -> Iterator[Batch]:
        """The epoch's batches on the gathering device, augmented and cast."""
        for batch, roles in executor.batches(commands, numbering, epoch):
            if self.drop_last and len(batch["volume"]) < self.batch_size:
                continue
            batch = cast(run_stages(batch, self.stages), roles, self.dtypes)
            if self.device.type == "cuda" and self.gather_device.type == "cpu":
                for key in roles:
                    if isinstance(batch.get(key), Tensor):
                        batch[key] = batch[key].pin_memory()
            batch["_roles"] = roles
            yield batch

    def deliver(self, batch: Batch) -> Batch:
        """Moves the keys to the delivery device, on the consumer's stream."""
        roles = batch.pop("_roles")
        if self.device != self.gather_device:
            for key in roles:
                if isinstance(batch.get(key), Tensor):
                    batch[key] = batch[key].to(self.device, non_blocking=self.device.type == "cuda")
        return batch


class Run:
    """One epoch under way: yields delivered batches until it ends, fails, or is closed."""

    def __init__(
        self,
        engine: Engine,
        source: PatchSource,
        batches: Iterator[Batch],
        stop: threading.Event,
        position: tuple[int, int],
    ) -> None:
        self._engine, self._source, self._batches, self._stop = engine, source, batches, stop
        self.position = position  # the epoch, and how many of its batches the consumer has; (next, 0) once it ended
        self._asked_last: float | None = None
        self._began = time.perf_counter()
        self._first = True

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        asked = time.perf_counter()
        self._engine.check_process()
        try:
            if self._stop.is_set():
                raise StopIteration
            batch = self._source.deliver(next(self._batches))
        except BaseException as error:
            from_outside = self._stop.is_set()
            if isinstance(error, StopIteration) and not from_outside:
                self.position = (self.position[0] + 1, 0)
            self.close()
            if not from_outside or not isinstance(error, Exception):
                raise
            if self._engine.closed:
                raise QueueClosed("the queue was closed in the middle of this epoch") from None
            raise StopIteration from None  # a new iterator ended this one
        now = time.perf_counter()
        patches = len(batch.get("volume", ()))  # a last stage may return what it likes
        self._engine.account(self._asked_last, asked, now, patches, self._began if self._first else None)
        self._asked_last, self._first = now, False
        self.position = (self.position[0], self.position[1] + 1)
        return batch

    def close(self) -> None:
        """Ends the epoch here. Idempotent."""
        if self._stop.is_set() or not self._engine.in_its_process:
            return
        self._stop.set()
        self._engine.feed.wake()
        if isinstance(self._batches, Background):
            self._batches.close()
        elif hasattr(self._batches, "close"):
            with suppress(ValueError):  # it is running, in another thread, which sees `stop` at its next command
                self._batches.close()


class Engine:
    """Owns the feed and the run under way."""

    def __init__(
        self,
        planner: Planner,
        source: PatchSource,
        make_reader: Callable[[Order], VolumeReader],
        lookahead: int,
        endless: bool,
        background: bool,
    ) -> None:
        self._planner, self._source, self._endless = planner, source, endless
        self._plans = Plans(self._commands, endless)
        self._process, self._lock = os.getpid(), threading.RLock()
        self._memory: Memory = memory_for(source.gather_device)
        self.feed = Feed(make_reader, self._plans.loads, self._memory, lookahead, background)
        self._run: Run | None = None
        self.closed = False
        self._totals: dict[str, Any] = {"batches": 0, "patches": 0, "wait_seconds": 0.0, "consumer_seconds": 0.0}
        self._first_batch_seconds = 0.0

    def begin(self, epoch: int, batches_before: int = 0) -> Run:
        """Ends the run under way and starts that of `epoch`, after its first batches where it is resumed."""
        self.check_process()
        with self._lock:
            return self._begin(epoch, batches_before)

    @property
    def in_its_process(self) -> bool:
        """False in a forked child, which has none of the threads, and must leave its parent's workers alone."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        """ValueError in a forked child, which would wait for ever."""
        if not self.in_its_process:
            raise ValueError("this queue was made before a fork; make one in the process that iterates over it")

    def _commands(self, epoch: int) -> Iterator[Command]:
        yield from self._planner.commands(epoch)  # lazily: what planning raises comes out in its own epoch

    def _begin(self, epoch: int, batches_before: int) -> Run:
        self.end()
        position: Position | None = None
        if batches_before:
            position = fast_forward(self._planner.commands(epoch), batches_before * self._source.batch_size)
            self._plans.resume(epoch, position.commands)
            self.feed.end(None)  # whatever was loaded ahead is of another position
        self.feed.begin(epoch)
        stop = threading.Event()
        executor = Executor(
            self.feed,
            self._memory,
            self._source.maker,
            self._source.batch_size,
            self._source.gather_device,
            stop,
            self._source.return_parameters,
        )
        batches: Iterator[Batch] = self._epoch(executor, epoch, position)
        if self._source.batches_ahead:
            here, there = self._source.gather_device, self._source.device
            device = there if there.type == "cuda" else here
            batches = Background(batches, self._source.batches_ahead, stop, self.feed.wake, device)
        self._run = Run(self, self._source, batches, stop, (epoch, batches_before))
        return self._run

    def _epoch(self, executor: Executor, epoch: int, position: Position | None) -> Iterator[Batch]:
        numbering = Numbering(self._planner.entries(epoch), position)
        yield from self._source.finished(executor, self._plans.take(epoch), numbering, epoch)
        self.feed.end(epoch + 1 if self._endless else None)

    def end(self) -> None:
        """Ends the run under way, if there is one."""
        if self._run is not None:
            self._run.close()
            self._run = None

    def account(self, last: float | None, asked: float, now: float, patches: int, began: float | None) -> None:
        """Adds one delivered batch to the totals."""
        self._totals["batches"] += 1
        self._totals["patches"] += patches
        self._totals["wait_seconds"] += now - (asked if began is None else began)
        if last is not None:
            self._totals["consumer_seconds"] += asked - last
        if began is not None:
            self._first_batch_seconds = now - began

    def stats(self) -> Stats:
        """The totals so far."""
        return Stats(
            **self._totals,
            loads=self.feed.num_loads,
            first_batch_seconds=self._first_batch_seconds,
            most_resident_volumes=self.feed.most_resident,
            most_resident_bytes=self.feed.most_bytes,
            **self._source.maker.tally.totals(),
        )

    def close(self) -> None:
        """Ends everything: run, threads, workers, memory. Idempotent.

        The garbage collector may call it at any moment in any thread: in one of ours it is left to a new thread, since
        ours may hold what closing waits for.
        """
        if not self.in_its_process:
            return
        self.closed = True
        if threading.current_thread().name.startswith("gpuqueue-"):
            threading.Thread(target=self._close, name="gpuqueue-close", daemon=True).start()
        else:
            self._close()

    def _close(self) -> None:
        with self._lock:
            try:
                self.end()
            finally:
                self.feed.close()
