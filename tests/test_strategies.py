"""Orders of loading, sampling and dropping."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuqueue.errors import StreamError
from gpuqueue.stream.commands import Command, check, parse, to_text
from gpuqueue.stream.strategies import STRATEGIES, Strategy, classic, command_stream, find_strategy, sliding

names = st.sampled_from(sorted(STRATEGIES))
capacities = st.integers(1, 12)
counts_of_volumes = st.lists(st.integers(0, 20), max_size=40)


def run(strategy: str | Strategy, visits: list[tuple[int, int]], capacity: int, seed: int = 0) -> list[Command]:
    return list(find_strategy(strategy)(iter(visits), capacity, np.random.default_rng(seed)))


def most_resident(name: str, visits: int, capacity: int) -> int:
    """The table's column for that many visits worth loading."""
    if name == "sequential":
        return min(visits, 1)
    if name == "merge_incomplete" and visits > capacity:
        return capacity + visits % capacity
    return min(visits, capacity)


@given(names, counts_of_volumes, capacities, st.integers(0, 3))
def test_every_stream_is_valid_exact_and_within_its_memory(
    name: str, counts: list[int], capacity: int, seed: int
) -> None:
    """H10, H15: each volume gives its own number of patches, one of none is never loaded."""
    stream = run(name, list(enumerate(counts)), capacity, seed)
    summary = check(stream)
    assert summary.patches_per_volume == {volume: number for volume, number in enumerate(counts) if number}
    assert {command.volume for command in stream if command.op == "L"} == set(summary.patches_per_volume)
    visits = len(summary.patches_per_volume)
    assert summary.most_resident <= most_resident(name, visits, capacity)
    if name != "split_incomplete" and min(counts, default=0) > 1:
        assert summary.most_resident == most_resident(name, visits, capacity)
    extra = capacity - visits % capacity if name == "reuse_incomplete" and visits % capacity else 0
    assert visits <= summary.loads <= visits + extra


@given(names, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), max_size=40), capacities)
def test_a_volume_that_comes_again_gives_the_sum_and_is_not_loaded_while_resident(
    name: str, visits: list[tuple[int, int]], capacity: int
) -> None:
    summary = check(run(name, visits, capacity))
    asked: Counter[int] = Counter()
    for volume, number in visits:
        asked[volume] += number
    assert summary.patches_per_volume == dict(+asked)
    assert summary.most_resident <= {"sequential": 1, "merge_incomplete": 2 * capacity - 1}.get(name, capacity)


@given(names, counts_of_volumes, capacities)
def test_each_drop_follows_the_last_patch_of_its_volume_at_once(name: str, counts: list[int], capacity: int) -> None:
    stream = run(name, list(enumerate(counts)), capacity)
    for before, command in pairwise(stream):
        if command.op == "D":
            assert before == Command("P", command.volume)


@given(names, counts_of_volumes, capacities, st.integers(0, 2**32))
def test_the_same_generator_state_gives_the_same_stream(name: str, counts: list[int], capacity: int, seed: int) -> None:
    visits = list(enumerate(counts))
    assert run(name, visits, capacity, seed) == run(name, visits, capacity, seed)


def test_ten_volumes_of_eight_patches_give_eight_each_at_any_capacity() -> None:
    """H10: its own numbers, the first condition in the command stream."""
    for capacity in (1, 7, 8, 50, 1000):
        for name in STRATEGIES:
            stream = run(name, [(volume, 8) for volume in range(10)], capacity)
            assert check(stream).patches_per_volume == dict.fromkeys(range(10), 8)
            if name != "reuse_incomplete":
                for volume in range(10):
                    ops = "".join(command.op for command in stream if command.volume == volume)
                    assert ops == "L" + "P" * 8 + "D"


def test_own_counts_are_kept_and_a_volume_of_none_is_never_loaded() -> None:
    """H15: counts 1, 5, 0, 12."""
    for name in STRATEGIES:
        stream = command_stream(4, 3, [1, 5, 0, 12], name)
        assert check(stream).patches_per_volume == {0: 1, 1: 5, 3: 12}
        assert "L2" not in to_text(stream)


def test_the_block_strategies_cut_their_blocks_as_the_table_says() -> None:
    """Eleven volumes of four patches, capacity four: which volumes come between one moment of no need and the next."""
    expected = {
        "sequential": [{volume: 4} for volume in range(11)],
        "basic": [dict.fromkeys(block, 4) for block in (range(4), range(4, 8), range(8, 11))],
        "merge_incomplete": [dict.fromkeys(block, 4) for block in (range(4), range(4, 11))],
        "split_incomplete": [dict.fromkeys(block, 4) for block in (range(4), range(4, 8), range(8, 11))],
        "keep_incomplete": [dict.fromkeys(range(4), 4), {4: 4, 5: 4, 6: 4, 7: 2}, {8: 4, 9: 4, 10: 4, 7: 2}],
        "reuse_incomplete": [{0: 2, 1: 4, 2: 4, 3: 4}, dict.fromkeys(range(4, 8), 4), {8: 4, 9: 4, 10: 4, 0: 2}],
    }
    for name, blocks in expected.items():
        patches = [
            command.volume for command in run(name, [(volume, 4) for volume in range(11)], 4) if command.op == "P"
        ]
        for block in blocks:
            length = sum(block.values())
            assert Counter(patches[:length]) == block, name
            del patches[:length]
        assert patches == []
    loads = {name: check(command_stream(11, 4, 4, name)).loads for name in STRATEGIES}
    assert loads == dict.fromkeys(STRATEGIES, 11) | {"reuse_incomplete": 12}


def test_split_halves_the_last_block_and_the_remainder_together() -> None:
    stream = run("split_incomplete", [(volume, 3) for volume in range(9)], 8)
    assert [sum(command.op == "L" for command in part) for part in _runs_of_loads(stream)] == [5, 4]
    assert check(stream).most_resident == 5


def _runs_of_loads(stream: list[Command]) -> list[list[Command]]:
    parts: list[list[Command]] = []
    for before, command in zip([Command("D", -1), *stream], stream):
        if command.op == "L":
            if before.op != "L":
                parts.append([])
            parts[-1].append(command)
    return parts


@pytest.mark.parametrize("name", ["sequential", "basic", "sliding"])
def test_lazy_strategies_start_at_once_on_endless_visits(name: str) -> None:
    taken = 0

    def visits() -> Iterator[tuple[int, int]]:
        nonlocal taken
        for taken in count(1):
            yield taken, 3

    stream = iter(find_strategy(name)(visits(), 5, np.random.default_rng(0)))
    assert next(stream) == Command("L", 1)
    assert taken <= 10
    list(islice(stream, 1000))
    assert taken < 250


def test_visits_to_a_few_volumes_without_end_keep_coming() -> None:
    """Fewer distinct volumes than capacity: everything stays resident, nothing hangs."""
    for name in ("sequential", "basic", "sliding"):
        visits = ((number % 2, 2) for number in count())
        stream = list(islice(find_strategy(name)(visits, 4, np.random.default_rng(0)), 400))
        assert sum(command.op == "P" for command in stream) > 150


@pytest.mark.parametrize("seed", range(5))
def test_sliding_mixes_and_loads_evenly(seed: int) -> None:
    """40 volumes of 20 patches, 10 resident, batches of 8; independent uniform draws give 5.7 distinct volumes."""
    stream = command_stream(40, 10, 20, "sliding", seed)
    patches = [command.volume for command in stream if command.op == "P"]
    distinct = [len(set(patches[start : start + 8])) for start in range(0, 800, 8)]
    middle = np.mean(distinct[20:80])
    assert middle >= 6.0
    assert np.mean(distinct[-5:]) >= 0.8 * middle
    loads_at = np.cumsum([command.op == "P" for command in stream])[[command.op == "L" for command in stream]]
    inside = loads_at[(loads_at >= 20 * 8) & (loads_at <= 80 * 8)]
    assert np.diff(inside).min() >= 10 and np.diff(inside).max() <= 30


def test_sliding_gives_the_first_volume_at_once_and_ramps_up() -> None:
    stream = command_stream(40, 10, 20)
    assert to_text(stream[:2]) == "L0 P0"
    first_batch = stream[: next(n for n in count() if sum(c.op == "P" for c in stream[:n]) == 8)]
    assert sum(command.op == "L" for command in first_batch) <= 3
    assert check(stream).most_resident == 10


@given(st.lists(st.integers(12, 40), min_size=1, max_size=11), st.integers(0, 99))
def test_when_nothing_is_left_to_enter_the_volumes_of_sliding_end_together(counts: list[int], seed: int) -> None:
    """All fit and none is used up before the last enters, so from then on each volume is evenly spaced: one that has q
    patches left gives its last within the last q-th of the time, in which another of p gives at most floor(p / q) + 1.
    """
    stream = run("sliding", list(enumerate(counts)), 12, seed)
    last_load = max(position for position, command in enumerate(stream) if command.op == "L")
    tail = [command.volume for command in stream[last_load:] if command.op == "P"]
    left = Counter(tail)
    for volume in left:
        after = tail[::-1].index(volume)
        assert after <= sum(left[other] // left[volume] + 1 for other in left if other != volume)


# Recorded from TorchIO 1.2.1: a dataset that notes each subject that is read, then one `queue[0]` after the other, with
# shuffle_subjects and shuffle_patches off; D is put after each subject's last patch.
RECORDED = [
    ([2] * 5, 4, 2, "L0 L1 P0 P0 D0 P1 P1 D1 L2 L3 P2 P2 D2 P3 P3 D3 L4 P4 P4 D4"),
    ([2] * 5, 5, 2, "L0 L1 L2 P0 P0 D0 P1 P1 D1 P2 L3 L4 P2 D2 P3 P3 D3 P4 P4 D4"),
    ([3] * 4, 5, 3, "L0 L1 P0 P0 P0 D0 P1 P1 L2 L3 P1 D1 P2 P2 P2 D2 P3 P3 P3 D3"),
    ([3, 1, 3, 5], 6, 3, "L0 L1 L2 P0 P0 P0 D0 P1 D1 P2 P2 L3 P2 D2 P3 P3 P3 P3 P3 D3"),
    ([2, 2], 10, 2, "L0 L1 P0 P0 D0 P1 P1 D1"),
]


@pytest.mark.parametrize("counts, max_length, samples_per_volume, expected", RECORDED)
def test_classic_is_the_recorded_torchio_queue(
    counts: list[int], max_length: int, samples_per_volume: int, expected: str
) -> None:
    strategy = classic(max_length, samples_per_volume, shuffle_patches=False)
    assert to_text(run(strategy, list(enumerate(counts)), 1)) == expected


@pytest.mark.parametrize("counts, max_length, samples_per_volume, expected", RECORDED)
def test_the_recorded_torchio_queue_is_what_the_package_does(
    counts: list[int], max_length: int, samples_per_volume: int, expected: str
) -> None:
    torchio = pytest.importorskip("torchio")
    torch = pytest.importorskip("torch")
    text = []

    class Recorded(torchio.SubjectsDataset):  # type: ignore[misc,name-defined]
        def __getitem__(self, index: int) -> object:
            text.append(f"L{index}")
            return super().__getitem__(index)

    subjects = [
        torchio.Subject(image=torchio.ScalarImage(tensor=torch.zeros(1, 2, 2, 2)), number=number, num_samples=samples)
        for number, samples in enumerate(counts)
    ]
    queue = torchio.Queue(
        Recorded(subjects),
        max_length,
        samples_per_volume,
        torchio.UniformSampler(1),
        shuffle_subjects=False,
        shuffle_patches=False,
    )
    left = dict(enumerate(counts))
    for _ in range(sum(counts)):
        volume = queue[0]["number"]
        text.append(f"P{volume}")
        left[volume] -= 1
        if left[volume] == 0:
            text.append(f"D{volume}")
    ours = [word for position, word in enumerate(text) if word not in text[:position] or word[0] != "L"]  # no bleed
    assert " ".join(ours) == expected


@given(counts_of_volumes, st.integers(1, 50), st.integers(0, 9))
def test_classic_shuffles_inside_each_fill_only(counts: list[int], max_length: int, seed: int) -> None:
    visits = list(enumerate(counts))
    plain = run(classic(max_length, 1, shuffle_patches=False), visits, 1)
    shuffled = run(classic(max_length, 1), visits, 1, seed)
    check(shuffled)
    given_plain, given_shuffled = ([c.volume for c in s if c.op == "P"] for s in (plain, shuffled))
    for start in range(0, len(given_plain), max_length):
        fill = slice(start, start + max_length)
        assert Counter(given_plain[fill]) == Counter(given_shuffled[fill])


def test_a_strategy_is_found_by_name_callable_list_iterator_and_text() -> None:
    commands = parse("L0 P0 D0")
    for ready in (commands, "L0 P0 D0", lambda visits, capacity, rng: commands):
        assert command_stream(0, 1, 1, ready) == command_stream(0, 1, 1, ready) == commands
    once = find_strategy(iter(commands))
    assert list(once([], 1, np.random.default_rng(0))) == commands
    with pytest.raises(ValueError, match="runs once"):
        once([], 1, np.random.default_rng(0))


def test_an_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'slidng' is not known; write one of sequential, basic, .*sliding, classic"):
        find_strategy("slidng")
    with pytest.raises(ValueError, match="must be a name"):
        find_strategy(3)  # type: ignore[arg-type]
    with pytest.raises(StreamError, match="position 1: 'Q0'"):
        find_strategy("L0 Q0")


def test_senseless_values_are_refused() -> None:
    for name in STRATEGIES:
        with pytest.raises(ValueError, match="must be at least 1, not 0"):
            run(name, [(0, 1)], 0)
        with pytest.raises(ValueError, match="volume 0 cannot give -2 patches"):
            run(name, [(0, -2)], 1)
    with pytest.raises(ValueError, match="num_volumes must not be negative"):
        command_stream(-1, 1, 1)
    with pytest.raises(ValueError, match="has 2 numbers for 3 volumes"):
        command_stream(3, 1, [1, 2])
    with pytest.raises(ValueError, match="samples_per_volume 5 must not exceed max_length 4"):
        classic(4, 5)
    with pytest.raises(ValueError, match="max_length must be at least 1"):
        classic(0, 1)
    with pytest.raises(StreamError, match="position 0, P0"):
        command_stream(1, 1, 1, lambda visits, capacity, rng: parse("P0"))


def test_an_epoch_of_many_volumes_is_planned_in_little_memory() -> None:
    """100 000 volumes, 3 200 000 patches, all commands in one list; the time is a hang limit."""
    code = """
from gpuqueue.stream.commands import check
from gpuqueue.stream.shards import epoch_entries
from gpuqueue.stream.strategies import sliding
import numpy, re
entries = epoch_entries([32] * 100_000, seed=0, epoch=0, shuffle=True, batch_size=8)
stream = list(sliding(((e.volume, e.patches) for e in entries), 8, numpy.random.default_rng(0)))
assert len(stream) == 3_400_000
status = open("/proc/self/status").read()  # its peak begins anew with the program; getrusage's would be the parent's
assert int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) < 2**20
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_first_command_of_many_volumes_comes_before_the_rest_is_planned() -> None:
    taken = 0

    def visits() -> Iterator[tuple[int, int]]:
        nonlocal taken
        for taken in range(1, 100_001):
            yield taken - 1, 32

    assert next(sliding(visits(), 8, np.random.default_rng(0))) == Command("L", 0)
    assert taken <= 2
