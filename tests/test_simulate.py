"""The executor in virtual time, held against hand-computed runs and against the real queue; advice."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpuqueue
from gpuqueue.errors import StreamError
from gpuqueue.stream.commands import check, parse
from gpuqueue.stream.simulate import simulate
from gpuqueue.stream.strategies import STRATEGIES, command_stream

PAIR = "L0 P0 P0 D0 L1 P1 P1 D1"


@pytest.mark.parametrize(
    "values, epoch, waits",
    [
        # one reader: volume 0 at 2 s, 1 at 4 s; steps 2-3 and 4-5
        ({"workers": 1}, 5.0, (2.0, 1.0)),
        # two readers: both at 2 s; the second batch is gathered at once
        ({"workers": 2}, 4.0, (2.0, 0.0)),
        # the loading thread reads; with lookahead it begins 1 once 0 has come
        ({"workers": 0}, 5.0, (2.0, 1.0)),
        # without lookahead the load begins when the executor passes the L, after the batch before went into the queue
        ({"workers": 0, "lookahead": 0}, 5.0, (2.0, 1.0)),
        # nothing in the background: read, gather, step, read, gather, step
        ({"workers": 0, "patch_queue_size": 0}, 6.0, (2.0, 2.0)),
        ({"workers": 0, "patch_queue_size": 0, "patch_seconds": 0.5}, 8.0, (3.0, 3.0)),
        # gathered in the background: 0 at 2-3 s, 1 from 4 (read) to 5
        ({"workers": 1, "patch_seconds": 0.5}, 6.0, (3.0, 1.0)),
        # the second load takes five seconds, on the other reader
        ({"workers": 2, "load_seconds": [2.0, 5.0]}, 6.0, (2.0, 2.0)),
    ],
)
def test_two_volumes_by_hand(values: dict[str, Any], epoch: float, waits: tuple[float, ...]) -> None:
    run = simulate(parse(PAIR), **({"load_seconds": 2.0, "step_seconds": 1.0, "batch_size": 2} | values))
    assert run.epoch_seconds == pytest.approx(epoch)
    assert run.waits == pytest.approx(waits)
    assert run.first_batch_seconds == pytest.approx(waits[0])
    assert run.utilisation == pytest.approx(2.0 / epoch)
    assert run.wait_seconds == pytest.approx(sum(waits))


def test_a_patch_queue_holds_as_many_batches_as_it_says() -> None:
    """Twelve batches of one volume, gathered in no time: the queue is full but for the first wait and the end."""
    stream = parse("L0 " + "P0 " * 24 + "D0")
    run = simulate(stream, 3.0, step_seconds=1.0, batch_size=2, patch_queue_size=4)
    assert run.epoch_seconds == 15.0 and run.waits == (3.0, *[0.0] * 11)
    assert run.empty_queue_seconds == pytest.approx(3.0 + 1.0)  # before the first batch and during the last step
    unqueued = simulate(stream, 3.0, step_seconds=1.0, patch_seconds=0.25, batch_size=2, patch_queue_size=0)
    assert unqueued.epoch_seconds == 3.0 + 12 * 1.5
    assert unqueued.empty_queue_seconds == unqueued.epoch_seconds
    assert unqueued.limit == "gathering"


def test_readers_read_ahead_only_as_far_as_they_may() -> None:
    """Steps of 10 s: in that time one worker reads prefetch_factor volumes, which then come without waiting."""
    stream = parse(" ".join(f"L{v} P{v} D{v}" for v in range(6)))
    values: dict[str, Any] = {"workers": 1, "batch_size": 1, "patch_queue_size": 0, "lookahead": 0}
    quick_then_slow = [0.0, *[1.0] * 5]
    run = simulate(stream, quick_then_slow, prefetch_factor=2, step_seconds=10.0, **values)
    assert run.waits == (0.0, *[0.0] * 5)
    run = simulate(stream, quick_then_slow, prefetch_factor=5, step_seconds=0.5, **values)
    assert run.waits == pytest.approx((0.0, *[0.5] * 5))
    assert run.limit == "loading"


def test_residents_are_counted_from_arrival_to_drop() -> None:
    stream = command_stream(10, 3, 8)
    values: dict[str, Any] = {"load_seconds": 0.01, "workers": 2, "step_seconds": 1.0, "batch_size": 4}
    for lookahead in (0, 1, 2):
        run = simulate(stream, lookahead=lookahead, volume_bytes=[100, 300], **values)
        assert run.most_resident == 3 + lookahead
        assert 100 * run.most_resident < run.most_resident_bytes <= 300 * run.most_resident
    assert run.mean_distinct == check(stream, 4).mean_distinct


def test_a_patch_queue_longer_than_all_that_residents_can_give_is_said_to_be_useless() -> None:
    stream = command_stream(10, 3, 8, "basic")
    assert simulate(stream, 1.0, patch_queue_size=24).notes == ()
    (note,) = simulate(stream, 1.0, patch_queue_size=25).notes
    assert "patch queue of 25 is useless beyond 24" in note
    assert note in str(simulate(stream, 1.0, patch_queue_size=25))


times = st.floats(0, 2)


@settings(deadline=None)
@given(
    st.sampled_from(sorted(STRATEGIES)),
    st.integers(0, 12),
    st.integers(1, 5),
    st.integers(1, 6),
    st.tuples(times, times, times),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 20),
    st.integers(1, 5),
)
def test_no_run_is_faster_than_its_slowest_part_nor_holds_more_than_promised(
    name: str,
    volumes: int,
    capacity: int,
    patches: int,
    seconds: tuple[float, float, float],
    workers: int,
    lookahead: int,
    queue: int,
    batch_size: int,
) -> None:
    load, patch, step = seconds
    stream = command_stream(volumes, capacity, patches, name)
    summary = check(stream)
    run = simulate(stream, load, workers, 2, patch, step, batch_size, lookahead, queue, 7)
    slowest = max(
        summary.loads * load / max(workers, 1), volumes * patches * patch, len(run.waits) * step, load if volumes else 0
    )
    everything = summary.loads * load + volumes * patches * patch + len(run.waits) * step
    assert slowest - 1e-9 <= run.epoch_seconds <= everything + 1e-9
    assert run.epoch_seconds == pytest.approx(sum(run.waits) + len(run.waits) * step)
    assert len(run.waits) == -(-volumes * patches // batch_size)
    assert run.most_resident <= summary.most_resident + lookahead
    assert run.most_resident_bytes == 7 * run.most_resident
    assert -1e-9 <= run.empty_queue_seconds <= run.epoch_seconds + 1e-9


def test_overlap_beats_the_sum_of_loading_and_stepping() -> None:
    """H14, in virtual time: 60 volumes, 0.2 s a load, 4 workers, 16 patches, batch 4, 0.02 s a step."""
    stream = command_stream(60, 10, 16)
    run = simulate(stream, 0.2, workers=4, step_seconds=0.02, batch_size=4)
    after_first = run.epoch_seconds - run.first_batch_seconds
    assert after_first <= 1.35 * 4.8
    assert max(run.waits[20:]) <= 0.5


def test_senseless_values_are_refused() -> None:
    with pytest.raises(StreamError):
        simulate(parse("P0"), 1.0)
    wrong: list[tuple[str, Any]] = [
        ("workers", -1),
        ("batch_size", 0),
        ("load_seconds", []),
        ("patch_seconds", float("nan")),
    ]
    for name, value in wrong:
        with pytest.raises(ValueError, match=f"{name} must be at least"):
            simulate(parse(PAIR), **({"load_seconds": 1.0} | {name: value}))


def test_an_empty_stream_takes_no_time() -> None:
    run = simulate([], 1.0)
    assert (run.epoch_seconds, run.utilisation, run.waits, run.most_resident) == (0.0, 1.0, (), 0)


class Sleeping:
    """A data set whose volumes take `seconds` to read."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> gpuqueue.Volume:
        time.sleep(self.seconds)
        return gpuqueue.Volume(f"case{index}", {"image": np.full((1, 8, 8, 8), index, np.float32)})


@pytest.mark.parametrize(
    "load, step, workers, patch_queue_size",
    [
        (0.10, 0.010, 0, 16),  # loading-bound
        (0.10, 0.010, 2, 16),
        (0.08, 0.040, 1, 16),  # balanced
        (0.08, 0.040, 2, 8),
        (0.02, 0.060, 1, 16),  # consumer-bound
        (0.06, 0.090, 0, 0),  # nothing in the background
    ],
)
def test_the_real_queue_takes_as_long_and_holds_as_many(
    load: float, step: float, workers: int, patch_queue_size: int
) -> None:
    """Two epochs after a first one, in which processes start and kernels compile. A busy machine gets three tries."""
    loader = gpuqueue.volume_loader(Sleeping(load), num_workers=workers)
    with gpuqueue.GPUQueue(
        loader, patch_size=4, patches_per_volume=16, volumes_in_memory=4, batch_size=8,
        patch_queue_size=patch_queue_size, lookahead=1, device="cpu",
    ) as queue:  # fmt: skip
        for _batch in queue:
            time.sleep(step)
        for attempt in range(1, 4):
            began = time.perf_counter()
            for _ in range(2):
                for _batch in queue:
                    time.sleep(step)
            measured = time.perf_counter() - began
            epochs = [queue.stream(epoch) for epoch in range(2 * attempt + 1)]
            runs = [
                simulate(chain(*epochs[:end]), load, workers, 2, 0.0, step, 8, 1, patch_queue_size)
                for end in (2 * attempt - 1, 2 * attempt + 1)
            ]
            expected = runs[1].epoch_seconds - runs[0].epoch_seconds
            if abs(measured - expected) <= 0.1 * expected:
                break
        assert measured == pytest.approx(expected, rel=0.1)
        assert abs(queue.stats().most_resident_volumes - runs[1].most_resident) <= 1
