"""The gather on the CPU, against plain PyTorch, SciPy, MONAI and TorchIO on the same work.

    python benchmarks/gather.py                      # the table; about two minutes
    python benchmarks/gather.py --peers scipy monai  # and whole-volume transforms; torchio too where it is installed
    python benchmarks/gather.py --json gather.json

Work: a float32 image and a uint8 label of white noise, 8 patches of 96 cubed from four volumes, rotations to 17 degrees
on three axes, scales 0.9 to 1.1; elastic adds 10 control points an axis, displaced by up to 5 voxels. Ways of one row
take turns, so that a busy machine slows all of them; "ratio" is the median of the paired ratios of a round, "low" their
tenth percentile. Times are nanoseconds per output voxel of a patch, all its keys together.

`plain` is what a careful user writes with PyTorch: grids by broadcasting, `grid_sample` on float32 volumes kept ready,
the two patches of a volume stacked so that both threads are busy, spline weights as matrix products, labels as int64.
(One file, though long: it runs against any version of the package, alone.)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from gpuqueue.patches.gather import contract
from gpuqueue.patches.gather.contract import Mode, PullBack, Read, Source, Spline, spline_weights

SHAPES = ((197, 233, 189), (192, 224, 192), (256, 256, 160), (181, 217, 181))
PATCHES, SIZE, POINTS = 8, 96, 10
VOXELS = PATCHES * SIZE**3


# The work ------------------------------------------------------------------------------------------------------------


@dataclass
class Work:
    """Patches to gather and the buffers that receive them; `ready` holds each source as float32 for plain PyTorch."""

    reads: dict[str, list[Read]]
    modes: dict[str, Mode]
    out: dict[str, Tensor]
    ready: dict[int, Tensor]


def rotation(degrees: np.ndarray, scale: float) -> np.ndarray:
    """The rotation about axes 0, 1, then 2, times `scale` (3, 3)."""
    matrix = np.eye(3) * scale
    for axis, angle in enumerate(np.deg2rad(degrees)):
        turn, (a, b) = np.eye(3), [n for n in range(3) if n != axis]
        turn[a, a] = turn[b, b] = np.cos(angle)
        turn[a, b], turn[b, a] = -np.sin(angle), np.sin(angle)
        matrix = turn @ matrix
    return matrix


def draw_map(rng: np.random.Generator, shape: tuple[int, ...], elastic: bool) -> PullBack:
    """One patch somewhere inside the volume, turned, scaled and perhaps deformed."""
    start = np.array([rng.integers(0, n - SIZE + 1) for n in shape])
    centre = start + SIZE // 2 + rng.uniform(-0.5, 0.5, 3)
    spline = None
    if elastic:
        coefficients = np.zeros((3, POINTS, POINTS, POINTS))
        inner = slice(2, POINTS - 2)
        coefficients[:, inner, inner, inner] = rng.uniform(-5, 5, (3, *[POINTS - 4] * 3))
        spline = Spline(coefficients, (int(start[0]), int(start[1]), int(start[2])), (shape[0], shape[1], shape[2]))
    base = np.floor(centre).astype(np.int64)
    return PullBack(rotation(rng.uniform(-17, 17, 3), rng.uniform(0.9, 1.1)), base, centre - base, spline)


def blobs(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    """A label of connected regions, four classes, about 12 voxels wide."""
    coarse = torch.from_numpy(rng.random([1, 1, *[-(-n // 12) for n in shape]], np.float32))
    return (functional.interpolate(coarse, shape, mode="trilinear")[0] * 4).to(torch.uint8)


def make_work(
    elastic: bool = False, dtype: torch.dtype = torch.float32, channels: int = 1, label: Mode = "nearest",
    keys: tuple[str, ...] = ("image", "label"), blob: bool = False,
) -> Work:  # fmt: skip
    """The benchmark's patches; the same maps for every variant."""
    rng, maps = np.random.default_rng(0), np.random.default_rng(1)
    reads: dict[str, list[Read]] = {key: [] for key in keys}
    for shape in SHAPES:
        noise = torch.from_numpy(rng.random((channels, *shape), np.float32))
        image = (noise * 1000).to(dtype) if dtype == torch.int16 else noise
        regions = blobs(rng, shape) if blob else torch.from_numpy(rng.integers(0, 4, (1, *shape), np.uint8))
        scale = [2e-3, -1.0] if dtype == torch.int16 else [1.0, 0.0]
        sources = {
            "image": Source(image, np.tile(scale, (channels, 1)), np.zeros(channels)),
            "label": Source(regions, np.array([[1.0, 0.0]]), np.zeros(1)),
        }
        for _ in range(PATCHES // len(SHAPES)):
            pull_back = draw_map(maps, shape, elastic)
            for key in keys:
                reads[key].append(Read(sources[key], pull_back))
    modes: dict[str, Mode] = {"image": "linear", "label": label}
    kinds = {"image": torch.float32, "label": torch.int64}
    out = {
        key: torch.empty(PATCHES, reads[key][0].source.data.shape[0], SIZE, SIZE, SIZE, dtype=kinds[key])
        for key in keys
    }
    ready = {id(read.source): read.source.data.float() for reads_ in reads.values() for read in reads_}
    return Work(reads, {key: modes[key] for key in keys}, out, ready)


# The ways ------------------------------------------------------------------------------------------------------------


def gathered(work: Work, backend: str) -> Callable[[], None]:
    return lambda: contract.gather(work.reads, work.modes, (SIZE, SIZE, SIZE), work.out, backend)


def plain(work: Work) -> Callable[[], None]:
    """Plain PyTorch, as the module's docstring says."""

    def run() -> None:
        each = PATCHES // len(SHAPES)
        for first in range(0, PATCHES, each):
            reads = {key: patches[first : first + each] for key, patches in work.reads.items()}
            some = next(iter(reads.values()))
            grid = torch.stack([plain_grid(read.pull_back, read.source.data.shape[1:]) for read in some])
            for key, (read, *_) in reads.items():
                volume = work.ready[id(read.source)].expand(each, -1, -1, -1, -1)
                mode = "bilinear" if work.modes[key] == "linear" else "nearest"
                values = functional.grid_sample(volume, grid, mode, "zeros", align_corners=False)
                work.out[key][first : first + each].copy_(values)

    return run


def plain_grid(pull_back: PullBack, shape: tuple[int, ...]) -> Tensor:
    """grid_sample's coordinates (I, J, K, 3) of one patch."""
    q, grid = torch.arange(SIZE, dtype=torch.float32) - SIZE // 2, torch.empty(SIZE, SIZE, SIZE, 3)
    matrix, centre = torch.from_numpy(pull_back.matrix).float(), (pull_back.rest + pull_back.base).tolist()
    shift = plain_displacement(pull_back.spline) if pull_back.spline else None
    for axis, count in enumerate(shape):
        i, j, k = (row * q for row in matrix[axis])
        x = (i + centre[axis])[:, None, None] + j[:, None] + k
        if shift is not None:
            x += shift[axis]
        torch.add((1 - count) / count, x, alpha=2 / count, out=grid[..., 2 - axis])
    return grid


def plain_displacement(spline: Spline) -> Tensor:
    """The dense displacement (3, I, J, K) in voxels, one matrix product an axis."""
    u = torch.from_numpy(spline.coefficients).float()
    for axis in (0, 1, 2):
        weights = torch.from_numpy(spline_weights(spline.start[axis], SIZE, spline.extent[axis], POINTS)).float()
        u = torch.movedim(torch.movedim(u, axis + 1, -1) @ weights.T, -1, axis + 1)
    return u


def copies(work: Work) -> tuple[Callable[[], None], Callable[[], None]]:
    """A crop of every image patch into kept buffers: the gather, and NumPy slicing."""
    identity = ((0, 1), (1, 1), (2, 1))
    reads: dict[str, list[Read]] = {"image": []}
    for read in work.reads["image"]:
        base = np.clip(read.pull_back.base, SIZE // 2, np.array(read.source.data.shape[1:]) - SIZE // 2)
        reads["image"].append(Read(read.source, PullBack(np.eye(3), base, np.zeros(3), None, identity)))
    copy = replace(work, reads=reads, modes={"image": "linear"}, out={"image": work.out["image"]})

    def sliced() -> None:
        target = work.out["image"].numpy()
        for n, read in enumerate(reads["image"]):
            i, j, k = read.pull_back.base - SIZE // 2
            target[n] = read.source.data.numpy()[:, i : i + SIZE, j : j + SIZE, k : k + SIZE]

    return gathered(copy, "numba"), sliced


# Measuring -----------------------------------------------------------------------------------------------------------


def seconds(way: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def compare(ways: dict[str, Callable[[], Any]], rounds: int, per: float) -> dict[str, Any]:
    """Times of ways that take turns, in nanoseconds per `per`; ratios of every other way to the first."""
    for way in ways.values():
        way()
    times = {name: np.empty(rounds) for name in ways}
    for n in range(rounds):
        for name, way in ways.items():
            times[name][n] = seconds(way) / per * 1e9
    first, *others = ways
    row: dict[str, Any] = {name: {"median": float(np.median(t)), "best": float(t.min())} for name, t in times.items()}
    for name in others:
        ratio = times[name] / times[first]
        row[name] |= {
            "ratio": float(np.median(ratio)),
            "low": float(np.quantile(ratio, 0.1)),
            "best_ratio": float(times[name].min() / times[first].min()),
        }
    return row


def table(rounds: int) -> dict[str, Any]:
    """The rows of the README's table."""
    rows: dict[str, Any] = {}
    for name, elastic in (("affine", False), ("affine + elastic", True)):
        work = make_work(elastic)
        ways = {"numba": gathered(work, "numba"), "plain": plain(work), "torch": gathered(work, "torch")}
        rows[name] = compare(ways, rounds, VOXELS)
        ints = make_work(elastic, torch.int16)
        pair = {"numba": gathered(work, "numba"), "int16": gathered(ints, "numba")}
        rows[f"{name}, int16 against float32"] = compare(pair, rounds, VOXELS)
    image = make_work(True, keys=("image",))
    rows["image alone, elastic"] = compare({"numba": gathered(image, "numba"), "plain": plain(image)}, rounds, VOXELS)
    four = make_work(True, channels=4)
    rows["four channels, elastic"] = compare({"numba": gathered(four, "numba"), "plain": plain(four)}, rounds, VOXELS)
    vote, nearest = make_work(True, label="vote", blob=True), make_work(True, blob=True)
    ways = {"numba": gathered(nearest, "numba"), "vote": gathered(vote, "numba")}
    rows["vote against nearest label, blobs, elastic"] = compare(ways, rounds, VOXELS)
    ours, sliced = copies(make_work(keys=("image",)))
    rows["copy against NumPy slicing"] = compare({"numba": ours, "sliced": sliced}, rounds, VOXELS)
    return rows


FIRST = """
import sys, time
begin = time.perf_counter()
sys.path.insert(0, sys.argv[1])
import gather
import torch
from gpuqueue.patches.gather import contract
gather.SHAPES, gather.PATCHES = ((100, 100, 100),), 2
work = gather.make_work(True)
imported = time.perf_counter()
contract.warm_up([("linear", torch.float32), ("nearest", torch.uint8)], torch.device("cpu"), "numba")
gather.gathered(work, "numba")()
print(time.perf_counter() - imported)
"""


def first_batch() -> dict[str, float]:
    """Seconds from the imports to the first batch, with an empty and with a filled cache of compiled kernels."""
    here = str(pathlib.Path(__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        times = [
            float(subprocess.check_output([sys.executable, "-c", FIRST, here], env=environment, text=True))
            for _ in ("cold", "warm")
        ]
    return dict(zip(("cold", "warm"), times))


# Other libraries -----------------------------------------------------------------------------------------------------


def peers(names: list[str], rounds: int) -> dict[str, Any]:
    """Seconds per delivered patch: the numba gather, and whole-volume transforms followed by 8 crops."""
    work = make_work(True)
    rows = {"numba": [seconds(gathered(work, "numba")) / PATCHES for _ in range(rounds + 1)][1:]}
    image, label = (work.reads[key][0].source.data for key in ("image", "label"))
    ways = {"scipy": scipy_patch, "monai": monai_volume, "torchio": torchio_volume}
    for name in names:
        way = ways[name](work, image, label)
        way()
        rows[name] = []
        for _ in range(rounds):
            rows[name].append(seconds(way) / (1 if name == "scipy" else PATCHES))
            rows["numba"].append(seconds(gathered(work, "numba")) / PATCHES)
    result = {name: {"median_ms": 1e3 * float(np.median(times))} for name, times in rows.items()}
    for name in names:
        result[name]["ratio"] = result[name]["median_ms"] / result["numba"]["median_ms"]
    return result


def crops(array: Any) -> list[Tensor]:
    """Eight patches of a transformed volume, as tensors of their own."""
    starts = np.random.default_rng(0).integers(0, np.array(array.shape[1:]) - SIZE + 1, (PATCHES, 3))
    return [torch.as_tensor(array[:, i : i + SIZE, j : j + SIZE, k : k + SIZE]).clone() for i, j, k in starts]


def scipy_patch(work: Work, image: Tensor, label: Tensor) -> Callable[[], Any]:
    """One patch by map_coordinates, its dense coordinates included."""
    from scipy import ndimage

    pull_back = work.reads["image"][0].pull_back

    def run() -> None:
        q = np.arange(SIZE) - SIZE // 2
        points = np.stack(np.meshgrid(q, q, q, indexing="ij"))
        x = np.einsum("sa,a...->s...", pull_back.matrix, points) + (pull_back.base + pull_back.rest).reshape(3, 1, 1, 1)
        x += plain_displacement(pull_back.spline).numpy() if pull_back.spline else 0
        ndimage.map_coordinates(image[0].numpy(), x, order=1, mode="grid-constant")
        ndimage.map_coordinates(label[0].numpy(), x, order=0, mode="grid-constant")

    return run


def monai_volume(work: Work, image: Tensor, label: Tensor) -> Callable[[], Any]:
    from monai.transforms import Rand3DElasticd

    warp = Rand3DElasticd(
        ["image", "label"], sigma_range=(5, 7), magnitude_range=(50, 100), prob=1.0, rotate_range=(0.3, 0.3, 0.3),
        scale_range=(0.1, 0.1, 0.1), mode=("bilinear", "nearest"), padding_mode="zeros",
    )  # fmt: skip

    def run() -> list[Tensor]:
        warped = warp({"image": image, "label": label})
        return [patch for key in ("image", "label") for patch in crops(warped[key].as_tensor())]

    return run


def torchio_volume(work: Work, image: Tensor, label: Tensor) -> Callable[[], Any]:
    torchio: Any = importlib.import_module("torchio")

    warp = torchio.Compose([
        torchio.RandomAffine(scales=0.1, degrees=17),
        torchio.RandomElasticDeformation(num_control_points=POINTS, max_displacement=5),
    ])  # fmt: skip

    def run() -> list[Tensor]:
        subject = torchio.Subject(image=torchio.ScalarImage(tensor=image), label=torchio.LabelMap(tensor=label))
        warped = warp(subject)
        return [patch for key in ("image", "label") for patch in crops(warped[key].data)]

    return run


# Output --------------------------------------------------------------------------------------------------------------


def metadata() -> dict[str, Any]:
    import numba

    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "command": " ".join(["python", "benchmarks/gather.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "cpu": model,
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "numpy": np.__version__,
    }


def print_table(rows: dict[str, Any]) -> None:
    print(f"{'':44} {'ns/voxel':>9} {'best':>6}   others: median, ratio (low, best over best)")
    for name, row in rows.items():
        ours = row["numba"]
        others = [
            f"{other} {r['median']:.1f}, {r['ratio']:.2f}x ({r['low']:.2f}, {r['best_ratio']:.2f})"
            for other, r in row.items()
            if other != "numba"
        ]
        print(f"{name:44} {ours['median']:9.2f} {ours['best']:6.2f}   {'; '.join(others)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the gather on the CPU.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--peers", nargs="*", default=[], choices=["scipy", "monai", "torchio"])
    parser.add_argument("--peer-rounds", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"metadata": metadata(), "table": table(arguments.rounds)}
    print_table(result["table"])
    result["first_batch_seconds"] = first_batch()
    print("first batch, seconds after the imports:", result["first_batch_seconds"])
    if arguments.peers:
        result["peers"] = peers(arguments.peers, arguments.peer_rounds)
        for name, row in result["peers"].items():
            print(f"{name:8} {row['median_ms']:10.1f} ms per patch   {row.get('ratio', 1):7.1f}x")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
