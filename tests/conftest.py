"""Fixtures that more than one test file uses."""

from __future__ import annotations

import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of real volumes (`real/`) and odd files (`odd/`), where there is one."""
    here = pathlib.Path(__file__).resolve().parents[1]
    for folder in (os.environ.get("GPUQUEUE_TEST_DATA"), here.parent / "shared" / "data"):
        if folder and (pathlib.Path(folder) / "real").is_dir():
            return pathlib.Path(folder)
    pytest.skip("no folder of test volumes: set GPUQUEUE_TEST_DATA to one that holds real/ and odd/")
