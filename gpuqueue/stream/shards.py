"""Which volumes come in an epoch, how many patches of each, in which order, and which of them on which rank.

An epoch is one line of patches: the volumes in epoch order, each with its patches, numbered k = 0, 1, ... per volume.
Weights change how often a volume stands in the line, `batches_per_epoch` how long the line is; ranks cut it into equal
pieces, so a volume at a cut is read by both neighbours. How many patches and batches a rank gets depends on the counts
alone, never on the epoch or the rank: every rank ends at the same batch of every epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuqueue.rng import make_key

_Line = tuple[NDArray[np.int64], NDArray[np.int64]]  # volumes and their patches, both (number of entries,)


@dataclass(frozen=True, slots=True)
class Entry:
    """One visit in the epoch's line: `patches` patches of `volume`, the first of them its `first`-th (its k)."""

    volume: int
    patches: int
    first: int


@dataclass(frozen=True)
class EpochSize:
    """How long an epoch is: `total` patches are asked for; each rank gives `per_rank` patches in `batches` batches.

    `padded` patches are repeats, on all ranks together, to make the ranks equal; `dropped` patches come on no rank.
    """

    total: int
    per_rank: int
    batches: int
    padded: int
    dropped: int


def epoch_size(
    counts: Sequence[int],
    *,
    batch_size: int,
    drop_last: bool = False,
    batches_per_epoch: int | None = None,
    world_size: int = 1,
    uneven: str = "pad",
) -> EpochSize:
    """The size of every epoch on every rank, from `counts`, the patches of each volume.

    What does not divide by the number of ranks is filled up with repeats (`uneven="pad"`), left out ("drop") or refused
    ("error"). Raises ValueError for that, and for values that make no sense.

    >>> epoch_size([3, 3, 3, 3, 3, 3, 3], batch_size=4, world_size=2)
    EpochSize(total=21, per_rank=11, batches=3, padded=1, dropped=0)
    """
    _check_sizes(counts, batch_size, batches_per_epoch, world_size, uneven)
    total = int(sum(counts))
    if batches_per_epoch is not None:
        if total == 0 and batches_per_epoch > 0:
            raise ValueError(f"batches_per_epoch is {batches_per_epoch}, but no volume has a patch to give")
        per_rank = batches_per_epoch * batch_size
        return EpochSize(per_rank * world_size, per_rank, batches_per_epoch, 0, 0)
    per_rank = _share_of_a_rank(total, world_size, uneven)
    if drop_last:
        per_rank -= per_rank % batch_size
    batches = -(-per_rank // batch_size)
    surplus = total - per_rank * world_size
    return EpochSize(total, per_rank, batches, max(-surplus, 0), max(surplus, 0))


def num_batches(
    counts: Sequence[int],
    *,
    batch_size: int,
    drop_last: bool = False,
    batches_per_epoch: int | None = None,
    world_size: int = 1,
    uneven: str = "pad",
) -> int:
    """The number of batches of every epoch on every rank; as `epoch_size`.

    >>> num_batches([1, 5, 0, 12], batch_size=4), num_batches([1, 5, 0, 12], batch_size=4, drop_last=True)
    (5, 4)
    """
    return epoch_size(
        counts,
        batch_size=batch_size,
        drop_last=drop_last,
        batches_per_epoch=batches_per_epoch,
        world_size=world_size,
        uneven=uneven,
    ).batches


def epoch_entries(
    counts: Sequence[int],
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    batch_size: int,
    drop_last: bool = False,
    batches_per_epoch: int | None = None,
    weights: Sequence[float] | None = None,
    rank: int = 0,
    world_size: int = 1,
    uneven: str = "pad",
) -> list[Entry]:
    """What one rank gives in one epoch, in order.

    `counts` are the patches of each volume. `weights` say how often a volume is visited relative to its count: volume v
    gives the share weight_v * count_v of the epoch's patches, exact but for rounding (largest remainder, Hamilton
    1792), in visits of at most count_v patches. The order is a permutation keyed by (seed, epoch), the same on every
    rank. The line is cut, or goes on with further permutations, where `batches_per_epoch` is given. Repeats that make
    ranks equal are the line's first entries again, with k going on.

    Raises ValueError as `epoch_size` does, and for weights or a rank that make no sense.

    >>> epoch_entries([2, 0, 3], seed=0, epoch=0, shuffle=False, batch_size=2, rank=1, world_size=2)
    [Entry(volume=2, patches=2, first=1), Entry(volume=0, patches=1, first=2)]
    """
    size = epoch_size(
        counts,
        batch_size=batch_size,
        drop_last=drop_last,
        batches_per_epoch=batches_per_epoch,
        world_size=world_size,
        uneven=uneven,
    )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, not {rank}")
    plain = np.asarray(counts, np.int64)
    shares = plain if weights is None else weighted_counts(counts, weights)
    rng = np.random.Generator(np.random.Philox(key=make_key(seed, epoch, 0, "", "order"))) if shuffle else None
    line = _line(_visits(plain, shares), rng, size.per_rank * world_size, repeat=batches_per_epoch is None)
    return _piece(line, rank * size.per_rank, (rank + 1) * size.per_rank)


def weighted_counts(counts: Sequence[int], weights: Sequence[float]) -> NDArray[np.int64]:
    """The patches of each volume in an epoch of sum(counts) patches, in proportion to weight * count, (volumes,).

    Rounded by the largest remainder, the lower position first among equals. Raises ValueError for weights that are
    negative, not finite, of another number than the counts, or leave nothing to give.

    >>> weighted_counts([4, 4, 4], [2, 1, 1])
    array([6, 3, 3])
    """
    plain, factors = np.asarray(counts, np.int64), np.asarray(weights, np.float64)
    if factors.shape != plain.shape:
        raise ValueError(f"there are {factors.size} weights for {plain.size} volumes; give one for each")
    if not (np.isfinite(factors) & (factors >= 0)).all():
        worst = int(np.argmin(np.where(np.isfinite(factors), factors, -np.inf)))
        raise ValueError(f"the weight of volume {worst} is {factors[worst]}; weights are finite and not negative")
    total, wanted = int(plain.sum()), plain * factors
    if total == 0:
        return plain
    if wanted.sum() == 0:
        raise ValueError("all weights of volumes that have patches are 0, so no volume can give one; raise one of them")
    exact = wanted * (total / wanted.sum())
    shares: NDArray[np.int64] = np.floor(exact + 1e-9).astype(
        np.int64
    )  # a share that is whole but for rounding is whole
    remainders = np.where(wanted > 0, np.round(exact - shares, 9), -np.inf)
    shares[np.argsort(-remainders, kind="stable")[: total - int(shares.sum())]] += 1
    return shares


def _visits(plain: NDArray[np.int64], shares: NDArray[np.int64]) -> _Line:
    """Every volume's share as visits of at most its own count each: all the first visits, all the second ones, ..."""
    visits = -(-shares // np.maximum(plain, 1))
    volumes = np.repeat(np.arange(len(shares)), visits)
    turn = np.arange(len(volumes)) - np.repeat(np.cumsum(visits) - visits, visits)
    patches = shares[volumes] // visits[volumes] + (turn < shares[volumes] % visits[volumes])
    order = np.argsort(turn, kind="stable")
    return volumes[order], patches[order]


def _line(visits: _Line, rng: np.random.Generator | None, length: int, repeat: bool) -> _Line:
    """The visits in epoch order, followed, where `length` asks for more, by the same order again or by a new one."""
    volumes, patches = visits
    total = int(patches.sum())
    parts: list[NDArray[np.int64]] = []
    for number in range(max(-(-length // total), 1) if total else 0):
        if number == 0 or not repeat:
            order = np.arange(len(volumes)) if rng is None else rng.permutation(len(volumes))
        parts.append(order)
    line = np.concatenate(parts) if parts else np.arange(0)
    return volumes[line], patches[line]


def _piece(line: _Line, start: int, stop: int) -> list[Entry]:
    """The patches `start` to `stop` of the line, with the k at which each entry begins."""
    volumes, patches = line
    ends = np.cumsum(patches)
    begins = ends - patches
    skipped = np.maximum(start - begins, 0)
    taken = np.minimum(ends, stop) - begins - skipped
    inside = np.flatnonzero(taken > 0)
    columns = (volumes, taken, _given_before(volumes, patches) + skipped)
    return [Entry(*row) for row in zip(*(column[inside].tolist() for column in columns))]


def _given_before(volumes: NDArray[np.int64], patches: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many patches of its volume came before each entry: (entries,)."""
    order = np.argsort(volumes, kind="stable")
    sums = np.cumsum(patches[order]) - patches[order]
    is_first = np.diff(volumes[order], prepend=-1) != 0
    before = np.empty_like(sums)
    before[order] = sums - np.maximum.accumulate(np.where(is_first, sums, 0))
    return before


def _share_of_a_rank(total: int, world_size: int, uneven: str) -> int:
    """Patches of each rank, all equal."""
    if uneven == "pad":
        return -(-total // world_size)
    if uneven == "error" and total % world_size:
        raise ValueError(
            f"{total} patches do not divide by {world_size} ranks; change patches_per_volume or the volumes, "
            'or set uneven="pad" or uneven="drop"'
        )
    if 0 < total < world_size:
        raise ValueError(f'uneven="drop" would leave nothing: {total} patches for {world_size} ranks; use uneven="pad"')
    return total // world_size


def _check_sizes(
    counts: Sequence[int], batch_size: int, batches_per_epoch: int | None, world_size: int, uneven: str
) -> None:
    for name, value in (("batch_size", batch_size), ("world_size", world_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if batches_per_epoch is not None and batches_per_epoch < 1:
        raise ValueError(f"batches_per_epoch must be at least 1 or None, not {batches_per_epoch}")
    if uneven not in ("pad", "drop", "error"):
        raise ValueError(f'uneven must be "pad", "drop" or "error", not {uneven!r}')
    negative = next((volume for volume, count in enumerate(counts) if count < 0), None)
    if negative is not None:
        raise ValueError(f"volume {negative} cannot give {counts[negative]} patches; the number must be 0 or more")
