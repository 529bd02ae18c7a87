"""L and D carried out: loads in stream order, ahead of the executor by at most `lookahead` volumes.

The executor says `allow()` when it passes an L, `take(v)` when a P needs a volume, `release(v)` at a D. A load is begun
only while fewer than allowed + lookahead have been made, so residents never exceed the stream's own plus lookahead.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from gpuqueue.errors import QueueClosed, StageError, VolumeError, WorkerError
from gpuqueue.volumes.failure import Failure
from gpuqueue.volumes.loader import Idle, Loaded, Order
from gpuqueue.volumes.residents import Memory, Resident


class VolumeReader(Protocol):
    """Reads volumes in the order it was made with."""

    def start(self) -> None: ...
    def next(self, stop: threading.Event) -> Loaded | Failure | Idle | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Request:
    index: int
    epoch: int
    generation: int


Loads = Callable[[int], Iterator[tuple[int, int]]]  # first epoch -> (epoch, volume) of every L from there on


class Feed:
    """Owns the reader and the residents; used by one executor at a time.

    Args:
        make_reader: Makes the reader of an endless order.
        loads: The L commands from an epoch on, as (epoch, volume).
        memory: Where residents live.
        lookahead: Volumes that may be loaded before their L.
        background: Load in a thread of its own; else `take` loads.
    """

    def __init__(
        self,
        make_reader: Callable[[Order], VolumeReader],
        loads: Loads,
        memory: Memory,
        lookahead: int,
        background: bool,
    ) -> None:
        self._loads, self._memory, self._lookahead, self._background = loads, memory, lookahead, background
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._reader: VolumeReader | None = make_reader(iter(self._request, None))
        self._thread: threading.Thread | None = None
        self._done = threading.Event()  # a joined thread can look finished after a signal; this cannot
        self._started = False
        self._broken: BaseException | None = None
        self._places: tuple[tuple[int, int], dict[str, int]] = ((-1, -1), {})  # of this epoch: which index had which id
        self._layout: tuple[str, dict[str, tuple[str, int]]] | None = None
        self._generation, self._order = 0, iter(())  # type: tuple[int, Iterator[tuple[int, int]]]
        self._order_ended = False
        self._issued: deque[_Request] = deque()
        self._arrived: defaultdict[int, deque[Resident | Exception]] = defaultdict(deque)
        self._next_epoch: int | None = None
        self._allowed = self._loaded = 0
        self.num_loads = self.num_resident = self.most_resident = self.most_bytes = 0
        self._bytes = 0

    def begin(self, epoch: int) -> None:
        """Before an epoch's first command. Loading goes on where it predicted this epoch, else it starts anew."""
        if self._stop.is_set():
            raise QueueClosed("the queue is closed; make a new one")
        if self._broken is not None:
            cause = str(self._broken) or type(self._broken).__name__
            raise QueueClosed(f"the queue is closed, make a new one: {cause}") from self._broken
        with self._changed:
            if self._next_epoch != epoch or self._order_ended:
                self._restart(epoch)
            self._next_epoch = None  # known again once this epoch has ended
        if not self._started:
            self._started = True
            self._start()

    def _start(self) -> None:
        assert self._reader is not None
        try:
            self._reader.start()
        except BaseException as error:  # Ctrl-C too: some workers may be there, and nobody reads
            self._break(error)
            if not isinstance(error, Exception):
                raise
            text = f"the loader could not start: {type(error).__name__}: {error}"
            self._broken = WorkerError(text, stage="reading")
            raise self._broken from error
        if self._background:
            self._thread = threading.Thread(target=self._run, name="gpuqueue-load", daemon=True)
            self._thread.start()

    def end(self, next_epoch: int | None) -> None:
        """After an epoch's last command; loading may already be in `next_epoch`. None: begin anew."""
        self._next_epoch = next_epoch

    def allow(self) -> None:
        """The executor passed an L."""
        with self._changed:
            self._allowed += 1
            self._changed.notify_all()

    def take(self, volume: int, stop: threading.Event) -> Resident:
        """The resident, once it is loaded. Raises what its loading raised; QueueClosed when `stop` is set."""
        with self._changed:
            while True:
                if self._stop.is_set() or stop.is_set():
                    raise QueueClosed("the iterator was ended")
                if self._arrived[volume]:
                    break
                if self._broken is not None:
                    raise self._broken
                if self._background:
                    self._changed.wait(1.0)
                else:
                    self._advance()
            resident = self._arrived[volume][0]
        if isinstance(resident, Resident):
            return resident
        try:
            raise resident
        finally:
            del resident  # else its traceback holds it, for the collector to find

    def release(self, volume: int) -> None:
        """D: gives the volume's memory back."""
        with self._changed:
            resident = self._arrived[volume].popleft()
            self._drop(resident)

    def wake(self) -> None:
        """Lets `take` look at its `stop` again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the reader and the thread, and frees everything. Idempotent."""
        self._stop.set()
        self.wake()
        reader, self._reader = self._reader, None  # which refers back to this feed: nothing is left to the collector
        if reader is not None:
            reader.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._done.wait(10)
        with self._changed:
            self._restart(None)
            self._broken = None  # whose traceback refers back to this feed
        self._memory.close()

    def _restart(self, epoch: int | None) -> None:
        self._generation += 1
        self._order, self._order_ended = iter(()) if epoch is None else self._loads(epoch), False
        for waiting in self._arrived.values():
            while waiting:
                self._drop(waiting.popleft())
        self._arrived.clear()
        self._allowed = self._loaded = 0
        self._changed.notify_all()

    def _drop(self, resident: Resident | Exception) -> None:
        if isinstance(resident, Resident):
            self._bytes -= resident.nbytes
            self.num_resident -= 1
            self._memory.release(resident)

    def _request(self) -> tuple[int, int]:
        """What the reader is to read next: asked ahead of what `_advance` delivers, in the same order."""
        with self._changed:
            epoch, index = next(self._order, (-1, -1))
            self._order_ended = index < 0
            self._issued.append(_Request(index, epoch, self._generation))
            return epoch, index

    def _break(self, error: BaseException) -> None:
        """Reading cannot go on: whoever waits is told, and the workers end."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()
        if (reader := self._reader) is not None:
            reader.close()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                with self._changed:
                    while not self._stop.is_set() and self._loaded >= self._allowed + self._lookahead:
                        self._changed.wait(1.0)
                if not self._stop.is_set():
                    self._advance()
                if self._broken is not None:
                    return
        except BaseException as error:
            self._break(error)
        finally:
            self._done.set()

    def _advance(self) -> None:
        """Loads the next volume; one that belongs to an abandoned order is thrown away."""
        if (reader := self._reader) is None:
            return
        try:
            item = reader.next(self._stop)
        except Exception as error:
            self._break(error)
            return
        except BaseException:  # Ctrl-C in the caller's thread: what was being read never answers
            self._issued.clear()
            raise
        if item is None:
            return
        with self._changed:
            request = self._issued.popleft()
            while request.index < 0 and request.generation == self._generation and not self._stop.is_set():
                assert self._background, "a P waits for a volume that no L asked for"
                self._changed.wait(1.0)  # the order has ended; a new one wakes us
            if request.generation != self._generation or isinstance(item, Idle):
                return
            self._loaded += 1
            self.num_resident += 1
            self.most_resident = max(self.most_resident, self.num_resident)
        resident = self._resident(item, request)
        with self._changed:
            if isinstance(resident, Resident):
                self._bytes += resident.nbytes
                self.num_loads += 1
                self.most_bytes = max(self.most_bytes, self._bytes)
            else:
                self.num_resident -= 1
            if request.generation == self._generation:
                self._arrived[request.index].append(resident)
                self._changed.notify_all()
            else:
                self._drop(resident)

    def _resident(self, item: Loaded | Failure, request: _Request) -> Resident | Exception:
        epoch = request.epoch
        if isinstance(item, Failure):
            return _reading_error(item, epoch)
        if self._places[0] != (request.generation, epoch):
            self._places = (request.generation, epoch), {}
        if self._places[1].setdefault(item.volume.id, request.index) != request.index:
            return VolumeError(f"the id {item.volume.id!r} occurs twice; ids must be unique in a dataset")
        try:
            resident = self._memory.load(item.volume, item.prepared)
        except Exception as error:
            failure = StageError(
                f"copying volume {item.volume.id!r} ({item.volume.nbytes} bytes) to the device failed: "
                f"{type(error).__name__}: {error}",
                stage="copy",
                volume=item.volume.id,
                epoch=epoch,
            )
            failure.__cause__ = error
            return failure
        first_id, first = self._layout or (resident.id, resident.layout)
        self._layout = (first_id, first)
        if resident.layout != first:
            return VolumeError(
                f"volume {resident.id!r} has {_describe(resident.layout)}, but volume {first_id!r} has "
                f"{_describe(first)}; all volumes of a queue need the same keys, roles and channels"
            )
        return resident


def _describe(layout: dict[str, tuple[str, int]]) -> str:
    return ", ".join(f"{key} ({role}, {channels} channels)" for key, (role, channels) in layout.items())


def _reading_error(failure: Failure, epoch: int) -> Exception:
    """The failure as an exception whose last line names the first cause."""
    text = f"reading volume {failure.volume_id!r} failed in epoch {epoch}: {failure.kind}: {failure.message}"
    if failure.exception is None:
        text += f"\n\n{failure.trace}"
    error = StageError(text, stage="reading", volume=failure.volume_id, epoch=epoch)
    error.__cause__ = failure.exception
    return error
