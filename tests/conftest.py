"""Fixtures that more than one test file uses."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pathlib
import threading
import time
from collections.abc import Iterator

import pytest

POOL = "gpuqueue-gather_"  # threads of the numba backend's pool, which lives as long as the process


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of real volumes (`real/`) and odd files (`odd/`), where there is one."""
    here = pathlib.Path(__file__).resolve().parents[1]
    for folder in (os.environ.get("GPUQUEUE_TEST_DATA"), here.parent / "shared" / "data"):
        if folder and (pathlib.Path(folder) / "real").is_dir():
            return pathlib.Path(folder)
    pytest.skip("no folder of test volumes: set GPUQUEUE_TEST_DATA to one that holds real/ and odd/")


@pytest.fixture(autouse=True)
def no_thread_or_process_is_left() -> Iterator[None]:
    """Every test ends the queues that it made: no thread of ours, no worker process stays."""
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        threads = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("gpuqueue-")]
        return [name for name in threads if not name.startswith(POOL)] + [
            child.name for child in multiprocessing.active_children()
        ]

    if left():
        gc.collect()  # a queue that only a failed test's traceback holds
    deadline = time.monotonic() + 5
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left(), "threads or processes are left; close the queue"
