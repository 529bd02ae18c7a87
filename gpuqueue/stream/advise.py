"""Which settings keep the training step fed within a memory budget: candidates are simulated, the cheapest first.

Cheaper means: fewer volumes on the device; then fewer patches per volume, so that as many patches show more volumes;
then fewer workers; then less lookahead; then a shorter patch queue.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from gpuqueue.stream.commands import Command, check
from gpuqueue.stream.simulate import PerVolume, Simulation, at_least, simulate
from gpuqueue.stream.strategies import Strategy, command_stream

_LOOKAHEADS = (0, 1, 2, 4)
_QUEUES = (0, 1, 2, 4)  # batches


@dataclass(frozen=True)
class Setting:
    """One choice of the queue's settings, and what its simulation comes to."""

    volumes_in_memory: int
    patches_per_volume: int
    workers: int
    lookahead: int
    patch_queue_size: int
    simulation: Simulation

    @property
    def busy(self) -> float:
        """Share of the time that the step computes in the middle half of the epoch, when the ramp is over."""
        waits = self.simulation.waits
        middle = waits[len(waits) // 4 : len(waits) - len(waits) // 4]
        steps = self.simulation.step_seconds * len(middle)
        return steps / (steps + sum(middle)) if middle else 0.0

    def __str__(self) -> str:
        return (
            f"volumes_in_memory={self.volumes_in_memory}, patches_per_volume={self.patches_per_volume}, "
            f"num_workers={self.workers}, lookahead={self.lookahead}, patch_queue_size={self.patch_queue_size}: "
            f"the step is busy {100 * self.busy:.0f} % of the time"
        )


@dataclass(frozen=True)
class Advice:
    """The cheapest setting that keeps the step fed, or None; `reason` says what was found, or what limits."""

    setting: Setting | None
    reason: str


def advise(
    num_volumes: int,
    load_seconds: PerVolume,
    patch_seconds: float,
    step_seconds: float,
    volume_bytes: PerVolume,
    memory_budget: int,
    *,
    batch_size: int = 8,
    max_workers: int = 8,
    prefetch_factor: int = 2,
    patches_per_volume: Sequence[int] = (8, 16, 32, 64, 128),
    min_distinct: float | None = None,
    utilisation: float = 0.95,
    strategy: str | Strategy = "sliding",
) -> Advice:
    """The cheapest settings that keep the step busy for the share `utilisation` of the time once the ramp is over.

    Args:
        num_volumes: Volumes of the data set.
        load_seconds: Time to read a volume, or a list of measured times.
        patch_seconds: Time to gather and augment one patch.
        step_seconds: Time of the training step, per batch.
        volume_bytes: Memory of a volume, or a list, of which the largest counts.
        memory_budget: Bytes for volumes on the device.
        batch_size: Patches of a batch.
        max_workers: Reader processes that may be used.
        prefetch_factor: Volumes that each of them reads ahead.
        patches_per_volume: The numbers to choose from.
        min_distinct: Mean number of distinct volumes that a batch must hold; half as many as can be unless given.
        utilisation: The share wanted, above 0 and below 1.
        strategy: The order of the stream.

    Raises ValueError for values that make no sense.

    >>> advise(50, 0.1, 0.001, 0.1, 1000, 10_000).reason.partition(": ")[0]
    'volumes_in_memory=4, patches_per_volume=8, num_workers=1, lookahead=0, patch_queue_size=8'
    """
    at_least(1, num_volumes=num_volumes, batch_size=batch_size, patches_per_volume=patches_per_volume)
    at_least(0, volume_bytes=volume_bytes, memory_budget=memory_budget, max_workers=max_workers)
    if not (0 < utilisation < 1 and step_seconds > 0):
        raise ValueError(f"utilisation {utilisation} must be between 0 and 1, step_seconds {step_seconds} above 0")
    most = num_volumes + max(_LOOKAHEADS)
    largest = float(np.max(volume_bytes))
    search = _Search(
        num_volumes=num_volumes,
        seconds=(load_seconds, patch_seconds, step_seconds),
        volume_bytes=volume_bytes,
        most_resident=most if largest == 0 else min(int(memory_budget // largest), most),
        batch_size=batch_size,
        max_workers=max_workers,
        prefetch_factor=prefetch_factor,
        numbers=sorted(patches_per_volume),
        min_distinct=min(batch_size, num_volumes) / 2 if min_distinct is None else min_distinct,
        utilisation=utilisation,
        strategy=strategy,
    )
    setting = next(search.feeding(), None)
    return Advice(setting, search.why_not() if setting is None else str(setting))


@dataclass(frozen=True)
class _Search:
    num_volumes: int
    seconds: tuple[PerVolume, float, float]  # of a load, a patch, a step
    volume_bytes: PerVolume
    most_resident: int
    batch_size: int
    max_workers: int
    prefetch_factor: int
    numbers: list[int]  # of patches per volume
    min_distinct: float
    utilisation: float
    strategy: str | Strategy

    def feeding(self) -> Iterator[Setting]:
        """The settings that keep the step fed, the cheapest first."""
        for resident, patches in product(_sizes(math.ceil(self.min_distinct), self.most_resident), self.numbers):
            if self.readers_needed(patches) > max(self.max_workers, 1) or self.gather_share * self.utilisation > 1:
                continue
            streams = self.streams(resident, patches)
            if max((one.busy for one in self.strongest(streams, patches)), default=0.0) < self.utilisation:
                continue
            for workers, lookahead, queue in product(self.worker_numbers(patches), streams, _QUEUES):
                setting = self.setting(streams[lookahead], patches, resident - lookahead, workers, lookahead, queue)
                if setting.busy >= self.utilisation:
                    yield setting

    def streams(self, resident: int, patches: int) -> dict[int, list[Command]]:
        """For each lookahead the stream that leaves room for it, where its batches are mixed as asked.

        An epoch, or as much of a long one as shows its steady state.
        """
        streams = {}
        for lookahead in _LOOKAHEADS:
            capacity = resident - lookahead
            if capacity >= 1:
                volumes = min(self.num_volumes, 4 * capacity + 20)
                stream = command_stream(volumes, capacity, patches, self.strategy)
                if check(stream, self.batch_size).mean_distinct >= self.min_distinct:
                    streams[lookahead] = stream
        return streams

    def strongest(self, streams: dict[int, list[Command]], patches: int) -> list[Setting]:
        """With all workers and the longest queue."""
        return [
            self.setting(stream, patches, 0, self.max_workers, lookahead, _QUEUES[-1])
            for lookahead, stream in streams.items()
        ]

    def setting(
        self, stream: list[Command], patches: int, capacity: int, workers: int, lookahead: int, queue_batches: int
    ) -> Setting:
        load, patch, step = self.seconds
        queue = queue_batches * self.batch_size
        simulation = simulate(
            stream, load, workers, self.prefetch_factor, patch, step, self.batch_size, lookahead, queue,
            self.volume_bytes,
        )  # fmt: skip
        return Setting(capacity, patches, workers, lookahead, queue, simulation)

    @property
    def gather_share(self) -> float:
        """Time to gather a batch over time of a step."""
        return self.seconds[1] * self.batch_size / self.seconds[2]

    def readers_needed(self, patches: int) -> float:
        """Readers that are busy all the time when the step is fed."""
        batches_per_second = self.utilisation / self.seconds[2]
        return float(np.mean(self.seconds[0])) * batches_per_second * self.batch_size / patches

    def worker_numbers(self, patches: int) -> list[int]:
        """Numbers of workers that can keep up; 0 is one reader, too."""
        least = math.ceil(self.readers_needed(patches))
        return [0] * (least <= 1) + list(range(max(least, 1), self.max_workers + 1))

    def why_not(self) -> str:
        """What limits, in words."""
        if self.gather_share * self.utilisation > 1:
            return (
                f"it cannot be done: gathering limits. A batch takes {self.gather_share:.3g} steps to gather; "
                "augment on a faster device, augment less, or take smaller patches"
            )
        most_patches = self.numbers[-1]
        readers = self.readers_needed(most_patches)
        if readers > max(self.max_workers, 1):
            return (
                f"it cannot be done: loading limits. Even {most_patches} patches per volume need {readers:.1f} readers "
                f"at work, and there may be {max(self.max_workers, 1)}; read faster (cache), or allow more workers or "
                "patches per volume"
            )
        settings = [
            setting
            for patches in self.numbers
            for setting in self.strongest(self.streams(self.most_resident, patches), patches)
        ]
        best = 100 * max((setting.busy for setting in settings), default=0.0)
        if not settings:
            found = f"that does not mix {self.min_distinct:.3g} volumes in a batch"
        else:
            found = f"with them the step is busy {best:.0f} % of the time at best"
        limit = "loading" if settings and self.most_resident >= self.num_volumes else "memory"
        return f"it cannot be done: {limit} limits. There is room for {self.most_resident} volumes; {found}"


def _sizes(least: int, most: int) -> Iterator[int]:
    """Numbers of resident volumes to try: each by about a fifth more than the one before, and the most."""
    size = max(least, 1)
    while size < most:
        yield size
        size += max(size // 5, 1)
    if size >= most >= max(least, 1):
        yield most
