"""What a stream will cost: the executor run in virtual time, before anything is read.

What is modelled: `workers` reader processes that take the loads in turn and read `workers` x `prefetch_factor` of them
ahead; a loading thread that takes what they read in stream order and may be `lookahead` loads ahead of the executor; an
executor that gathers a batch once it is full, or earlier when a volume among its patches is dropped, and puts it into a
patch queue; a consumer that takes a batch, computes, and asks for the next. Every thread does one thing after the
other, so each event's time is the larger of two or three earlier ones, and no event list is needed. Not modelled: the
start of processes, and that threads take CPU time from each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpuqueue.stream.commands import Command, check

PerVolume = float | Sequence[float]  # one value, or measured ones: volume v has number v modulo their number


@dataclass(frozen=True)
class Simulation:
    """What a run of a stream comes to. Times are in seconds, memory in bytes.

    `step_seconds` is the consumer's step, as given, `utilisation` the share of the epoch that it computes, `waits` how
    long it waited for each batch, `empty_queue_seconds` how long no gathered batch lay ready, `most_resident` volumes
    the most on the device at once, `mean_distinct` the mean number of distinct volumes in a batch, `limit` what the
    consumer waited for most: "loading", "gathering" or "step" (it hardly waited). `notes` are remarks on settings that
    do not help.
    """

    epoch_seconds: float
    step_seconds: float
    utilisation: float
    first_batch_seconds: float
    waits: tuple[float, ...]
    empty_queue_seconds: float
    most_resident: int
    most_resident_bytes: int
    mean_distinct: float
    limit: str
    notes: tuple[str, ...] = ()

    @property
    def wait_seconds(self) -> float:
        """All waiting of the consumer together, that for the first batch included."""
        return sum(self.waits)

    def __str__(self) -> str:
        text = (
            f"epoch {self.epoch_seconds:.3g} s, step busy {100 * self.utilisation:.0f} %, first batch after "
            f"{self.first_batch_seconds:.3g} s, longest later wait {max(self.waits[1:], default=0.0):.3g} s, "
            f"{self.most_resident} volumes ({self.most_resident_bytes} bytes) resident at most, "
            f"{self.mean_distinct:.1f} volumes per batch, limited by {self.limit}"
        )
        return "\n".join([text, *self.notes])


def simulate(
    stream: Iterable[Command],
    load_seconds: PerVolume,
    workers: int = 1,
    prefetch_factor: int = 2,
    patch_seconds: float = 0.0,
    step_seconds: float = 0.0,
    batch_size: int = 8,
    lookahead: int = 1,
    patch_queue_size: int = 16,
    volume_bytes: PerVolume = 0,
) -> Simulation:
    """Runs a finite stream in virtual time.

    Args:
        stream: The commands.
        load_seconds: Time to read a volume, or a list of measured times.
        workers: Reader processes; 0: the loading thread reads, or with an empty patch queue the consumer's thread.
        prefetch_factor: Volumes that each worker reads ahead.
        patch_seconds: Time to gather and augment one patch.
        step_seconds: Time of the consumer's step, per batch.
        batch_size: Patches of a batch.
        lookahead: Volumes that may be on the device before their L.
        patch_queue_size: Patches gathered ahead, rounded up to whole batches; 0: gathered when the consumer asks.
        volume_bytes: Memory of a volume, or a list.

    Raises StreamError for an invalid stream, ValueError for values that make no sense.

    >>> from gpuqueue.stream.commands import parse
    >>> simulate(parse("L0 P0 D0 L1 P1 D1"), 2.0, workers=2, step_seconds=1.0, batch_size=1).epoch_seconds
    4.0
    """
    at_least(0, load_seconds=load_seconds, workers=workers, patch_seconds=patch_seconds, step_seconds=step_seconds)
    at_least(0, lookahead=lookahead, patch_queue_size=patch_queue_size, volume_bytes=volume_bytes)
    at_least(1, prefetch_factor=prefetch_factor, batch_size=batch_size)
    commands = list(stream)
    summary = check(commands, batch_size)
    queue_batches = -(-patch_queue_size // batch_size)
    reading = _Reading(load_seconds, workers, prefetch_factor, lookahead, inline=workers == queue_batches == 0)
    run = _Run(reading, batch_size, queue_batches, patch_seconds, step_seconds)
    for command in commands:
        run.do(command)
    run.finish_batch()
    end = run.ask
    most, most_bytes = _most_resident(reading, run.dropped, volume_bytes)
    return Simulation(
        epoch_seconds=end,
        step_seconds=step_seconds,
        utilisation=len(run.taken) * step_seconds / end if end else 1.0,
        first_batch_seconds=run.taken[0] if run.taken else 0.0,
        waits=tuple(run.waits),
        empty_queue_seconds=_empty_seconds(run.put, run.taken, end),
        most_resident=most,
        most_resident_bytes=most_bytes,
        mean_distinct=summary.mean_distinct,
        limit=run.limit(),
        notes=_notes(commands, patch_queue_size),
    )


def at_least(least: int, **values: PerVolume) -> None:
    """Refuses settings below `least`."""
    for name, value in values.items():
        if np.size(value) == 0 or not np.min(value) >= least:
            raise ValueError(f"{name} must be at least {least}, not {value}")


def of_volume(values: PerVolume, volume: int) -> float:
    """The value of one volume; measured values repeat when there are fewer than volumes."""
    if isinstance(values, (int, float)):
        return values
    return values[volume % len(values)]


@dataclass
class _Reading:
    """Reader processes and loading thread: when each load, counted in stream order, arrives on the device."""

    seconds: PerVolume
    workers: int
    prefetch_factor: int
    lookahead: int
    inline: bool  # the consumer's own thread reads
    volumes: list[int] = field(default_factory=list)
    passed: list[float] = field(default_factory=list)  # when the executor passed the L
    arrived: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)  # when a worker had it ready

    def pass_load(self, volume: int, now: float) -> int:
        """The executor passes an L; returns the load's number."""
        self.volumes.append(volume)
        self.passed.append(now)
        return len(self.passed) - 1

    def arrival(self, number: int, now: float) -> float:
        """When that load has arrived; `now` matters only to an inline reader, which begins then."""
        while len(self.arrived) <= number:
            self.arrived.append(self._next_arrival(len(self.arrived), now))
        return self.arrived[number]

    def _next_arrival(self, number: int, now: float) -> float:
        seconds = of_volume(self.seconds, self.volumes[number])
        previous = self.arrived[-1] if self.arrived else 0.0
        allowed = self.passed[number - self.lookahead] if number >= self.lookahead else 0.0
        asked = max(previous, now) if self.inline else max(previous, allowed)
        if self.workers == 0:
            return asked + seconds
        ahead = number - self.workers * self.prefetch_factor
        requested = self.arrived[ahead] if ahead >= 0 else 0.0
        worker_free = self.read[number - self.workers] if number >= self.workers else 0.0
        self.read.append(max(requested, worker_free) + seconds)
        return max(asked, self.read[number])


@dataclass
class _Run:
    """The executor, the patch queue and the consumer."""

    reading: _Reading
    batch_size: int
    queue_batches: int
    patch_seconds: float
    step_seconds: float
    now: float = 0.0  # of the executor
    ask: float = 0.0  # when the consumer asks for the next batch
    loads: dict[int, int] = field(default_factory=dict)  # resident volume: number of its load
    waiting: list[int] = field(default_factory=list)  # loads whose patches are asked for, not yet gathered
    gathered: int = 0  # patches of the batch under way
    put: list[float] = field(default_factory=list)
    taken: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    dropped: dict[int, float] = field(default_factory=dict)  # load: when its volume was dropped
    held_by_loading: float = 0.0
    busy_gathering: float = 0.0

    def do(self, command: Command) -> None:
        op, volume = command
        if op == "L":
            self.loads[volume] = self.reading.pass_load(volume, self.now)
        elif op == "P":
            self.waiting.append(self.loads[volume])
            if self.gathered + len(self.waiting) == self.batch_size:
                self.finish_batch()
        elif op == "D":
            load = self.loads.pop(volume)
            if load in self.waiting:
                self._gather()
            self._wait_for(load)
            self.dropped[load] = self.now

    def finish_batch(self) -> None:
        """Gathers what waits and hands the batch over; nothing if there is none."""
        self._gather()
        if self.gathered == 0:
            return
        self.gathered = 0
        if self.queue_batches and len(self.put) >= self.queue_batches:
            self.now = max(self.now, self.taken[len(self.put) - self.queue_batches])
        self.put.append(self.now)
        self.taken.append(max(self.now, self.ask))
        self.waits.append(self.taken[-1] - self.ask)
        self.ask = self.taken[-1] + self.step_seconds
        if not self.queue_batches:
            self.now = self.ask

    def _gather(self) -> None:
        for load in dict.fromkeys(self.waiting):
            self._wait_for(load)
        seconds = self.patch_seconds * len(self.waiting)
        self.now += seconds
        self.busy_gathering += seconds
        self.gathered += len(self.waiting)
        self.waiting.clear()

    def _wait_for(self, load: int) -> None:
        arrival = self.reading.arrival(load, self.now)
        self.held_by_loading += max(arrival - self.now, 0.0)
        self.now = max(self.now, arrival)

    def limit(self) -> str:
        """What the consumer's later waits were for."""
        if sum(self.waits[1:]) <= 0.05 * self.ask:
            return "step"
        return "loading" if self.held_by_loading > self.busy_gathering else "gathering"


def _empty_seconds(put: list[float], taken: list[float], end: float) -> float:
    """How long of 0 .. `end` no batch lay between its put and its taking."""
    covered, until = 0.0, 0.0
    for begin, stop in zip(put, taken):
        covered += max(stop - max(begin, until), 0.0)
        until = max(until, stop)
    return end - covered


def _most_resident(reading: _Reading, dropped: dict[int, float], volume_bytes: PerVolume) -> tuple[int, int]:
    """Most volumes, and most bytes, between arrival and drop; a drop at the moment of an arrival comes first."""
    changes = [
        (time, sign, of_volume(volume_bytes, reading.volumes[load]))
        for times, sign in ((dict(enumerate(reading.arrived)), 1), (dropped, -1))
        for load, time in times.items()
    ]
    volumes = most = 0
    memory = most_bytes = 0.0
    for _, sign, size in sorted(changes):
        volumes, memory = volumes + sign, memory + sign * size
        most, most_bytes = max(most, volumes), max(most_bytes, memory)
    return most, round(most_bytes)


def _notes(commands: list[Command], patch_queue_size: int) -> tuple[str, ...]:
    most = _most_to_give(commands)
    if patch_queue_size <= most:
        return ()
    return (
        f"a patch queue of {patch_queue_size} is useless beyond {most}: the volumes resident at once have no more "
        "patches to give",
    )


def _most_to_give(commands: list[Command]) -> int:
    """The most patches that the volumes resident at any one time still have to give."""
    stays: list[int] = []  # patches of each stay
    current: dict[int, int] = {}
    for op, volume in commands:
        if op == "L":
            current[volume] = len(stays)
            stays.append(0)
        stays[current[volume]] += op == "P"
    left = most = opened = 0
    for op, _ in commands:
        if op == "L":
            left += stays[opened]
            opened += 1
        left -= op == "P"
        most = max(most, left)
    return most
