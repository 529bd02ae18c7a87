"""The plan of each epoch: which commands, decided before anything is read, and shared by loading and gathering."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from gpuqueue.errors import StreamError
from gpuqueue.rng import make_key
from gpuqueue.stream.commands import Command, checked
from gpuqueue.stream.shards import Entry, epoch_entries, num_batches, weighted_counts
from gpuqueue.stream.strategies import STRATEGIES, find_strategy


@dataclass(frozen=True)
class Planner:
    """All epochs of one rank, as a pure function of these settings and the epoch's number.

    `counts` are the patches of each volume. `same_every_epoch` plans every epoch as epoch 0.
    """

    counts: Sequence[int]
    capacity: int
    strategy: Any
    seed: int
    batch_size: int
    shuffle: bool = True
    same_every_epoch: bool = False
    drop_last: bool = False
    batches_per_epoch: int | None = None
    rank: int = 0
    world_size: int = 1
    uneven: str = "pad"
    weights: Sequence[float] | None = None

    @property
    def from_counts(self) -> bool:
        """Whether the strategy makes its stream from the counts; else it is one that was handed in."""
        return callable(self.strategy) or (isinstance(self.strategy, str) and self.strategy in STRATEGIES)

    @property
    def once(self) -> bool:
        """Whether the stream is a generator, which can be run only once."""
        return isinstance(self.strategy, Iterator)

    def key_epoch(self, epoch: int) -> int:
        """The epoch that draws are keyed by."""
        return 0 if self.same_every_epoch else epoch

    def entries(self, epoch: int) -> list[Entry]:
        """This rank's visits in order; empty for a stream that was handed in."""
        if not self.from_counts:
            return []
        return epoch_entries(
            self.counts,
            seed=self.seed,
            epoch=self.key_epoch(epoch),
            shuffle=self.shuffle,
            rank=self.rank,
            weights=self.weights,
            **self._sizes(),
        )

    def commands(self, epoch: int) -> Iterator[Command]:
        """The epoch's stream, checked while it runs. Raises StreamError where it breaks a rule."""
        rng = np.random.Generator(
            np.random.Philox(key=make_key(self.seed, self.key_epoch(epoch), self.rank, "", "strategy"))
        )
        visits = [(entry.volume, entry.patches) for entry in self.entries(epoch)]
        stream = checked(find_strategy(self.strategy)(visits, self.capacity, rng), len(self.counts))
        return self._counted(stream, visits) if self.from_counts else stream

    def num_batches(self) -> int:
        """Batches of every epoch, on every rank. Raises TypeError for a generator, whose length nobody knows."""
        if self.once:
            raise TypeError("a stream from a generator has no length")
        if self.from_counts:
            return num_batches(self.counts, **self._sizes())
        patches = sum(command.op == "P" for command in self.commands(0))
        return patches // self.batch_size if self.drop_last else -(-patches // self.batch_size)

    def check(self) -> None:
        """Raises ValueError or StreamError for counts, ranks, weights and ready streams that make no sense."""
        if not self.once:
            self.num_batches()
        if self.weights is not None:
            weighted_counts(self.counts, self.weights)
        if isinstance(self.strategy, str) or not callable(self.strategy):
            find_strategy(self.strategy)

    def _sizes(self) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "batches_per_epoch": self.batches_per_epoch,
            "world_size": self.world_size,
            "uneven": self.uneven,
        }

    def _counted(self, stream: Iterable[Command], visits: Sequence[tuple[int, int]]) -> Iterator[Command]:
        """Yields the stream; at its end StreamError if a strategy of one's own gave a volume another number."""
        left: Counter[int] = Counter()
        for volume, patches in visits:
            left[volume] += patches
        for command in stream:
            if command.op == "P":
                left[command.volume] -= 1
            yield command
        wrong = next((volume for volume, patches in left.items() if patches), None)
        if wrong is not None:
            planned = sum(patches for volume, patches in visits if volume == wrong)
            raise StreamError(
                f"the strategy gave {planned - left[wrong]} patches of volume {wrong}, its counts ask for {planned}"
            )


class Plans:
    """Hands each epoch's stream to the feed (its loads, ahead) and to the executor (all of it) from one run of the
    strategy, whichever comes first.

    >>> plans = Plans(lambda epoch: iter([Command("L", 3), Command("P", 3), Command("D", 3)]), endless=False)
    >>> list(plans.loads(0)), [str(command) for command in plans.take(0)]
    ([(0, 3)], ['L3', 'P3', 'D3'])
    """

    def __init__(self, commands: Callable[[int], Iterator[Command]], endless: bool) -> None:
        self._commands, self._endless = commands, endless
        self._shared: dict[int, _Shared] = {}
        self._resumed: tuple[int, Iterator[Command]] | None = None
        self._lock = threading.Lock()

    def loads(self, epoch: int) -> Iterator[tuple[int, int]]:
        """(epoch, volume) of every L from this epoch on; forgets what was planned before."""
        with self._lock:
            self._shared.clear()
            if self._resumed is not None and self._resumed[0] == epoch:
                self._shared[epoch] = _Shared(self._resumed[1])
            self._resumed = None
        return self._loads_of(count(epoch) if self._endless else (epoch,))

    def _loads_of(self, epochs: Iterable[int]) -> Iterator[tuple[int, int]]:
        for number in epochs:
            shared, is_empty = self._find(number), True
            for command in shared.loads():
                is_empty = False
                yield number, command.volume
            if is_empty or shared.failed:
                return  # planning on could go on for ever without a load

    def resume(self, epoch: int, commands: Iterator[Command]) -> None:
        """The next `loads(epoch)` begins with these commands instead of the epoch's own."""
        self._resumed = (epoch, commands)

    def take(self, epoch: int) -> Iterator[Command]:
        """The epoch's commands, for the executor; to be called after `loads` was asked for this epoch."""
        shared = self._find(epoch)
        with self._lock:
            self._shared = {number: kept for number, kept in self._shared.items() if number >= epoch}
        return shared.all()

    def _find(self, epoch: int) -> _Shared:
        with self._lock:
            if epoch not in self._shared:
                self._shared[epoch] = _Shared(self._commands(epoch))
            return self._shared[epoch]


class _Shared:
    """One stream for two readers in two threads. An error is raised to the executor alone, at its place."""

    def __init__(self, source: Iterator[Command]) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._for_feed: deque[Command] = deque()
        self._for_executor: deque[Command] = deque()
        self._error: Exception | None = None
        self._ended = False

    def _pull(self) -> None:
        try:
            command = next(self._source)
        except StopIteration:
            self._ended = True
        except Exception as error:
            self._ended, self._error = True, error
        else:
            self._for_executor.append(command)
            if command.op == "L":
                self._for_feed.append(command)

    def _read(self, mine: deque[Command]) -> Iterator[Command]:
        while True:
            with self._lock:
                while not mine and not self._ended:
                    self._pull()
                if not mine:
                    return
                command = mine.popleft()
            yield command

    @property
    def failed(self) -> bool:
        return self._error is not None

    def loads(self) -> Iterator[Command]:
        return self._read(self._for_feed)

    def all(self) -> Iterator[Command]:
        yield from self._read(self._for_executor)
        if self._error is not None:
            raise self._error
