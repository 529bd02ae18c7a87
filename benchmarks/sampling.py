"""Sampling and dense inference beside their peers; ratios from one run.

    python benchmarks/sampling.py [--rounds 7] [--file LABEL.nii.gz] > sampling.json

Without `--file` a 320 x 320 x 256 label map is made: four nested tissues of wavy outline. The candidates take turns, so
that a change of the machine's speed meets all of them; each figure is the median over the rounds. A peer that is not
installed is left out.

- `draws`: 10 000 voxels in equal shares of two classes, the index built anew each time, beside 16 patches of 32 cubed
  from TorchIO's LabelSampler and MONAI's RandCropByPosNegLabel, which look through the volume at each call.
- `index`: building it beside what nibabel needs to read the file; and its bytes.
- `predict`: an identity model over 256 x 256 x 200 voxels, windows of 96 sharing 24, beside gathering the same windows
  and nothing else; once on the volume's own grid, where a gather is a mere copy, and once at another spacing, where
  predict also reads its result back on the volume's own grid.
- `network`: a small U-Net, the same windows, beside MONAI's sliding_window_inference.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from typing import Any

import nibabel
import numpy as np
import torch

import gpuqueue as gq
from gpuqueue.patches.batch import Augmentation, PatchMaker, Wanted
from gpuqueue.patches.prepare import Preparation
from gpuqueue.rng import Random
from gpuqueue.volumes.residents import CpuMemory

DRAWS, PEER_PATCHES, PATCH = 10_000, 16, 32
WINDOW, OVERLAP = 96, 24
Calls = dict[str, Callable[[], object]]


def make_label(path: Path) -> None:
    """Four nested tissues of wavy outline in 320 x 320 x 256 voxels, uint8."""
    i, j, k = np.ogrid[-1:1:320j, -1:1:320j, -1:1:256j]
    wave = 0.05 * (np.sin(19 * i) + np.cos(23 * j) + np.sin(21 * k)) + 0.02 * np.sin(71 * i + 53 * j + 61 * k)
    radius = np.sqrt(i**2 + j**2 + k**2) + wave
    label = sum((radius < limit).astype(np.uint8) for limit in (0.9, 0.7, 0.45, 0.15))
    nibabel.save(nibabel.Nifti1Image(label, np.eye(4)), path)


def draw_candidates(label: np.ndarray[Any, Any]) -> Calls:
    """10 000 draws here, 16 patches there."""
    volume = gq.Volume("a", {"label": label})
    sampler = gq.LabelSampler("label", weights={0: 1, 1: 1})
    calls: Calls = {"gpuqueue, 10 000": lambda: sampler.voxels(sampler.prepare(volume), Random(range(DRAWS)))}
    tensor = torch.from_numpy(label)[None]
    if importlib.util.find_spec("torchio"):
        import torchio

        subject = torchio.Subject(label=torchio.LabelMap(tensor=tensor))  # type: ignore[no-untyped-call, unused-ignore]
        peer = torchio.LabelSampler(PATCH, "label", {0: 1, 1: 1})
        calls["TorchIO, 16"] = lambda: list(peer(subject, PEER_PATCHES))
    if importlib.util.find_spec("monai"):
        from monai.transforms import RandCropByPosNegLabel

        crop = RandCropByPosNegLabel((PATCH,) * 3, tensor, 1, 1, PEER_PATCHES)
        calls["MONAI, 16"] = lambda: crop(tensor, tensor)
    return calls


def index_candidates(path: Path) -> Calls:
    """Reading the label, and indexing all its classes."""
    volume = gq.VolumeDataset([{"id": "a", "label": str(path)}])[0]
    sampler = gq.LabelSampler("label", weights=dict.fromkeys(volume["label"].unique().tolist(), 1))
    return {
        "nibabel reads": lambda: np.asanyarray(nibabel.load(path).dataobj),
        "gpuqueue indexes": lambda: sampler.prepare(volume),
    }


def index_bytes(path: Path) -> float:
    """Bytes a voxel of the index of all classes."""
    volume = gq.VolumeDataset([{"id": "a", "label": str(path)}])[0]
    sampler = gq.LabelSampler("label", weights=dict.fromkeys(volume["label"].unique().tolist(), 1))
    return float(sum(array.nbytes for array in sampler.prepare(volume).values()) / volume["label"].numel())


def bare_gather(volume: gq.Volume, spacing: float | None) -> Callable[[], object]:
    """The windows of `predict`, gathered in the same batches and thrown away."""
    size, sampler = (WINDOW,) * 3, gq.GridSampler(OVERLAP)
    loaded, prepared = Preparation(size, sampler, spacing=None if spacing is None else (spacing,) * 3)(volume)
    resident = CpuMemory().load(loaded, prepared)
    maker = PatchMaker(size, sampler, Augmentation(), 0)
    patches = maker.draw([Wanted(resident, 0, k, 0) for k in range(sampler.count(prepared.reference, size))])

    def run() -> None:
        for first in range(0, len(patches), 4):
            some = patches[first : first + 4]
            maker.gather_into(some, maker.allocate(resident, len(some), torch.device("cpu")))

    return run


def predict_candidates(spacing: float | None) -> Calls:
    """The bare gather, and predict in each mode."""
    voxels = np.random.default_rng(0).integers(-1000, 2000, (256, 256, 200)).astype(np.int16)
    volume = gq.Volume("a", {"image": voxels})

    def run(mode: str) -> Callable[[], object]:
        return lambda: gq.predict(
            lambda windows: windows, volume, WINDOW, overlap=OVERLAP, mode=mode, spacing=spacing, device="cpu"
        )

    return {"bare gather": bare_gather(volume, spacing)} | {
        mode: run(mode) for mode in ("crop", "average", "gaussian", "hann")
    }


def network_candidates() -> Calls:
    """A small U-Net over 128 x 128 x 96 voxels in windows of 64 that share a quarter."""
    from monai.inferers import sliding_window_inference
    from monai.networks.nets import UNet

    network = UNet(3, 1, 3, channels=(8, 16, 32), strides=(2, 2)).eval()
    volume = gq.Volume("a", {"image": np.random.default_rng(0).random((128, 128, 96)).astype(np.float32)})

    def theirs() -> torch.Tensor:
        with torch.no_grad():
            output: torch.Tensor = sliding_window_inference(volume["image"][None], (64,) * 3, 4, network, overlap=0.25)
        return output

    return {
        "gpuqueue": lambda: gq.predict(network, volume, 64, overlap=0.25, batch_size=4),
        "MONAI": theirs,
    }


def measure(calls: Calls, rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turns, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def shares(medians: dict[str, float], of: str) -> dict[str, float]:
    """Each median over that of `of`."""
    return {name: round(value / medians[of], 3) for name, value in medians.items() if name != of}


def run(rounds: int, path: Path) -> dict[str, Any]:
    """All figures."""
    label = np.asanyarray(nibabel.load(path).dataobj)
    draws = measure(draw_candidates(label), rounds)
    index = measure(index_candidates(path), rounds)
    own, other = (measure(predict_candidates(spacing), rounds) for spacing in (None, 1.3))
    result = {
        "draws": {"median_ms": draws, "peers_take_times": shares(draws, "gpuqueue, 10 000")},
        "index": {
            "shape": list(label.shape),
            "median_ms": index,
            "share_of_reading": shares(index, "nibabel reads"),
            "bytes_a_voxel": round(index_bytes(path), 3),
        },
        "predict": {
            name: {"median_ms": medians, "speed": {m: round(medians["bare gather"] / t, 3) for m, t in medians.items()}}
            for name, medians in (("own grid", own), ("spacing 1.3 mm", other))
        },
    }
    if importlib.util.find_spec("monai"):
        network = measure(network_candidates(), rounds)
        result["network"] = {"median_ms": network, "monai_takes_times": shares(network, "gpuqueue")}
    return result


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file or Path(folder) / "label.nii.gz"
        if arguments.file is None:
            make_label(path)
        figures = run(arguments.rounds, path)
    about = {
        "benchmark": "sampling",
        "command": " ".join(["python", *sys.argv]),
        "rounds": arguments.rounds,
        "targets": {"peers_take_times": "> 1", "share_of_reading": 0.5, "bytes_a_voxel": 1, "speed": 0.5},
        "machine": {"platform": platform.platform(), "processor": platform.machine(), "cpus": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            **{
                name: version(name)
                for name in ("torch", "numpy", "nibabel", "numba", "monai", "torchio")
                if importlib.util.find_spec(name)
            },
        },
    }
    print(json.dumps(about | figures, indent=1))


if __name__ == "__main__":
    main()
