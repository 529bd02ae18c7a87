"""Volumes kept on disk: what is read is what was put, whoever writes at the same time and whoever is killed."""

from __future__ import annotations

import errno
import json
import logging
import os
import pathlib
import subprocess
import sys
import time
import zlib
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from gpuqueue.volumes import cache as module
from gpuqueue.volumes.cache import DiskCache, file_stamp
from gpuqueue.volumes.storage import STORED_DTYPES

LARGE = (1, 40, 50, 60)  # beyond the size below which arrays are copied


def _tensor(seed: int = 0, dtype: torch.dtype = torch.int16) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 120, LARGE)).to(dtype)


def _filled(folder: pathlib.Path, **arrays: Any) -> tuple[DiskCache, str]:
    cache = DiskCache(folder)
    key = cache.key("case1")
    assert cache.put(key, arrays or {"image": _tensor()}, {"affine": np.eye(4).tolist()})
    return cache, key


@pytest.mark.parametrize("dtype", STORED_DTYPES)
@pytest.mark.parametrize("channels", [1, 2])
def test_volumes_come_back_bit_for_bit_contiguous_along_k(
    tmp_path: pathlib.Path, dtype: torch.dtype, channels: int
) -> None:
    fortran = np.asfortranarray(np.random.default_rng(0).integers(0, 120, (40, 50, 60, channels)))
    data = torch.from_numpy(np.moveaxis(fortran, -1, 0)).to(dtype)
    cache, key = _filled(tmp_path, image=data)
    entry = cache.get(key)
    assert entry is not None and entry.metadata == {"affine": np.eye(4).tolist()}
    back = entry.arrays["image"]
    assert isinstance(back, torch.Tensor) and back.dtype == dtype and back.is_contiguous() and torch.equal(back, data)


def test_prepared_arrays_of_any_dtype_and_shape_come_back_as_they_were(tmp_path: pathlib.Path) -> None:
    arrays = {
        "prepared/positions é": np.arange(12, dtype=np.int64).reshape(4, 3),
        "none": np.empty((0, 3), np.int64),
        "scalar": np.array(2.5),
        "big-endian": np.arange(5, dtype=">f8"),
        "reversed": np.arange(100_000, dtype=np.uint64)[::-1],
        "flags": np.array([True, False]),
    }
    cache, key = _filled(tmp_path, **arrays)
    entry = cache.get(key)
    assert entry is not None and list(entry.arrays) == list(arrays)
    for name, array in arrays.items():
        back = entry.arrays[name]
        assert isinstance(back, np.ndarray) and type(back) is np.ndarray and back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


def test_large_arrays_are_written_in_pieces(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (100, 5000, 10**6):
        monkeypatch.setattr(module, "_PIECE", size)
        cache, key = _filled(tmp_path / str(size))
        entry = cache.get(key)
        assert entry is not None and torch.equal(torch.as_tensor(entry.arrays["image"]), _tensor())


def test_an_entry_is_plain_npy_and_json(tmp_path: pathlib.Path) -> None:
    """Read as the module's docstring says, without gpuqueue; bfloat16 is the upper half of a float32."""
    data = _tensor(dtype=torch.bfloat16)
    _, key = _filled(tmp_path, image=data)
    meta = json.loads((tmp_path / key / "meta.json").read_text())
    assert meta["crc32"] == zlib.crc32(json.dumps(meta["body"], sort_keys=True).encode())
    (item,) = meta["body"]["arrays"]
    bits = np.load(tmp_path / key / item["file"])
    assert (item["name"], item["dtype"], item["shape"]) == ("image", "bfloat16", list(LARGE))
    assert item["crc32"] == zlib.crc32(bits.tobytes())
    np.testing.assert_array_equal((bits.astype(np.uint32) << 16).view(np.float32), data.float().numpy())


def test_writing_to_what_was_read_changes_no_file(tmp_path: pathlib.Path) -> None:
    """H52: the cached volume is never altered."""
    cache, key = _filled(tmp_path)
    entry, again = cache.get(key), cache.get(key)
    assert entry is not None and again is not None
    torch.as_tensor(entry.arrays["image"]).zero_()
    assert torch.equal(torch.as_tensor(again.arrays["image"]), _tensor()) and cache.verify() == []


def test_metadata_survive_whatever_json_does_to_them(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path, options={"sizes": (1, 2)})
    cache.put("a", {}, {10: "ten", 2: (1, 0.1)}, source=(1,))
    entry = cache.get("a")
    assert entry is not None and entry.metadata == {"10": "ten", "2": [1, 0.1]}


def test_the_key_follows_files_options_and_source(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a.nii.gz"
    file.write_bytes(b"1")
    cache = DiskCache(tmp_path / "cache", options={"on_nonfinite": "raise"})
    keys = {cache.key(file_stamp(file)), cache.key([file_stamp(file), "grid"])}
    keys.add(DiskCache(tmp_path / "cache", options={"on_nonfinite": "keep"}).key(file_stamp(file)))
    os.utime(file, ns=(0, 1))
    keys.add(cache.key(file_stamp(file)))
    file.write_bytes(b"22")
    os.utime(file, ns=(0, 1))
    keys.add(cache.key(file_stamp(file)))
    assert len(keys) == 5
    assert cache.key(file_stamp(file)) == DiskCache(tmp_path / "b", {"on_nonfinite": "raise"}).key(file_stamp(file))


@pytest.mark.parametrize(("named", "partner"), [("a.hdr", "a.img"), ("a.img", "a.hdr"), ("b+orig.HEAD", "b+orig.BRIK")])
def test_the_stamp_of_a_pair_sees_both_files(tmp_path: pathlib.Path, named: str, partner: str) -> None:
    (tmp_path / named).write_bytes(b"1")
    (tmp_path / partner).write_bytes(b"1")
    before = file_stamp(tmp_path / named)
    (tmp_path / partner).write_bytes(b"22")
    assert file_stamp(tmp_path / named) != before


def _flip(path: pathlib.Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


DAMAGE = {
    "a flipped voxel": lambda folder: _flip(folder / "image.npy", 5000),
    "a flipped shape": lambda folder: _flip(folder / "image.npy", 60),
    "a flipped magic": lambda folder: _flip(folder / "image.npy", 0),
    "a shorter array": lambda folder: os.truncate(folder / "image.npy", 1000),
    "an empty array": lambda folder: os.truncate(folder / "image.npy", 0),
    "another array": lambda folder: np.save(folder / "image.npy", np.zeros(LARGE, np.int32)),
    "no array": lambda folder: (folder / "image.npy").unlink(),
    "a changed affine": lambda folder: (folder / "meta.json").write_text(
        (folder / "meta.json").read_text().replace("1.0", "2.0", 1)
    ),
    "half a description": lambda folder: os.truncate(folder / "meta.json", 100),
    "an empty description": lambda folder: os.truncate(folder / "meta.json", 0),
    "another description": lambda folder: (folder / "meta.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_entry_is_logged_and_made_again(
    tmp_path: pathlib.Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache, key = _filled(tmp_path)
    damage(tmp_path / key)
    assert cache.get(key) is None and cache.get(key) is None
    assert [str(tmp_path) in record.getMessage() for record in caplog.records] == [True]
    _filled(tmp_path)
    entry = cache.get(key)
    assert entry is not None and torch.equal(torch.as_tensor(entry.arrays["image"]), _tensor())
    assert [item.name for item in tmp_path.iterdir()] == [key]


def test_verify_usage_and_clear(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path)
    for name in "abc":
        cache.put(name, {"image": _tensor()})
    entries, size = cache.usage()
    assert entries == 3 and 3 * _tensor().nbytes < size < 3 * _tensor().nbytes + 6000
    DAMAGE["a flipped voxel"](tmp_path / "b")
    assert cache.verify() == ["b"] and cache.verify() == []
    assert cache.clear() == 2 and cache.usage() == (0, 0) and not list(tmp_path.iterdir())


def test_a_full_cache_keeps_what_is_in_use_and_drops_what_was_not_used_for_a_day(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = DiskCache(tmp_path, max_bytes=int(2.5 * _tensor().nbytes))
    assert cache.put("a", {"image": _tensor()}) and cache.put("b", {"image": _tensor()})
    assert not cache.put("c", {"image": _tensor()}) and "full" in caplog.text
    yesterday = time.time() - 100_000
    os.utime(tmp_path / "a", (yesterday, yesterday))
    os.utime(tmp_path / "b", (yesterday, yesterday))
    assert cache.get("a") is not None  # used now
    assert cache.put("c", {"image": _tensor()})
    assert [cache.get(key) is not None for key in "abc"] == [True, False, True]
    assert cache.usage()[1] <= int(2.5 * _tensor().nbytes)


def test_a_full_disk_costs_the_cache_not_the_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = DiskCache(tmp_path)
    monkeypatch.setattr(module, "_write_array", full)
    assert cache.put("a", {"image": _tensor()}) is False and "No space left" in caplog.text
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_stored_is_refused_and_leaves_nothing(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path)
    with pytest.raises(TypeError, match="'names' cannot be cached"):
        cache.put("a", {"names": np.array(["x", None], dtype=object)})
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cache=.*cannot be made"):
        DiskCache(tmp_path / "file" / "cache")


def test_what_a_killed_process_left_is_removed_after_an_hour(tmp_path: pathlib.Path) -> None:
    for age, name in ((10, ".new-now"), (4000, ".new-old")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    DiskCache(tmp_path)
    assert [item.name for item in tmp_path.iterdir()] == [".new-now"]


def test_reading_leaves_no_descriptor_behind(tmp_path: pathlib.Path) -> None:
    cache, key = _filled(tmp_path, image=_tensor(), small=np.zeros(3))
    process = psutil.Process()
    before = process.num_fds()
    entries = [cache.get(key) for _ in range(5)]
    assert process.num_fds() <= before + 5  # one for each mapped array, none for the small ones
    del entries
    assert process.num_fds() == before


FILL = """
import sys
import numpy as np
from gpuqueue.volumes import cache as module

cache = module.DiskCache(sys.argv[1])
write = module._write_array

def pause(text):
    print(text, flush=True)
    sys.stdin.readline()

def write_and_pause(folder, name, value):
    written = write(folder, name, value)
    if (number, name) == (5, "image"):
        pause("half way")
    return written

module._write_array = write_and_pause
pause("ready")
for number in range(12):
    key = cache.key(number)
    if cache.get(key) is None:
        cache.put(key, {"image": np.full((1, 64, 64, 64), number, np.int16), "label": np.full(3, number)}, number)
print("done", flush=True)
"""


def test_two_processes_fill_one_cache_and_one_is_killed_half_way(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both fill entries 0 to 4, and both are inside entry 5 when one dies; every later read is right."""
    root = pathlib.Path(module.__file__).parents[2]
    killed, other = children = [
        subprocess.Popen(
            [sys.executable, "-c", FILL, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        for _ in range(2)
    ]
    try:
        for text in ("ready", "half way"):
            assert [_line(child) for child in children] == [text, text]
            if text == "ready":
                _go(killed)
            else:
                killed.kill()
            _go(other)
        assert _line(other) == "done"
    finally:
        for child in children:
            child.kill()
            child.communicate()
    with caplog.at_level(logging.WARNING, logger="gpuqueue"):
        cache = DiskCache(tmp_path)
        for number in range(12):
            entry = cache.get(cache.key(number))
            assert entry is not None and entry.metadata == number
            assert all((entry.arrays[name] == number).all() for name in ("image", "label"))
    assert not caplog.records and cache.usage()[0] == 12
    assert sum(item.name.startswith(".new-") for item in tmp_path.iterdir()) == 1


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _go(child: subprocess.Popen[str]) -> None:
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
