"""The executor without a planned epoch: one patch made again, and batches from a handful of volumes at hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gpuqueue.engine import PatchSource
from gpuqueue.executor import Executor, Numbering
from gpuqueue.patches.batch import Batch
from gpuqueue.rng import make_key
from gpuqueue.stream.commands import Command
from gpuqueue.stream.planner import Planner
from gpuqueue.stream.shards import Entry
from gpuqueue.stream.strategies import basic
from gpuqueue.volumes.failure import Failure
from gpuqueue.volumes.feed import Feed
from gpuqueue.volumes.loader import Idle, Loaded, Order, ReadSettings
from gpuqueue.volumes.residents import memory_for
from gpuqueue.volumes.volume import Volume


class _AtHand:
    """A reader of any indexable things, in this thread."""

    def __init__(self, items: Any, settings: ReadSettings, order: Order) -> None:
        self._items, self._settings, self._order = items, settings, order

    def start(self) -> None:
        """Nothing to start."""

    def next(self, stop: threading.Event) -> Loaded | Failure | Idle | None:
        """The next volume."""
        _, index = next(self._order)
        return self._settings.load(lambda: self._items[index], index)

    def close(self) -> None:
        """Nothing to end."""


def _run(
    items: Any,
    settings: ReadSettings,
    commands: Sequence[Command],
    entries: Sequence[Entry],
    epoch: int,
    source: PatchSource,
) -> Iterator[Batch]:
    memory, stop = memory_for(source.gather_device), threading.Event()
    loads = [(epoch, command.volume) for command in commands if command.op == "L"]
    feed = Feed(lambda order: _AtHand(items, settings, order), lambda _: iter(loads), memory, 0, background=False)
    executor = Executor(
        feed, memory, source.maker, source.batch_size, source.gather_device, stop, source.return_parameters
    )
    feed.begin(epoch)
    try:
        for batch in source.finished(executor, iter(commands), Numbering(entries), epoch):
            yield source.deliver(batch)
    finally:
        feed.close()


def handful_batches(
    volumes: Sequence[Volume],
    patches: Sequence[int],
    epoch: int,
    planner: Planner,
    source: PatchSource,
    settings: ReadSettings,
) -> Iterator[Batch]:
    """Batches from volumes at hand, all resident together, their patches mixed; each gives its number of `patches`."""
    key = make_key(planner.seed, planner.key_epoch(epoch), 0, volumes[0].id, "handful")
    entries = [Entry(place, number, 0) for place, number in enumerate(patches)]
    visits = [(entry.volume, entry.patches) for entry in entries]
    commands = list(basic(visits, len(volumes), np.random.Generator(np.random.Philox(key=key))))
    return _run(volumes, settings, commands, entries, epoch, source)


def replay_patch(item: Any, epoch: int, index: int, visit: int, source: PatchSource, settings: ReadSettings) -> Batch:
    """The `index`-th (k) patch of `epoch` of one dataset item, as a batch of one. `visit`: loads and redraws before."""
    load, patch, discard, redraw = (Command(op, 0) for op in "LPDA")
    commands = [load, *[redraw] * visit, patch, discard]
    batch: Batch = next(_run([item], settings, commands, [Entry(0, 1, index)], epoch, source))
    return batch


def visit_of(planner: Planner, epoch: int, volume: int, index: int) -> int:
    """At which load or redraw of the volume its `index`-th patch comes."""
    numbering = Numbering(planner.entries(epoch))
    for op, other in planner.commands(epoch):
        if op in "LA":
            numbering.turn(other)
        elif op == "P" and (numbered := numbering.next(other))[0] == index and other == volume:
            return numbered[1]
    raise ValueError(f"epoch {epoch} has no patch k={index} of this volume on this rank")
