"""A CUDA device that is none: copies and gathers are queued on streams and run late, in adversarial but legal order.

Tensors lie in ordinary memory. Inside `torch.cuda.stream(s)` every `copy_` is put on s instead of being done; `launch`
puts work on the current stream. Events order streams as CUDA's do; `order` decides which stream may run first where
several could. What reads a buffer too early, or finds it overwritten, sees it: every new buffer is filled with junk.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque

import torch
from torch.utils._python_dispatch import TorchDispatchMode

JUNK = 77


class Event:
    def __init__(self, *_, **__):
        self.done = True  # an event that was never recorded does not hold anybody up

    def record(self, stream):
        self.done = False
        stream.work.append(("record", self))

    def query(self):
        return self.done

    def synchronize(self):
        DEVICE.run_until(lambda: self.done)


class Stream:
    def __init__(self, *_, **__):
        self.work = deque()
        DEVICE.streams.append(self)

    def wait_event(self, event):
        self.work.append(("wait", event))

    def synchronize(self):
        DEVICE.run_until(lambda: not self.work)


class _Deferred(TorchDispatchMode):
    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            self.stream.work.append(("do", lambda: func(*args, **(kwargs or {}))))
            return args[0]
        return func(*args, **(kwargs or {}))


class Device:
    """The streams and who goes first: `order` is "copies last", "consumer last" or a seed."""

    def __init__(self, order):
        self.order, self.streams, self.lock = order, [], threading.RLock()
        self.random = random.Random(str(order))

    def step(self):
        """Runs one thing that could run; False if nothing can."""
        with self.lock:
            able = [s for s in self.streams if s.work and not (s.work[0][0] == "wait" and not s.work[0][1].done)]
            if not able:
                return False
            consumer = self.streams[0]
            if self.order == "copies last":
                chosen = consumer if consumer in able else able[0]
            elif self.order == "consumer last":
                chosen = next((s for s in able if s is not consumer), consumer)
            else:
                chosen = self.random.choice(able)
            kind, what = chosen.work.popleft()
            if kind == "record":
                what.done = True
            elif kind == "do":
                what()
            return True

    def run_until(self, condition):
        while not condition():
            assert self.step(), "deadlock: every stream waits"

    def launch(self, work):
        self.streams[0].work.append(("do", work))


DEVICE = Device(0)


@contextlib.contextmanager
def fake_cuda(monkeypatch, order):
    """Replaces what gpuqueue uses of torch.cuda; yields the device."""
    global DEVICE
    DEVICE = Device(order)
    consumer = Stream()
    empty = torch.empty

    def junk(*args, **kwargs):
        made = empty(*args, **kwargs)
        return made.fill_(JUNK) if made.dtype == torch.uint8 else made

    @contextlib.contextmanager
    def on(stream):
        with _Deferred(stream):
            yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: consumer)
    monkeypatch.setattr(torch.cuda, "set_device", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    monkeypatch.setattr(torch, "empty", junk)
    yield DEVICE
