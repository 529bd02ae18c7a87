"""How long one volume takes to read: nibabel, gpuqueue, and gpuqueue's cache on disk; ratios from one run.

    python benchmarks/reading.py [--rounds 15] [--file VOLUME.nii.gz] > reading.json

Without `--file` a 256 x 256 x 256 int16 volume is made: an ellipsoid of smooth tissue with noise on an empty
background, 33.6 MB of voxels. The candidates take turns, so that a change of the machine's speed meets all of them;
each figure is a median over the rounds. The file is in the page cache: what is measured is work, not the disk. Each
candidate ends with the voxels in memory of its own: "cached" includes the check of every byte and the copy that a
resident is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import nibabel
import numpy as np
import torch

from gpuqueue.volumes.cache import DiskCache, file_stamp
from gpuqueue.volumes.reading import read
from gpuqueue.volumes.storage import contiguous_along_k


def make_volume(path: Path) -> None:
    """A head-like int16 volume, about half of it empty."""
    random = np.random.default_rng(0)
    i, j, k = np.ogrid[-1:1:256j, -1:1:256j, -1:1:256j]
    tissue = 600 + 200 * np.sin(9 * i) * np.cos(7 * j) * np.sin(8 * k)
    inside = (i / 0.9) ** 2 + (j / 0.95) ** 2 + (k / 0.9) ** 2 < 1
    voxels = np.where(inside, tissue + random.normal(0, 15, tissue.shape), 0).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), path)


def candidates(path: Path, folder: Path) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each returns the voxels."""
    cache = DiskCache(folder)
    stored = read(path)
    cache.put(cache.key(file_stamp(path)), {"image": stored.data})

    def cached() -> torch.Tensor:
        entry = cache.get(cache.key(file_stamp(path)))
        assert entry is not None
        return torch.as_tensor(entry.arrays["image"]).clone()

    return {
        "nibabel": lambda: np.asanyarray(nibabel.load(path).dataobj),
        "gpuqueue": lambda: read(path).data,
        "gpuqueue, contiguous along k": lambda: contiguous_along_k(read(path).data),
        "cached": cached,
    }


def measure(timed: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turns, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in timed}
    for number in range(rounds + 1):
        for name, call in timed.items():
            start = time.perf_counter()
            call()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "volume.nii.gz"
        if arguments.file is None:
            make_volume(path)
        medians = measure(candidates(path, Path(folder) / "cache"), arguments.rounds)
        data = read(path).data
        result = {
            "benchmark": "reading",
            "command": " ".join(["python", *sys.argv]),
            "volume": {
                "shape": list(data.shape),
                "dtype": str(data.dtype).removeprefix("torch."),
                "megabytes": round(data.nbytes / 1e6, 1),
                "compressed_megabytes": round(path.stat().st_size / 1e6, 1),
            },
            "rounds": arguments.rounds,
            "median_ms": medians,
            "share_of_nibabel": {name: round(value / medians["nibabel"], 3) for name, value in medians.items()},
            "targets": {"gpuqueue": 0.5, "cached": 0.2},
            "machine": {"platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()},
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "numpy", "nibabel", "deflate")},
            },
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
