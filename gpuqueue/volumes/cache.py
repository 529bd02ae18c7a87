"""Volumes that were read once, kept on disk as plain arrays, so that reading them again is a memory-mapped copy.

A cache is a folder with one folder per entry, named by the SHA-256 of what the entry was made from:

    FOLDER/3f0c.../meta.json     {"body": {...}, "crc32": of the body as json.dumps(body, sort_keys=True)}
    FOLDER/3f0c.../image.npy     one uncompressed .npy per array, C order, axes (C, I, J, K) for volumes
    FOLDER/.new-...              an entry being written, or what a killed process left of one

`body` holds `format` (1), `source` and `options` (what the key was made from), `metadata` (as given to `put`) and
`arrays`: for each its `name`, `file`, `shape`, `dtype`, `tensor` (whether it was a torch tensor) and the `crc32` of its
data (as `zlib.crc32` computes it). bfloat16, which .npy does not have, is kept as its 16 bits in a uint16 array, with
`dtype` "bfloat16". Nothing is pickled; numpy and a JSON reader are enough to read it.

An entry appears by one rename, and is never changed, so any number of processes may fill one cache at once, and be
killed at any moment. What is read is checked (sizes, shapes, dtypes, the CRC-32 of every byte); a damaged entry
is removed, logged, and a miss. A full or read-only disk costs the speed, not the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch

from gpuqueue.volumes.storage import Array, in_c_order

FORMAT = 1
Value = torch.Tensor | Array
_LOG = logging.getLogger("gpuqueue")
_PIECE = 1 << 22  # bytes written at a time, so that no second volume is made to change its order
_SMALL = 1 << 16  # bytes up to which an array is copied, since a mapping holds a descriptor
_ABANDONED = 3600.0  # seconds after which an unfinished entry is removed
_IDLE = 86400.0  # seconds without use after which an entry may make room for others
_PARTNERS = {".hdr": (".img", ".img.gz", ".mat"), ".img": (".hdr", ".mat"), ".head": (".brik", ".brik.gz")}
_PARTNERS |= {".brik": (".head",), ".par": (".rec",), ".rec": (".par",)}


@dataclass(frozen=True)
class Entry:
    """What `get` found: `arrays` (memory-mapped copy-on-write; writing to them changes no file) and `metadata`."""

    arrays: dict[str, Value]
    metadata: Any


class DiskCache:
    """A folder of checked, memory-mapped arrays.

    Args:
        folder: Made when missing; may be shared by processes, ranks and datasets.
        options: JSON-able; whatever changes what is stored for the same files: reading options, a version, roles.
        max_bytes: Room on disk. When it is full, entries unused for a day make room; without such, new ones are not
            stored (an epoch visits all volumes in turn, so throwing out the oldest would keep none). Each process may
            exceed it by the entry that it is writing. None: no bound.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> cache = DiskCache(folder.name, options={"on_nonfinite": "raise"})
    >>> key = cache.key({"id": "case1"})
    >>> cache.put(key, {"image": torch.ones(1, 2, 3, 4)}, {"roles": {"image": "image"}})
    True
    >>> entry = cache.get(key)
    >>> entry.arrays["image"].shape, entry.metadata
    (torch.Size([1, 2, 3, 4]), {'roles': {'image': 'image'}})
    >>> cache.clear()
    1
    >>> folder.cleanup()
    """

    def __init__(
        self, folder: str | os.PathLike[str], options: Mapping[str, Any] | None = None, max_bytes: int | None = None
    ) -> None:
        self.folder, self.max_bytes = Path(folder).absolute(), max_bytes
        self.options = json.loads(json.dumps(dict(options or {})))  # as it comes back from a file
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"cache={str(folder)!r} cannot be made: {error}; name a folder you may write to"
            ) from error
        _remove_abandoned(self.folder)

    def key(self, source: Any) -> str:
        """The name of the entry made from `source`, JSON-able: ids, `file_stamp`s, names of what was prepared."""
        return hashlib.sha256(_canonical([FORMAT, self.options, source]).encode()).hexdigest()

    def get(self, key: str) -> Entry | None:
        """The entry, checked; None when there is none, or a damaged one, which is removed and logged."""
        folder = self.folder / key
        try:
            body = _read_meta(folder)
            arrays = {item["name"]: _read_array(folder, item) for item in body["arrays"]}
        except FileNotFoundError:
            if not (folder / "meta.json").exists():  # never there, or another process has just removed it
                return None
            return self._damaged(key, "an array's file is missing")
        except Exception as error:  # a damaged file can raise anything
            return self._damaged(key, f"{type(error).__name__}: {error}")
        if self.max_bytes is not None:
            with suppress(OSError):
                os.utime(folder)  # the time of last use
        return Entry(arrays, body["metadata"])

    def put(self, key: str, arrays: Mapping[str, Value], metadata: Any = None, source: Any = None) -> bool:
        """Stores an entry; False, with a warning in the log, when the disk or the cache is full. `metadata` and
        `source` (noted for people who look into the cache) must be JSON-able."""
        size = sum(_as_numpy(value).nbytes for value in arrays.values())
        if not self._make_room(size):
            _LOG.warning("%s: full (%d bytes); a volume of %d bytes is not cached", self.folder, self.max_bytes, size)
            return False
        body = {"format": FORMAT, "source": source, "options": self.options, "metadata": metadata}
        new = self.folder / f".new-{uuid.uuid4().hex}"
        try:
            new.mkdir()
            body["arrays"] = [_write_array(new, name, value) for name, value in arrays.items()]
            body = json.loads(json.dumps(body))  # as it will be read: lists, and text as keys
            text = json.dumps({"body": body, "crc32": zlib.crc32(_canonical(body).encode())}, indent=1)
            (new / "meta.json").write_text(text, encoding="utf-8")
            self._publish(new, self.folder / key)
        except OSError as error:
            _LOG.warning("%s: a volume could not be cached (%s)", self.folder, error)
            return False
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return True

    def usage(self) -> tuple[int, int]:
        """(entries, bytes) on disk."""
        sizes = [size for _, size, _ in self._entries()]
        return len(sizes), sum(sizes)

    def verify(self) -> list[str]:
        """Reads and checks every entry; removes the damaged ones and returns their keys."""
        return [path.name for path, _, _ in self._entries() if self.get(path.name) is None]

    def clear(self) -> int:
        """Removes every entry; returns how many."""
        return sum(_remove(path) for path, _, _ in self._entries())

    def _publish(self, new: Path, final: Path) -> None:
        """One rename; where another process was first with the same entry, its one stays."""
        try:
            new.rename(final)
        except OSError:
            if not final.is_dir():
                raise

    def _damaged(self, key: str, reason: str) -> Entry | None:
        _LOG.warning("%s: the cached entry %s is damaged (%s); it is made again", self.folder, key, reason)
        _remove(self.folder / key)
        return None

    def _make_room(self, size: int) -> bool:
        if self.max_bytes is None:
            return True
        entries = self._entries()
        room = self.max_bytes - sum(taken for _, taken, _ in entries)
        for path, taken, used in sorted(entries, key=lambda entry: entry[2]):
            if room >= size or time.time() - used < _IDLE:
                break
            room += taken if _remove(path) else 0
        return room >= size

    def _entries(self) -> list[tuple[Path, int, float]]:
        """(folder, bytes, time of last use) of every entry."""
        found = []
        for item in os.scandir(self.folder):
            if item.name.startswith(".") or not item.is_dir():
                continue
            with suppress(FileNotFoundError):  # removed by another process meanwhile
                size = sum(file.stat().st_size for file in os.scandir(item.path))
                found.append((Path(item.path), size, item.stat().st_mtime))
        return found


def file_stamp(path: str | os.PathLike[str]) -> list[list[Any]]:
    """Path, size in bytes and modification time in ns of a file and of those that belong to it (.hdr and .img, ...).

    A file rewritten with the same size and the same time is taken for unchanged.
    """
    first = Path(path).absolute()
    stem = first.with_suffix("") if first.suffix.lower() in (".gz", ".bz2") else first
    partners = _PARTNERS.get(stem.suffix.lower(), ())
    others = [stem.with_suffix(form) for end in partners for form in (end, end.upper())]
    return [
        [str(file), status.st_size, status.st_mtime_ns]
        for file in (first, *others)
        if file == first or file.exists()
        for status in (file.stat(),)
    ]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _as_numpy(value: Value) -> Array:
    """The array to write; bfloat16 as its bits."""
    if not isinstance(value, torch.Tensor):
        return np.asarray(value)
    plain = value.detach()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


def _write_array(folder: Path, name: str, value: Value) -> dict[str, Any]:
    """Writes one .npy in C order, and returns what meta.json says of it."""
    from deflate import crc32

    array = _as_numpy(value)
    if array.dtype.hasobject or array.dtype.names is not None:
        raise TypeError(f"the array {name!r} cannot be cached: dtype {array.dtype} is not plain numbers")
    file, check = quote(name, safe="") + ".npy", 0
    with open(folder / file, "wb") as out:
        header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
        np.lib.format.write_array_header_1_0(out, header)
        for piece in _pieces(array):
            data = in_c_order(piece).reshape(-1).view(np.uint8)
            check = crc32(data, check)
            out.write(data.data)
    return {
        "name": name,
        "file": file,
        "shape": list(array.shape),
        "dtype": "bfloat16" if value.dtype == torch.bfloat16 else array.dtype.str,
        "tensor": isinstance(value, torch.Tensor),
        "crc32": check,
    }


def _pieces(array: Array) -> Iterator[Array]:
    """The array in C order, in parts of at most `_PIECE` bytes where its axes allow."""
    if array.nbytes <= _PIECE or array.ndim == 0:
        yield array
    elif array.nbytes // len(array) > _PIECE:
        for part in array:
            yield from _pieces(part)
    else:
        step = max(1, _PIECE * len(array) // array.nbytes)
        for start in range(0, len(array), step):
            yield array[start : start + step]


def _read_meta(folder: Path) -> dict[str, Any]:
    whole = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    body: dict[str, Any] = whole["body"]
    if whole["crc32"] != zlib.crc32(_canonical(body).encode()):
        raise ValueError("meta.json does not match its check sum")
    return body


def _read_array(folder: Path, item: Mapping[str, Any]) -> Value:
    """One array, mapped and checked; ValueError where it is not what meta.json says."""
    from deflate import crc32

    if 0 in item["shape"]:  # nothing to map
        array: Array = np.load(folder / item["file"], allow_pickle=False)
    else:
        array = np.lib.format.open_memmap(folder / item["file"], mode="c")
    dtype = "<u2" if item["dtype"] == "bfloat16" else item["dtype"]
    if list(array.shape) != item["shape"] or array.dtype.str != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{item['file']} holds {array.dtype.str} {array.shape}")
    if crc32(array.reshape(-1).view(np.uint8)) != item["crc32"]:
        raise ValueError(f"{item['file']} does not match its check sum")
    plain = array.view(np.ndarray) if array.nbytes > _SMALL else np.array(array)
    if not item["tensor"]:
        return plain
    tensor = torch.from_numpy(plain)
    return tensor.view(torch.bfloat16) if item["dtype"] == "bfloat16" else tensor


def _remove(folder: Path) -> bool:
    """Takes an entry away by one rename, then deletes it; False where that cannot be done, or was done already."""
    gone = folder.with_name(f".new-{uuid.uuid4().hex}")
    try:
        folder.rename(gone)
    except OSError:
        return False
    shutil.rmtree(gone, ignore_errors=True)
    return True


def _remove_abandoned(folder: Path) -> None:
    for item in os.scandir(folder):
        with suppress(OSError):
            if item.name.startswith(".new-") and time.time() - item.stat().st_mtime > _ABANDONED:
                shutil.rmtree(item.path, ignore_errors=True)
