"""Epoch order, weights, length and ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuqueue.stream.shards import Entry, epoch_entries, epoch_size, num_batches, weighted_counts

counts_of_volumes = st.lists(st.integers(0, 20), max_size=40)
worlds, batch_sizes = st.integers(1, 8), st.integers(1, 9)
unevens = st.sampled_from(["pad", "drop"])


def entries(counts: list[int], **settings: Any) -> list[Entry]:
    return epoch_entries(counts, **({"seed": 0, "epoch": 0, "shuffle": True, "batch_size": 4} | settings))


def patches(parts: list[Entry]) -> Iterator[tuple[int, int]]:
    """Every patch as (volume, k)."""
    return ((entry.volume, entry.first + n) for entry in parts for n in range(entry.patches))


def all_ranks(counts: list[int], world_size: int, **settings: Any) -> list[tuple[int, int]]:
    parts = [entries(counts, rank=rank, world_size=world_size, **settings) for rank in range(world_size)]
    return [patch for part in parts for patch in patches(part)]


@given(counts_of_volumes, worlds, batch_sizes, st.booleans(), st.booleans(), unevens, st.integers(0, 5))
def test_ranks_cut_one_line_into_equal_parts_of_the_promised_length(
    counts: list[int], world: int, batch_size: int, shuffle: bool, drop_last: bool, uneven: str, epoch: int
) -> None:
    """H12, H61: the counted number of batches is the promised one, on every rank and in every epoch."""
    total = sum(counts)
    assume(uneven == "pad" or total == 0 or total >= world)
    sizes: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "uneven": uneven}
    size = epoch_size(counts, world_size=world, **sizes)
    order = {"shuffle": shuffle, "epoch": epoch}
    for rank in range(world):
        part = entries(counts, rank=rank, world_size=world, **sizes, **order)
        assert sum(entry.patches for entry in part) == size.per_rank
        assert -(-size.per_rank // batch_size) == size.batches == num_batches(counts, world_size=world, **sizes)
        assert all(entry.patches > 0 for entry in part)
    together = all_ranks(counts, world, **sizes, **order)
    assert len(together) == len(set(together)) == total + size.padded - size.dropped
    assert sum(k >= counts[volume] for volume, k in together) == size.padded
    unpadded = [(volume, k) for volume, k in together if k < counts[volume]]
    assert unpadded == list(patches(entries(counts, batch_size=batch_size, **order)))[: len(unpadded)]
    if not drop_last:
        assert size.padded < world and size.dropped < world


@given(counts_of_volumes, st.integers(0, 5))
def test_without_ranks_each_volume_comes_once_with_its_own_count(counts: list[int], epoch: int) -> None:
    """H15"""
    parts = entries(counts, epoch=epoch)
    assert sorted(parts, key=lambda entry: entry.volume) == [
        Entry(volume, number, 0) for volume, number in enumerate(counts) if number
    ]


@given(counts_of_volumes, worlds, batch_sizes, st.integers(1, 30), st.booleans())
def test_batches_per_epoch_is_exact_and_cuts_or_continues_the_order(
    counts: list[int], world: int, batch_size: int, wanted: int, shuffle: bool
) -> None:
    assume(sum(counts) > 0)
    sizes: dict[str, Any] = {"batch_size": batch_size, "batches_per_epoch": wanted, "shuffle": shuffle}
    assert num_batches(counts, batch_size=batch_size, batches_per_epoch=wanted, world_size=world) == wanted
    together = all_ranks(counts, world, **sizes)
    assert len(together) == wanted * batch_size * world == len(set(together))
    whole = list(patches(entries(counts, shuffle=shuffle)))
    common = min(len(whole), len(together))
    assert together[:common] == whole[:common]
    given_in_all = Counter(volume for volume, _ in together)
    passes, rest = divmod(len(together), len(whole))
    for volume, count in enumerate(counts):
        assert passes * count <= given_in_all[volume] <= (passes + bool(rest)) * count
        assert {k for other, k in together if other == volume} == set(range(given_in_all[volume]))


def test_later_passes_of_a_long_epoch_are_new_permutations() -> None:
    volumes = [entry.volume for entry in entries([1] * 30, batch_size=30, batches_per_epoch=3)]
    first, second, third = volumes[:30], volumes[30:60], volumes[60:]
    assert sorted(first) == sorted(second) == sorted(third) == list(range(30))
    assert first != second != third != first


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=40))
def test_weighted_shares_are_exact_to_less_than_one_patch(volumes: list[tuple[int, int]]) -> None:
    counts, weights = [count for count, _ in volumes], [weight for _, weight in volumes]
    wanted = sum(count * weight for count, weight in volumes)
    assume(wanted > 0)
    shares = weighted_counts(counts, weights).tolist()
    assert sum(shares) == sum(counts)
    exact = [Fraction(count * weight * sum(counts), wanted) for count, weight in volumes]
    assert all(abs(share - value) < 1 for share, value in zip(shares, exact))
    rounded_up = [value - int(value) for share, value in zip(shares, exact) if share > value]
    rounded_down = [value - int(value) for share, value in zip(shares, exact) if share < value]
    assert min(rounded_up, default=1) >= max(rounded_down, default=0)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(0, 10)), min_size=1, max_size=40),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 5),
)
def test_weights_hold_over_all_ranks_and_visits_are_no_longer_than_a_volumes_count(
    volumes: list[tuple[int, float]], world: int, shuffle: bool, epoch: int
) -> None:
    counts, weights = [count for count, _ in volumes], [weight for _, weight in volumes]
    assume(sum(count * weight for count, weight in volumes) > 1e-6)
    shares = weighted_counts(counts, weights)
    settings: dict[str, Any] = {"weights": weights, "shuffle": shuffle, "epoch": epoch}
    together = all_ranks(counts, world, **settings)
    padded = epoch_size(counts, batch_size=4, world_size=world).padded
    unpadded = together[: len(together) - padded]
    assert Counter(volume for volume, _ in unpadded) == Counter(dict(enumerate(shares.tolist())))
    assert len(set(together)) == len(together)
    assert all(entry.patches <= counts[entry.volume] for entry in entries(counts, **settings))


def test_equal_weights_change_nothing() -> None:
    counts = [3, 0, 7, 1]
    assert entries(counts, weights=[2.5] * 4) == entries(counts)


def test_a_heavy_volume_is_visited_again_and_again_not_once_for_long() -> None:
    parts = entries([4] * 4, weights=[3, 1, 0, 0], shuffle=False)
    assert parts == [Entry(0, 4, 0), Entry(1, 4, 0), Entry(0, 4, 4), Entry(0, 4, 8)]


@pytest.mark.parametrize("total, keep, drop", [(95, 6, 5), (96, 6, 6), (97, 7, 6)])
def test_the_length_is_right_at_exact_multiples(total: int, keep: int, drop: int) -> None:
    """H12, H11: batch 16; the counted number in two epochs."""
    counts = [10] * (total // 10) + [total % 10]
    for drop_last, batches in ((False, keep), (True, drop)):
        assert num_batches(counts, batch_size=16, drop_last=drop_last) == batches
        for epoch in (0, 1):
            part = entries(counts, batch_size=16, drop_last=drop_last, epoch=epoch)
            assert -(-sum(entry.patches for entry in part) // 16) == batches


def test_no_batch_is_topped_up_from_the_next_epoch() -> None:
    """H17: 7 volumes of 3 patches, batch 4: 6 batches, the last of one patch, or 5; H11: 10 of 10, batch 16: 7 or 6."""
    for epoch in range(3):
        assert Counter(volume for volume, _ in patches(entries([3] * 7, epoch=epoch))) == dict.fromkeys(range(7), 3)
    assert epoch_size([3] * 7, batch_size=4).batches == 6
    assert epoch_size([3] * 7, batch_size=4, drop_last=True).per_rank == 20
    assert num_batches([10] * 10, batch_size=16) == 7
    assert num_batches([10] * 10, batch_size=16, drop_last=True) == 6


def test_ranks_share_the_volumes_out() -> None:
    """H60: 12 volumes over 3 ranks: 4 each, none twice."""
    parts = [{entry.volume for entry in entries([5] * 12, rank=rank, world_size=3)} for rank in range(3)]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert set.union(*parts) == set(range(12))


def test_every_rank_has_the_same_number_of_batches() -> None:
    """H61: its own numbers."""
    for world in range(1, 9):
        for volumes in range(1, 18):
            counted = {
                -(-sum(entry.patches for entry in entries([3] * volumes, rank=rank, world_size=world)) // 4)
                for rank in range(world)
            }
            assert counted == {num_batches([3] * volumes, batch_size=4, world_size=world)}
            assert min(counted) > 0


def test_fewer_patches_than_ranks_are_repeated_or_refused() -> None:
    """H61: never one batch here and none there."""
    assert all_ranks([1, 1], 5, shuffle=False) == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    with pytest.raises(ValueError, match='uneven="drop" would leave nothing: 2 patches for 5 ranks'):
        entries([1, 1], world_size=5, uneven="drop")


def test_ranks_hold_different_patches_and_one_rank_alone_repeats_its_own() -> None:
    """H62, the order."""
    parts = [list(patches(entries([6] * 20, rank=rank, world_size=4))) for rank in range(4)]
    assert len(set().union(*parts)) == sum(map(len, parts))
    assert list(patches(entries([6] * 20, rank=2, world_size=4))) == parts[2]


def test_the_order_follows_seed_and_epoch_alone() -> None:
    """H63: two epochs differ, epoch 0 comes back, all ranks see one permutation."""
    counts = [2] * 30
    assert entries(counts, epoch=0) != entries(counts, epoch=1)
    assert entries(counts, seed=1) != entries(counts, seed=0)
    np.random.seed(5)
    assert entries(counts, epoch=0) == entries(counts, epoch=0)
    for epoch in (0, 1):
        assert all_ranks(counts, 4, epoch=epoch) == list(patches(entries(counts, epoch=epoch)))
    assert [entry.volume for entry in entries(counts, shuffle=False, epoch=3)] == list(range(30))


def test_validation_over_ranks_sees_each_volume_once_and_marks_the_few_repeats() -> None:
    for volumes in range(1, 20):
        for world in range(1, 9):
            together = all_ranks([1] * volumes, world, shuffle=False, batch_size=1)
            assert sorted(volume for volume, k in together if k < 1) == list(range(volumes))
            assert sum(k >= 1 for _, k in together) < world


def test_uneven_error_refuses_only_what_does_not_divide() -> None:
    assert len(all_ranks([4, 5], 3, uneven="error")) == 9
    with pytest.raises(ValueError, match=r"9 patches do not divide by 2 ranks.*uneven=.pad. or"):
        entries([4, 5], world_size=2, uneven="error")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"world_size": 0}, "world_size must be at least 1, not 0"),
        ({"rank": 2, "world_size": 2}, "rank must be from 0 to 1, not 2"),
        ({"batches_per_epoch": 0}, "batches_per_epoch must be at least 1 or None"),
        ({"uneven": "both"}, "uneven must be"),
        ({"weights": [1.0]}, "1 weights for 2 volumes"),
        ({"weights": [1.0, -2.0]}, "weight of volume 1 is -2.0"),
        ({"weights": [float("nan"), 1.0]}, "weight of volume 0 is nan"),
        ({"weights": [0.0, 0.0]}, "all weights of volumes that have patches are 0"),
    ],
)
def test_senseless_values_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        entries([3, 4], **settings)


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="volume 1 cannot give -1 patches"):
        entries([3, -1])
    with pytest.raises(ValueError, match="no volume has a patch to give"):
        entries([0, 0], batches_per_epoch=3)
    assert entries([]) == entries([0]) == []
