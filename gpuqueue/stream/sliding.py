"""The default order: each volume stays for `capacity` periods, one enters and one leaves in each.

Here too is what every strategy does with its arguments: visits of no patches are left out, senseless values refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gpuqueue.stream.commands import Command

Visit = tuple[int, int]  # volume, number of patches


def sliding(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterator[Command]:
    """The default: ramps up from the first volume, then one volume leaves and one enters about every N patches; lazy.

    Time runs in periods. A volume stays for `capacity` periods and gives an even share of its patches in each, evenly
    spaced from a random offset, so that a batch holds many volumes. While there is room one volume enters with each
    period; whenever one leaves, the next enters at once. So the volumes' remaining counts stay staggered, a new volume
    has time to load before its first turn, and loads come at an even pace. When nothing is left to enter, each gives
    what it still has, evenly spaced to the end: they end together and the last batches stay mixed.

    >>> " ".join(map(str, sliding([(0, 2), (1, 2), (2, 2)], 2, np.random.default_rng(0))))
    'L0 P0 L1 P1 P0 D0 L2 P1 D1 P2 P2 D2'
    """
    check_capacity(capacity)
    return _slide(_Waiting(visits), capacity, rng)


def check_capacity(capacity: int) -> None:
    """Refuses less than one volume in memory with a ValueError."""
    if capacity < 1:
        raise ValueError(f"the number of volumes in memory must be at least 1, not {capacity}")


def worth_loading(visits: Iterable[Visit]) -> Iterator[Visit]:
    """The visits that have patches to give. Raises ValueError for a negative number."""
    for volume, patches in visits:
        if patches < 0:
            raise ValueError(f"volume {volume} cannot give {patches} patches; the number must be 0 or more")
        if patches > 0:
            yield volume, patches


@dataclass
class _Stay:
    """A resident volume in `sliding`: of `total` patches `given` have come, over `age` whole periods."""

    patch: Command
    total: int
    given: int = 0
    age: int = 0

    def quota(self, periods: int) -> int:
        """Patches of the next period: an even share of `total` over `periods`, at least one in the first and last."""
        even = self.total * (self.age + 1) // periods
        sparse = 1 + (self.total - 1) * self.age // max(periods - 1, 1)  # the larger of the two where total < periods
        return max(max(even, sparse) - self.given, 0)


class _Waiting:
    """The visits still to come, with a look at the next one."""

    def __init__(self, visits: Iterable[Visit]) -> None:
        self._visits = worth_loading(visits)
        self.next: Visit | None = next(self._visits, None)

    def enter(self, stays: dict[int, _Stay]) -> Iterator[Command]:
        """Lets the next volume in, or lets it stay on where it is resident."""
        if self.next is None:
            return
        volume, patches = self.next
        self.next = next(self._visits, None)
        if volume in stays:
            stay = stays[volume]
            stays[volume] = _Stay(stay.patch, stay.total - stay.given + patches)
        else:
            stays[volume] = _Stay(Command("P", volume), patches)
            yield Command("L", volume)


def _slide(waiting: _Waiting, capacity: int, rng: np.random.Generator) -> Iterator[Command]:
    stays: dict[int, _Stay] = {}
    while waiting.next is not None or stays:
        if len(stays) < capacity:
            yield from waiting.enter(stays)
        present = list(stays.values())
        if waiting.next is None:
            quotas = [stay.total - stay.given for stay in present]
        else:
            quotas = [stay.quota(capacity) for stay in present]
        for volume in _evenly_spaced(list(stays), quotas, rng):
            stay = stays[volume]
            yield stay.patch
            stay.given += 1
            if stay.given == stay.total:
                if waiting.next is None or waiting.next[0] != volume:
                    del stays[volume]
                    yield Command("D", volume)
                yield from waiting.enter(stays)
        for stay in present:
            stay.age += 1


def _evenly_spaced(volumes: list[int], quotas: list[int], rng: np.random.Generator) -> list[int]:
    """Each volume as often as its quota says, at equal distances over the period, from a random offset."""
    counts = np.asarray(quotas, np.int64)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    place = (number + np.repeat(rng.random(len(counts)), counts)) / np.repeat(counts, counts)
    order: list[int] = np.repeat(volumes, counts)[np.argsort(place, kind="stable")].tolist()
    return order
