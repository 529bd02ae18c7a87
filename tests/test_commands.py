"""The rules of a stream, its text form and its summary."""

from __future__ import annotations

from itertools import cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuqueue.errors import GPUQueueError, StreamError
from gpuqueue.stream.commands import Command, StreamSummary, check, checked, parse, to_text

any_command = st.builds(Command, st.sampled_from("LPDA"), st.integers(0, 99))


@given(st.lists(any_command))
def test_text_and_back_is_the_same_stream(stream: list[Command]) -> None:
    assert parse(to_text(stream)) == stream
    assert parse(f"\n {to_text(stream)}\t") == stream


@pytest.mark.parametrize(
    "text, position, word", [("L0 X0", 1, "X0"), ("P", 0, "P"), ("L0 P0 D-1", 2, "D-1"), ("L1x", 0, "L1x")]
)
def test_a_word_that_is_no_command_is_named_with_its_position(text: str, position: int, word: str) -> None:
    with pytest.raises(StreamError, match=f"position {position}: '{word}'"):
        parse(text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("L0 L0", "position 1, L0: volume 0 is resident already"),
        ("P3", "position 0, P3: volume 3 is not resident"),
        ("L0 D0 P0 L0", "position 2, P0: volume 0 is not resident"),
        ("L1 A0", "position 1, A0: volume 0 is not resident"),
        ("L1 D1 D1", "position 2, D1: volume 1 is not resident"),
        ("L2 L0 P0 L1 D1", "still resident; missing: D0, D2"),
    ],
)
def test_each_broken_rule_is_named_with_command_and_position(text: str, message: str) -> None:
    with pytest.raises(StreamError, match=message) as caught:
        check(parse(text))
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, GPUQueueError)


def test_things_that_are_no_commands_and_volumes_that_do_not_exist_are_refused() -> None:
    with pytest.raises(StreamError, match=r"position 0: \('L', 0\) is no Command"):
        check([("L", 0)])  # type: ignore[list-item]
    with pytest.raises(StreamError, match="'X' is none of L, P, D, A"):
        check([Command("L", 0), Command("X", 0)])
    with pytest.raises(StreamError, match="there is no volume -1"):
        check([Command("L", -1)])
    with pytest.raises(StreamError, match="position 2, L3: there is no volume 3; volumes are numbered from 0 to 2"):
        list(checked(parse("L2 D2 L3 D3"), num_volumes=3))
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        check([], batch_size=0)


def test_an_endless_stream_is_checked_as_it_runs() -> None:
    endless = cycle(parse("L0 P0 D0"))
    assert to_text(islice(checked(endless), 4)) == "L0 P0 D0 L0"
    running = checked(iter(parse("L0 P0 P1")))
    assert to_text(islice(running, 2)) == "L0 P0"
    with pytest.raises(StreamError, match="position 2, P1"):
        next(running)


def test_the_summary_counts_by_hand() -> None:
    summary = check(parse("L0 L1 P0 P1 A1 P1 D1 L2 P2 P2 D2 L1 P1 D1 P0 D0"), batch_size=3)
    # batches: 0 1 1, 2 2 1, 0
    assert summary == StreamSummary(4, 7, 2, {0: 2, 1: 3, 2: 2}, 5 / 3)
    assert check([]) == StreamSummary(0, 0, 0, {}, 0.0)
