"""Rewriting streams: optimize, shift, randomize."""

from __future__ import annotations

from collections import Counter
from itertools import count, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuqueue.errors import StreamError
from gpuqueue.stream.commands import Command, check, parse, to_text
from gpuqueue.stream.rewrites import optimize, randomize, shift
from gpuqueue.stream.strategies import STRATEGIES, command_stream


@st.composite
def streams(draw: st.DrawFn) -> list[Command]:
    """Any valid stream of up to six volumes, with redraws, late drops, loads for nothing and volumes loaded again."""
    resident: set[int] = set()
    stream: list[Command] = []
    for volume, op in draw(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("PPPPDA")), max_size=60)):
        if volume not in resident:
            resident.add(volume)
            stream.append(Command("L", volume))
        else:
            stream.append(Command(op, volume))
            resident -= {volume} if op == "D" else set()
    return stream + [Command("D", volume) for volume in sorted(resident)]


def only(stream: list[Command], ops: str) -> list[Command]:
    return [command for command in stream if command.op in ops]


def uses_before_loads(stream: list[Command]) -> list[int]:
    """How many P and A come before each L."""
    return [len(only(stream[:position], "PA")) for position, command in enumerate(stream) if command.op == "L"]


@given(streams(), st.integers(0, 3))
def test_optimize_keeps_order_and_capacity_and_delays_no_load(stream: list[Command], spare: int) -> None:
    peak = check(stream).most_resident
    best = optimize(stream, peak + spare)
    assert check(best).most_resident <= peak + spare
    assert only(best, "PA") == only(stream, "PA") and only(best, "L") == only(stream, "L")
    assert all(now <= before for now, before in zip(uses_before_loads(best), uses_before_loads(stream)))
    assert optimize(best, peak + spare) == best


@given(streams())
def test_optimize_again_with_the_own_peak_changes_nothing(stream: list[Command]) -> None:
    best = optimize(stream)
    assert optimize(best) == best
    assert check(best).most_resident <= check(stream).most_resident


@given(streams())
def test_optimize_drops_at_the_last_use_and_loads_once_there_is_room(stream: list[Command]) -> None:
    best, peak = optimize(stream), check(stream).most_resident
    resident: set[int] = set()
    full = False  # before the latest D
    for position, command in enumerate(best):
        before = best[position - 1]
        if command.op == "D":
            assert before.volume == command.volume  # its last use, or its load where it has none
            full = len(resident) == peak
            resident.discard(command.volume)
        elif command.op == "L":
            if position and before.op != "L" and best[position - 2] != Command("L", before.volume):
                assert before.op == "D" and (full or before.volume == command.volume)  # so it could come no earlier
            resident.add(command.volume)


def test_optimize_by_hand() -> None:
    late = parse("L0 P0 L1 P0 P1 D0 L2 P2 P1 D1 D2")
    assert to_text(optimize(late)) == "L0 L1 P0 P0 D0 L2 P1 P2 D2 P1 D1"
    assert to_text(optimize(late, 3)) == "L0 L1 L2 P0 P0 D0 P1 P2 D2 P1 D1"
    assert to_text(optimize(parse("L0 P0 A0 D0 L0 P0 D0"))) == "L0 P0 A0 D0 L0 P0 D0"
    with pytest.raises(ValueError, match="a capacity of 1 would delay L1 at position 2; 2 delays none"):
        optimize(late, 1)
    with pytest.raises(StreamError):
        optimize(parse("L0"))


def test_our_own_strategies_need_no_optimizing_of_their_drops() -> None:
    for name in STRATEGIES:
        stream = command_stream(11, 4, 5, name)
        assert check(optimize(stream)).most_resident == check(stream).most_resident
        assert uses_before_loads(optimize(stream))[:4] == [0] * 4 or name == "sequential"


@given(streams(), st.integers(0, 10))
def test_shift_renumbers_so_that_streams_can_follow_each_other(stream: list[Command], offset: int) -> None:
    shifted = list(shift(stream, 6 + offset))
    assert list(shift(shifted, -6 - offset)) == stream
    together = check([*stream, *shifted])
    assert together.patches == 2 * check(stream).patches
    assert together.most_resident == check(stream).most_resident


def test_shift_is_lazy_and_refuses_negative_volumes() -> None:
    assert to_text(islice(shift((Command("P", number) for number in count()), 3), 2)) == "P3 P4"
    with pytest.raises(ValueError, match="offset of -1 makes the volume of L0 negative"):
        list(shift(parse("L0 D0"), -1))


@given(streams(), st.integers(0, 99))
def test_randomize_moves_patches_inside_their_stays_and_across_no_redraw(stream: list[Command], seed: int) -> None:
    mixed = randomize(stream, np.random.default_rng(seed))
    check(mixed)
    assert [None if c.op == "P" else c for c in mixed] == [None if c.op == "P" else c for c in stream]
    for volume in range(6):
        own, own_mixed = ([c for c in s if c.volume == volume and c.op in "LPD"] for s in (stream, mixed))
        assert own == own_mixed  # as many patches in each stay
    fences = [-1, *(position for position, command in enumerate(stream) if command.op == "A"), len(stream)]
    for start, stop in pairwise(fences):
        assert Counter(stream[start + 1 : stop]) == Counter(mixed[start + 1 : stop])


def test_randomize_makes_every_order_of_a_block_equally_likely() -> None:
    rng = np.random.default_rng(0)
    block = parse("L0 L1 L2 P0 P1 P2 D0 D1 D2")
    orders = Counter(to_text(only(randomize(block, rng), "P")) for _ in range(3000))
    assert len(orders) == 6
    assert sum((number - 500) ** 2 / 500 for number in orders.values()) < 20.5  # chi-square, 5 degrees, p = 0.001


def test_randomize_mixes_a_stream_whose_volumes_come_and_go() -> None:
    stream = command_stream(20, 4, 10)
    mixed = randomize(stream, np.random.default_rng(0))
    moved = sum(one != other for one, other in zip(only(stream, "P"), only(mixed, "P")))
    assert moved > 100
