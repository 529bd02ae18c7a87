"""What the compiled CPU backend promises beyond its values: caches, threads, forks and memory."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

from gpuqueue.patches.gather import contract, numba_cache, numba_cpu
from gpuqueue.patches.gather.contract import Mode, PullBack, Read, Source, Spline, spline_weights

MODES: dict[str, Mode] = {"image": "linear", "label": "nearest"}
TURN = np.array([[0.95, 0.2, -0.1], [-0.2, 0.96, 0.15], [0.1, -0.15, 0.97]])
ROOT = pathlib.Path(__file__).resolve().parents[1]


def make_reads(count: int, shape: tuple[int, int, int], channels: int = 1) -> dict[str, list[Read]]:
    rng = np.random.default_rng(0)
    image = Source(torch.from_numpy(rng.random((channels, *shape), np.float32)), np.tile([1.0, 0], (channels, 1)),
                   np.zeros(channels))  # fmt: skip
    label = Source(torch.from_numpy(rng.integers(0, 9, (1, *shape), np.uint8)), np.array([[1.0, 0]]), np.zeros(1))
    reads: dict[str, list[Read]] = {"image": [], "label": []}
    for n in range(count):
        spline = Spline(rng.uniform(-2, 2, (3, 7, 7, 7)), (n, n, n), shape)
        pull_back = PullBack(TURN, np.array(shape) // 2 + n, np.full(3, 0.25), spline)
        reads["image"].append(Read(image, pull_back))
        reads["label"].append(Read(label, pull_back))
    return reads


def make_out(reads: dict[str, list[Read]], size: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    count = len(reads["image"])
    return {
        "image": torch.zeros(count, reads["image"][0].source.data.shape[0], *size),
        "label": torch.zeros(count, 1, *size, dtype=torch.int64),
    }


def run(reads: dict[str, list[Read]], size: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    out = make_out(reads, size)
    contract.gather(reads, MODES, size, out, backend="numba")
    return out


def python(script: str, **environment: str) -> str:
    """What a fresh process prints; fails on its error, or after two minutes."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WARM = """
from gpuqueue.patches.gather import numba_cache, numba_cpu, numba_kernels
import torch
numba_cpu.warm_up([("linear", torch.uint8), ("nearest", torch.int16)])
stats, reader = numba_kernels.fill.stats, numba_cpu._reader("linear", torch.uint8)
print(sum(stats.cache_misses.values()) == 0 and reader.cache_hits == 1, len(numba_kernels.fill.signatures))
import test_numba_cpu as tests
tests.run(tests.make_reads(2, (20, 20, 20)), (9, 9, 9))
print(len(numba_kernels.fill.signatures), numba_cache.cache_folder())
"""


def test_a_second_process_compiles_nothing_and_a_warmed_gather_compiles_no_further_form(tmp_path: pathlib.Path) -> None:
    first = python(WARM, NUMBA_CACHE_DIR=str(tmp_path)).split()
    second = python(WARM, NUMBA_CACHE_DIR=str(tmp_path)).split()
    assert first[:3] == ["False", "1", "1"] and second[:3] == ["True", "1", "1"]
    assert pathlib.Path(second[3]).parent == tmp_path


def test_the_cache_moves_to_the_temporary_folder_where_the_home_cannot_be_written(tmp_path: pathlib.Path) -> None:
    script = "from gpuqueue.patches.gather import numba_cache; print(numba_cache.cache_folder())"
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/cache", "NUMBA_CACHE_DIR": ""}
    folder = pathlib.Path(python(script, TMPDIR=str(tmp_path), **nowhere))
    assert folder.is_relative_to(tmp_path) and folder.stat().st_mode & 0o777 == 0o700


def test_without_any_folder_kernels_are_compiled_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_cache, "_is_private", lambda folder: False)
    monkeypatch.setattr(numba_cache, "cache_folder", numba_cache.cache_folder.__wrapped__)
    assert numba_cache.cache_folder() is None
    assert numba_cache.jit(abs_plus_one)(-3) == 4


def abs_plus_one(x: int) -> int:
    return abs(x) + 1


def test_a_folder_that_others_can_write_is_not_trusted(tmp_path: pathlib.Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert not numba_cache._is_private(tmp_path / "open") and numba_cache._is_private(tmp_path / "own")


def test_sparse_taps_equal_the_contracts_weights() -> None:
    from gpuqueue.patches.gather.numba_kernels import cells_and_taps

    for start, count, extent, points in ((0, 50, 50, 7), (-9, 40, 20, 4), (170, 30, 197, 12)):
        cells, taps = cells_and_taps(start, count, extent, points)
        dense = np.zeros((count, points))
        np.put_along_axis(dense, cells[:, None] + np.arange(4), taps, axis=1)
        np.testing.assert_allclose(dense, spline_weights(start, count, extent, points), atol=1e-15)


def test_offsets_beyond_32_bits_go_the_64_bit_way() -> None:
    from gpuqueue.patches.gather.numba_kernels import offsets_fit
    from gpuqueue.patches.gather.numba_readers import KEY_FIELDS, STRIDE

    keys = np.zeros((1, KEY_FIELDS), np.int64)
    keys[0, STRIDE:] = (1300 * 1300, 1300, 1)
    assert offsets_fit(np.eye(3), 96, np.zeros(3), keys)
    assert not offsets_fit(np.eye(3)[::-1] * 20, 96, np.zeros(3), keys)
    assert not offsets_fit(np.eye(3), 96, np.array([2000.0, 0, 0]), keys)
    assert not offsets_fit(np.full((3, 3), np.nan), 96, np.zeros(3), keys)


def test_one_thread_many_threads_and_concurrent_callers_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, size = make_reads(3, (40, 41, 42)), (33, 17, 50)
    expected = run(reads, size)
    results: list[dict[str, torch.Tensor]] = []
    callers = [threading.Thread(target=lambda: results.append(run(reads, size))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for threads in (1, 7):
        monkeypatch.setattr(numba_cpu, "num_threads", lambda threads=threads: threads)
        results.append(run(reads, size))
    assert len(results) == 6
    for result in results:
        assert all(torch.equal(result[key], expected[key]) for key in expected)


FORK = """
import os
import torch
import test_numba_cpu as tests
reads = tests.make_reads(4, (40, 40, 40))
expected = tests.run(reads, (24, 24, 24))
child = os.fork()
if child == 0:
    torch.set_num_threads(1)  # PyTorch's own threads do not survive a fork; DataLoader workers do this as well
got = tests.run(reads, (24, 24, 24))
same = all(torch.equal(got[key], expected[key]) for key in expected)
if child == 0:
    os._exit(0 if same else 1)
print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_parent_and_child_both_gather_after_a_fork() -> None:
    assert python(FORK) == "True 0"


def test_an_error_in_a_thread_reaches_the_caller() -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        numba_cpu.run_all([fail] * 8)


MEMORY = """
import torch
import test_numba_cpu as tests
from gpuqueue.patches.gather import contract
def status(name):
    return int(tests.re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024
size = (96, 96, 96)
reads = tests.make_reads(4, (120, 120, 120))
copies = {key: [tests.Read(r.source, tests.FLIP) for r in reads[key]] for key in reads}
tests.run(reads, (20, 20, 20)), tests.run(copies, (20, 20, 20))
out = tests.make_out(reads, size)
for key in out:
    out[key].fill_(1)
for name, these in (("warp", reads), ("copy", copies)):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    contract.gather(these, tests.MODES, size, out, backend="numba")
    print((status("VmHWM") - before) / (4 * 96**3))
"""
FLIP = PullBack(np.diag([-1.0, 1, -1]), np.full(3, 60), np.zeros(3), None, ((0, -1), (1, 1), (2, -1)))


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from Linux's /proc")
def test_a_gather_needs_at_most_one_byte_of_memory_per_voxel_beside_its_output() -> None:
    warp, copy = map(float, python(MEMORY).split())
    assert warp <= 1 and copy <= 1


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read from Linux's /proc")
def test_a_thousand_gathers_leave_memory_flat() -> None:
    reads, size = make_reads(4, (40, 40, 40)), (16, 16, 16)
    out = make_out(reads, size)

    def gather_many(count: int) -> int:
        for _ in range(count):
            contract.gather(reads, MODES, size, out, backend="numba")
        return int(re.split(r"\s", pathlib.Path("/proc/self/statm").read_text())[1]) * os.sysconf("SC_PAGE_SIZE")

    before = gather_many(100)
    assert gather_many(1000) - before < 2 * 2**20
    assert threading.active_count() <= 2 + numba_cpu.num_threads() + 7
