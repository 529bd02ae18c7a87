"""How loader processes start, are told apart, found dead, and ended, whatever they are doing.

A worker ends by itself when its parent is gone, ignores Ctrl-C (the parent decides what that means), and dies quietly
when told to. One that cannot be told, because compiled code holds it, is killed.
"""

from __future__ import annotations

import copy
import glob
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, cast

import torch

FORK_LOCK = threading.RLock()  # held while workers start, while kernels compile, and while modules are imported late
STARTING, IDLE = -2, -1  # on the board, in place of the index that a worker reads
_GRACE_SECONDS = 1.0  # between asking a worker to end and killing it
_LIKELY = {
    signal.SIGKILL: "; the system does that when memory runs out",
    signal.SIGBUS: "; /dev/shm may be full",
    signal.SIGSEGV: "; compiled code crashed",
}


def new_board(workers: int) -> torch.Tensor:
    """What each worker is doing: (workers, 2) int64 in shared memory, the index it reads and since when (ms)."""
    board = torch.tensor([[STARTING, 0]] * workers)
    return board.share_memory_() if workers else board


@dataclass(frozen=True)
class WorkerStart:
    """What a worker does first; then the user's own initialisation."""

    board: torch.Tensor
    user: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        with suppress(RuntimeError):
            FORK_LOCK.release()  # a forked worker is born with the lock that its fork was made under
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # never inside the C call that makes a shared file
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="gpuqueue-parent", daemon=True).start()
        if self.user is not None:
            self.user(worker)
        self.board[worker, 0] = IDLE


def _end_with_parent(born_to: int) -> None:
    """Ends this process with its parent, in the middle of a read that hangs too."""
    parent = multiprocessing.parent_process()
    while os.getppid() == born_to and (parent is None or parent.is_alive()):
        time.sleep(1.0)
    os._exit(0)


def noting_context(context: BaseContext | None, made: list[BaseProcess]) -> BaseContext:
    """A copy of a multiprocessing context that notes the processes it makes, which nobody else's are mixed into."""
    noting: Any = copy.copy(multiprocessing.get_context() if context is None else context)
    make = noting.Process

    def process(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    noting.Process = process
    return cast(BaseContext, noting)


def first_death(children: Sequence[BaseProcess], wait_seconds: float) -> tuple[int, int] | None:
    """(worker, exit code) of one that died, after at most `wait_seconds`; one that did not just end, before others."""
    multiprocessing.connection.wait([child.sentinel for child in children], wait_seconds)
    dead = [(worker, child.exitcode) for worker, child in enumerate(children) if child.exitcode is not None]
    return min(dead, key=lambda pair: pair[1] == 0, default=None)


def how_it_ended(exitcode: int) -> str:
    """An exit code in words.

    >>> how_it_ended(3), how_it_ended(-11)
    ('exit code 3', 'killed by signal 11 (SIGSEGV); compiled code crashed')
    """
    if exitcode >= 0:
        return f"exit code {exitcode}"
    known = {int(number): number for number in signal.Signals}
    name = f" ({known[-exitcode].name})" if -exitcode in known else ""
    return f"killed by signal {-exitcode}{name}" + _LIKELY.get(known.get(-exitcode, signal.SIGTERM), "")


def end(children: Sequence[BaseProcess]) -> None:
    """Ends the processes: asks, then kills those still there, with what they leave in shared memory. Idempotent."""
    started = [child for child in children if child.pid is not None]
    deadline = time.monotonic() + _GRACE_SECONDS
    while (alive := [child for child in started if child.is_alive()]) and time.monotonic() < deadline:
        for child in alive:
            child.terminate()  # again and again: a signal just before a system call begins does not interrupt it
        multiprocessing.connection.wait([child.sentinel for child in alive], timeout=0.1)
    for child in started:
        if child.is_alive():
            child.kill()
        child.join(5)
        if child.exitcode is not None and child.exitcode < 0:
            _remove_segments(child.pid)


def _remove_segments(pid: int | None) -> None:
    """What a killed process had made but not yet unlinked; names as torch gives them."""
    for path in glob.glob(f"/dev/shm/torch_{pid}_*"):
        with suppress(OSError):
            os.unlink(path)
