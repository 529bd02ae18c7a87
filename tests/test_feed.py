"""Loading in stream order, ahead by so much and no more, and what becomes of a load that nobody wants any longer."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
import pytest

import gpuqueue as gq
from gpuqueue.executor import Background
from gpuqueue.stream.commands import Command
from gpuqueue.stream.planner import Plans
from gpuqueue.volumes.failure import Failure
from gpuqueue.volumes.feed import Feed
from gpuqueue.volumes.loader import Idle, Loaded
from gpuqueue.volumes.residents import CpuMemory


class Source:
    """A reader in this process: asks `ahead` volumes ahead, as a DataLoader does, and notes what happens to it."""

    def __init__(self, order, ahead=3, start=None, answer=None, volume=None):
        self.order, self.ahead, self.starting, self.answer = order, ahead, start, answer
        self.make = volume or (
            lambda epoch, index: gq.Volume(f"v{index}", {"image": np.full((4, 4, 4), 100 * epoch + index)})
        )
        self.asked: deque[tuple[int, int]] = deque()
        self.read: list[tuple[int, int]] = []
        self.closed = 0

    def start(self):
        if self.starting:
            raise self.starting

    def next(self, stop):
        while len(self.asked) <= self.ahead:
            self.asked.append(next(self.order))
        epoch, index = self.asked.popleft()
        if index < 0:
            time.sleep(0.005)
            return Idle()
        self.read.append((epoch, index))
        if self.answer is not None and (given := self.answer(epoch, index)) is not None:
            if isinstance(given, BaseException):
                raise given
            return given
        return Loaded(self.make(epoch, index), None)

    def close(self):
        self.closed += 1


def make_feed(loads, lookahead=0, background=True, memory=None, **options):
    """A feed and its source; `loads(epoch)` gives the (epoch, volume) to load."""
    made = []

    def reader(order):
        made.append(Source(order, **options))
        return made[0]

    return Feed(reader, loads, memory or CpuMemory(), lookahead, background), made[0]


def endless(epoch, n=4):
    return ((e, v) for e in range(epoch, 10**6) for v in range(n))


def value(resident):
    return int(resident.arrays["image"].max())


NEVER = threading.Event()


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_no_more_is_loaded_than_was_allowed_and_the_lookahead(lookahead):
    feed, source = make_feed(endless, lookahead)
    feed.begin(0)
    for step in range(1, 12):
        feed.allow()
        resident = feed.take((step - 1) % 4, NEVER)
        assert value(resident) == 100 * ((step - 1) // 4) + (step - 1) % 4
        wait_for(lambda step=step: feed.num_loads == step + lookahead)
        time.sleep(0.01)
        assert feed.num_loads == step + lookahead and feed.num_resident == 1 + lookahead
        feed.release((step - 1) % 4)
        assert resident.arrays == {}
    feed.close()
    assert source.closed == 1 and feed.num_resident == 0 and feed.most_resident == 1 + lookahead


@pytest.mark.parametrize("background", [True, False])
def test_a_restart_serves_nothing_of_the_epoch_it_abandons(background):
    """H13: volumes carry the epoch they were read for."""
    feed, source = make_feed(endless, lookahead=2 * background, background=background, ahead=3 * background)
    for epoch in (0, 5, 2, 2, 9):
        feed.begin(epoch)
        for volume in range(3):
            feed.allow()
            assert value(feed.take(volume, NEVER)) == 100 * epoch + volume
        feed.release(0)
        feed.end(None)
    feed.close()
    assert feed.num_resident == 0


def test_loading_goes_on_across_the_end_of_an_epoch_that_was_expected():
    feed, source = make_feed(endless, lookahead=2)
    feed.begin(0)
    for volume in range(4):
        feed.allow()
        feed.take(volume, NEVER)
        feed.release(volume)
    feed.end(1)
    wait_for(lambda: feed.num_loads == 6)
    feed.begin(1)
    for volume in range(4):
        feed.allow()
        assert value(feed.take(volume, NEVER)) == 100 + volume
        feed.release(volume)
    feed.close()
    assert [pair for pair in source.read if pair[0] < 2] == [(e, v) for e in (0, 1) for v in range(4)]


def test_an_order_that_ended_early_is_asked_again_by_the_next_epoch():
    orders = iter([[], [(1, 0)], [(2, 0)]])
    feed, _ = make_feed(lambda epoch: iter(next(orders)), lookahead=1)
    feed.begin(0)
    wait_for(lambda: feed._order_ended)
    feed.end(1)
    for epoch in (1, 2):
        feed.begin(epoch)
        feed.allow()
        assert value(feed.take(0, NEVER)) == 100 * epoch
        feed.release(0)
        feed.end(epoch + 1)
        wait_for(lambda: feed._order_ended)
    feed.close()


@pytest.mark.parametrize("background", [True, False])
def test_a_reader_that_cannot_start_breaks_the_feed_by_name(background):
    feed, source = make_feed(endless, background=background, start=OSError("no processes left"))
    with pytest.raises(gq.WorkerError, match="could not start: OSError: no processes left"):
        feed.begin(0)
    with pytest.raises(gq.QueueClosed, match="no processes left"):
        feed.begin(1)
    feed.close()
    assert source.closed >= 1


def test_ctrl_c_while_workers_start_breaks_the_feed_by_name():
    feed, source = make_feed(endless, start=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        feed.begin(0)
    assert source.closed == 1
    with pytest.raises(gq.QueueClosed, match="KeyboardInterrupt"):
        feed.begin(1)
    feed.close()


@pytest.mark.parametrize("error", [RuntimeError("lost"), SystemExit("lost"), GeneratorExit("lost")])
def test_whatever_the_reader_raises_reaches_the_consumer_and_ends_the_workers(error):
    feed, source = make_feed(endless, lookahead=1, answer=lambda epoch, index: error if index == 2 else None)
    feed.begin(0)
    for volume in range(2):  # what was loaded before is still served
        feed.allow()
        assert value(feed.take(volume, NEVER)) == volume
    feed.allow()
    with pytest.raises(type(error), match="lost"):
        feed.take(2, NEVER)
    wait_for(lambda: source.closed)
    with pytest.raises(gq.QueueClosed, match="lost"):
        feed.begin(1)
    feed.close()
    assert feed.num_resident == 0


@pytest.mark.parametrize("background", [True, False])
def test_a_volume_that_failed_fails_alone(background):
    """Those before and after it are served; each epoch tells it anew."""
    failure = Failure("v1", "OSError", "bad sector", "In loader worker 0:\ntrace")
    answer = lambda epoch, index: failure if index == 1 else None  # noqa: E731
    feed, _ = make_feed(endless, 0, background, answer=answer, ahead=3 * background)
    for epoch in range(2):
        feed.begin(epoch)
        for _ in range(3):
            feed.allow()
        assert value(feed.take(2, NEVER)) == 100 * epoch + 2
        with pytest.raises(gq.StageError, match=rf"'v1' failed in epoch {epoch}: OSError: bad sector\n\nIn loader w"):
            feed.take(1, NEVER)
        feed.end(None)
    feed.close()
    assert feed.num_resident == 0


def test_a_failed_copy_names_the_volume_and_its_bytes():
    class Full(CpuMemory):
        def load(self, volume, prepared):
            raise RuntimeError("out of memory")

    feed, _ = make_feed(endless, memory=Full())
    feed.begin(0)
    feed.allow()
    with pytest.raises(gq.StageError, match=r"'v0' \(64 bytes\).*out of memory") as caught:
        feed.take(0, NEVER)
    assert caught.value.stage == "copy" and isinstance(caught.value.__cause__, RuntimeError)
    feed.close()


def test_an_id_that_two_places_share_is_refused_but_a_volume_loaded_twice_is_not():
    same = lambda epoch, index: gq.Volume("same", {"image": np.zeros((4, 4, 4))})  # noqa: E731
    feed, _ = make_feed(endless, volume=same)
    feed.begin(0)
    feed.allow(), feed.allow()
    with pytest.raises(gq.VolumeError, match="'same' occurs twice"):
        feed.take(1, NEVER)
    feed.close()
    feed, _ = make_feed(lambda epoch: iter([(0, 0), (0, 0)]), volume=same)
    feed.begin(0)
    for _ in range(2):
        feed.allow()
        feed.take(0, NEVER)
        feed.release(0)
    feed.close()


@pytest.mark.parametrize("how", ["close", "stop"])
def test_a_consumer_that_waits_is_woken(how):
    feed, _ = make_feed(endless)
    feed.begin(0)
    stop = threading.Event()
    told = []

    def consume():
        try:
            feed.take(3, stop)  # never allowed
        except gq.QueueClosed as error:
            told.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    time.sleep(0.05)
    began = time.monotonic()
    if how == "stop":
        stop.set()
        feed.wake()
        thread.join(5)
    feed.close()
    thread.join(5)
    assert told and time.monotonic() - began < 0.5  # woken, not found out by a later look


def test_a_stopped_consumer_takes_nothing_of_the_next_epoch():
    """One that was left behind, in a long stage, must not release what another one uses."""
    feed, _ = make_feed(endless)
    feed.begin(0)
    stopped = threading.Event()
    stopped.set()
    feed.allow()
    assert value(feed.take(0, NEVER)) == 0
    with pytest.raises(gq.QueueClosed):
        feed.take(0, stopped)
    feed.close()
    with pytest.raises(gq.QueueClosed):
        feed.begin(1)


def test_planning_that_fails_ahead_fails_in_its_own_epoch():
    def commands(epoch):
        yield from [Command("L", 0), Command("P", 0), Command("D", 0)]
        if epoch == 2:
            raise ZeroDivisionError

    plans = Plans(commands, endless=True)
    assert list(plans.loads(0)) == [(0, 0), (1, 0), (2, 0)]  # and no further, or it would never end
    assert len(list(plans.take(1))) == 3
    with pytest.raises(ZeroDivisionError):
        list(plans.take(2))


@pytest.mark.parametrize("number, device", [(1, "cuda:1"), (None, "cpu")])
def test_helper_threads_set_the_device_first(monkeypatch, number, device):
    """H57: seen by a fake of device selection, before anything else runs in the thread."""
    import torch

    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda to: seen.append((to.index, threading.current_thread().name)))

    def items():
        seen.append("item")
        yield 1

    made = Background(items(), 2, threading.Event(), lambda: None, torch.device(device))
    assert list(made) == [1]
    assert seen == ([(number, "gpuqueue-gather")] if number else []) + ["item"]
    made.close()
