"""Checks and times the Triton gather on one CUDA device, in about three minutes.

    python benchmarks/gpu_check.py                    # writes benchmarks/results/gpu_<device>.json, prints tables
    TRITON_INTERPRET=1 python benchmarks/gpu_check.py # no CUDA: small correctness cases in Triton's interpreter only

Correctness: every mode, stored dtype and channel count against float64 on the same device. Times: CUDA events around
many launches, medians, in turn over volumes that together exceed the cache. `floor` is the time that reading the source
voxels of the patches once and writing the outputs takes at the device's own measured copy bandwidth. `built` is what
the gather replaces: an affine grid, plus a dense displacement where there is one, and `grid_sample` of image and label.
(One file, though long: it is copied to a machine and run there.)
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import pathlib
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
import triton
from torch import Tensor

from gpuqueue.patches.gather import contract, triton_cuda
from gpuqueue.patches.gather.contract import NEAREST_SHIFT, Mode, PullBack, Read, Source, Spline, spline_weights

DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float32,
)  # fmt: skip
MODES: dict[str, Mode] = {"image": "linear", "label": "nearest", "vote": "vote"}
POINTS, BATCH, SIDE = 10, 8, 256
Size = tuple[int, int, int]


# Reference in float64 ------------------------------------------------------------------------------------------------


def coordinates(pull_back: PullBack, size: Size, device: torch.device) -> Tensor:
    """Source coordinates (3, I, J, K) in float64, straight from the contract's formula."""
    q = torch.meshgrid(*[torch.arange(n, dtype=torch.float64, device=device) - n // 2 for n in size], indexing="ij")
    x = torch.einsum("sa,aijk->sijk", to(pull_back.matrix, device), torch.stack(q))
    x += to(pull_back.base + pull_back.rest, device).reshape(3, 1, 1, 1)
    if pull_back.spline is not None:
        u = to(pull_back.spline.coefficients, device)
        for axis in range(3):
            starts = pull_back.spline.start[axis], size[axis], pull_back.spline.extent[axis]
            weights = to(spline_weights(*starts, pull_back.spline.coefficients.shape[axis + 1]), device)
            u = torch.movedim(torch.movedim(u, axis + 1, -1) @ weights.T, -1, axis + 1)
        x += u
    return x


def to(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float64)).to(device)


def values_at(source: Source, place: Tensor) -> Tensor:
    """Real values (C, I, J, K) at whole voxels `place` (3, I, J, K), pad outside."""
    limit = torch.tensor(source.data.shape[1:], device=place.device).reshape(3, 1, 1, 1)
    outside = ((place < 0) | (place >= limit)).any(dim=0)
    i, j, k = place.clamp(min=torch.zeros_like(limit), max=limit - 1)
    scale, pad = to(source.scale, place.device), to(source.pad, place.device)
    values = source.data[:, i, j, k].to(torch.float64) * scale[:, 0].reshape(-1, 1, 1, 1)
    return torch.where(outside, pad.reshape(-1, 1, 1, 1), values + scale[:, 1].reshape(-1, 1, 1, 1))


def reference(read: Read, mode: Mode, size: Size) -> tuple[Tensor, Tensor]:
    """The patch (C, I, J, K) in float64, and where (I, J, K) a label may differ because it is decided by rounding."""
    x = coordinates(read.pull_back, size, read.source.data.device)
    if mode == "nearest":
        shifted = x + NEAREST_SHIFT
        tie = ((shifted - shifted.round()).abs() < 1e-4).any(dim=0)
        return values_at(read.source, shifted.floor().long()), tie
    lower = x.floor()
    fraction = x - lower if mode == "linear" else ((x - lower) * 128 + 0.5).floor() / 128
    taps, shares = [], []
    for corner in itertools.product((0, 1), repeat=3):
        step = torch.tensor(corner, device=x.device).reshape(3, 1, 1, 1)
        taps.append(values_at(read.source, lower.long() + step))
        shares.append(torch.where(step == 1, fraction, 1 - fraction).prod(dim=0))
    if mode == "linear":
        return sum((tap * share for tap, share in zip(taps, shares)), torch.zeros_like(taps[0])), x[0] < -1e9
    classes = torch.unique(torch.stack(taps))
    totals = torch.stack(
        [sum((s * (t == c) for t, s in zip(taps, shares)), torch.zeros_like(taps[0])) for c in classes]
    )
    close = x * 128 + 0.5
    return classes[totals.argmax(dim=0)], ((close - close.round()).abs() < 0.0128).any(dim=0)


# Work ----------------------------------------------------------------------------------------------------------------


def rotation(degrees: float, scale: float = 1.0) -> np.ndarray:
    """A turn of `degrees` about each of the three axes in turn (3, 3)."""
    c, s = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    x = np.array([[1, 0, 0], [0, c, -s], [0, s, c]])
    return np.asarray(x @ np.roll(x, 1, (0, 1)) @ np.roll(x, 2, (0, 1)) * scale)


def noise(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.rand(shape, generator=generator, device=device)
    return values.to(dtype) if dtype.is_floating_point else (values * 100).to(dtype)


def make_map(shape: Size, size: Size, degrees: float, elastic: bool, centre: tuple[float, ...], seed: int) -> PullBack:
    """A patch about source point `centre`; the spline displaces by up to 5 voxels."""
    spline = None
    if elastic:
        points = np.random.default_rng(seed).uniform(-5, 5, (3, POINTS, POINTS, POINTS))
        start = tuple(int(c) - n // 2 for c, n in zip(centre, size))
        spline = Spline(points, (start[0], start[1], start[2]), shape)
    base = np.floor(centre).astype(np.int64)
    return PullBack(rotation(degrees), base, np.asarray(centre) - base, spline)


@dataclass
class Work:
    """A batch of patches and the tensors that receive it."""

    reads: dict[str, list[Read]]
    modes: dict[str, Mode]
    out: dict[str, Tensor]
    size: Size

    def gather(self, backend: str = "triton") -> None:
        contract.gather(self.reads, self.modes, self.size, self.out, backend)


def make_work(reads: dict[str, list[Read]], size: Size, modes: dict[str, Mode] = MODES) -> Work:
    out = {}
    for key, patches in reads.items():
        data = patches[0].source.data
        kind = torch.float32 if modes[key] == "linear" else torch.int64
        out[key] = torch.zeros((len(patches), data.shape[0], *size), dtype=kind, device=data.device)
    return Work(reads, {key: modes[key] for key in reads}, out, size)


# Correctness ---------------------------------------------------------------------------------------------------------


def worst_errors(work: Work) -> dict[str, float]:
    """Largest error of images over their value range; share of label voxels that differ away from ties."""
    work.gather()
    errors: dict[str, float] = {}
    for key, patches in work.reads.items():
        for read, patch in zip(patches, work.out[key]):
            want, tie = reference(read, work.modes[key], work.size)
            if work.modes[key] == "linear":
                error = float((patch - want).abs().max() / (want.max() - want.min()))
            else:
                error = float(((patch != want) & ~tie).double().mean())
            errors[key] = max(errors.get(key, 0.0), error)
    return errors


def check(device: torch.device, small: bool) -> dict[str, Any]:
    """Every dtype, mode and channel count, affine and elastic, in a mixed batch that touches borders."""
    shapes: list[Size] = [(30, 34, 38), (41, 27, 33)] if small else [(130, 150, 120), (97, 181, 203)]
    size: Size = (12, 10, 19) if small else (77, 64, 90)
    result: dict[str, Any] = {}
    for dtype, channels, elastic in itertools.product(DTYPES, (1, 4), (False, True)):
        reads: dict[str, list[Read]] = {key: [] for key in MODES}
        for n, shape in enumerate(shapes):
            pull_back = make_map(shape, size, 13 + 9 * n, elastic, tuple(c * (0.4 + 0.4 * n) for c in shape), n)
            scale = np.array([[0.5, -3.0]] * channels)
            image = Source(noise((channels, *shape), dtype, device, n), scale, np.full(channels, 4.0))
            regions = noise((1, *shape), torch.float32, device, n).mul(4).floor().to(dtype)
            label = Source(regions, np.array([[1.0, 0.0]]), np.array([1.0]))
            for key in MODES:
                reads[key].append(Read(image if key == "image" else label, pull_back))
        name = f"{str(dtype).removeprefix('torch.')}, {channels} channels, {'elastic' if elastic else 'affine'}"
        result[name] = worst_errors(make_work(reads, size))
        ok = result[name]["image"] <= 2e-5 and result[name]["label"] == 0 and result[name]["vote"] == 0
        print(f"{'ok ' if ok else 'BAD'} {name:34} {result[name]}", flush=True)
        assert ok, name
    return result


# Times ---------------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any], repeat: int = 30) -> float:
    """Median time of one call on the device, by events; the host runs ahead."""
    for _ in range(3):
        call()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeat)]
    for begin, end in marks:
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(np.median([begin.elapsed_time(end) for begin, end in marks]))


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a large copy."""
    a, b = (torch.empty(2**29, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * a.numel() / milliseconds(lambda: b.copy_(a)) * 1e3


def batch(volumes: list[Source], labels: list[Source], p: int, degrees: float, elastic: bool) -> Work:
    """BATCH patches of p cubed, one from each volume in turn, near its middle."""
    reads: dict[str, list[Read]] = {"image": [], "label": []}
    shape, rng = (SIDE, SIDE, SIDE), np.random.default_rng(0)
    for n in range(BATCH):
        centre = tuple(SIDE / 2 + rng.uniform(-20, 20, 3))
        pull_back = make_map(shape, (p, p, p), degrees, elastic, centre, n)
        reads["image"].append(Read(volumes[n % len(volumes)], pull_back))
        reads["label"].append(Read(labels[n % len(labels)], pull_back))
    return make_work(reads, (p, p, p))


def built(work: Work, images: Tensor, labels: Tensor) -> Callable[[], Any]:
    """affine_grid (and a dense displacement) and grid_sample on stacked float32 volumes (B, C, D, H, W)."""
    p, device = work.size[0], images.device
    maps = [read.pull_back for read in work.reads["image"]]
    turn = np.stack([m.matrix[::-1, ::-1] * (p / SIDE) for m in maps])
    shift = np.stack([((2 * (m.base + m.rest - (m.matrix.sum(axis=1) / 2)) + 1) / SIDE - 1)[::-1] for m in maps])
    theta = torch.from_numpy(np.concatenate([turn, shift[..., None]], axis=2)).float().to(device)
    fields = [torch.stack([coarse(m, p, device) for m in maps])] if maps[0].spline else []

    def run() -> None:
        grid = functional.affine_grid(theta, [len(maps), 1, p, p, p], align_corners=False)
        for field in fields:
            grid = grid + functional.interpolate(field, (p, p, p), mode="trilinear").permute(0, 2, 3, 4, 1)
        functional.grid_sample(images, grid, "bilinear", "zeros", align_corners=False)
        functional.grid_sample(labels, grid, "nearest", "zeros", align_corners=False).long()

    return run


def coarse(pull_back: PullBack, p: int, device: torch.device) -> Tensor:
    """As many control points as the patch sees, in grid units (3, a, a, a): the usual field that `interpolate` widens.

    Not the same field as the spline's, but the same work.
    """
    assert pull_back.spline is not None
    count = -(-p * (POINTS - 3) // SIDE) + 3
    points = pull_back.spline.coefficients[::-1, :count, :count, :count]
    return torch.from_numpy(points * (2 / SIDE)).float().to(device)


def replayed(work: Work) -> Callable[[], Any]:
    """The launches of a batch in a CUDA graph: no host time between them."""
    groups = triton_cuda.groups_of(work.reads, work.modes, work.out)
    device = work.out["image"].device
    launches = [triton_cuda.prepare(same, work.size, device) for same in triton_cuda.by_kind(groups)]
    run = [functools.partial(launch.run, work.size, triton_cuda.TILE) for launch in launches]
    for launch in run:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in run:
            launch()
    return graph.replay


def floor_ms(work: Work, bandwidth: float) -> float:
    """Time to read each source voxel of the patches once and to write the outputs."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in work.out.values())
    for key, patches in work.reads.items():
        for read in patches:
            voxels = np.prod(work.size) * abs(np.linalg.det(read.pull_back.matrix)) * work.out[key].shape[1]
            total += int(voxels) * read.source.data.element_size()
    return total / bandwidth * 1e3


def time_all(device: torch.device) -> dict[str, Any]:
    """The table of fused against built, and the whole-volume warp."""
    bandwidth = copy_bandwidth(device)
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    rows: dict[str, Any] = {"copy_bandwidth": bandwidth}
    head = f"{'patches of 8':34} {'fused':>8} {'graph':>8} {'built':>8} {'ratio':>6} {'floor':>8} {'share':>6}"
    for channels in (1, 4):
        images = torch.stack([noise((channels, *[SIDE] * 3), torch.float32, device, n) for n in range(BATCH)])
        regions = torch.stack([noise((1, *[SIDE] * 3), torch.uint8, device, n) % 4 for n in range(BATCH)])
        one, floats = np.tile([1.0, 0.0], (channels, 1)), regions.float()
        volumes = [Source(image, one, np.zeros(channels)) for image in images]
        labels = [Source(region, one[:1], np.zeros(1)) for region in regions]
        print(head)
        for p, degrees, elastic in itertools.product((64, 96, 128), (0.0, 30.0), (False, True)):
            work = batch(volumes, labels, p, degrees, elastic)
            row = {
                "fused_ms": milliseconds(work.gather),
                "graph_ms": milliseconds(replayed(work)),
                "built_ms": milliseconds(built(work, images, floats), 10),
                "floor_ms": floor_ms(work, bandwidth),
            }
            row["ratio"], row["share_of_floor"] = row["built_ms"] / row["graph_ms"], row["floor_ms"] / row["graph_ms"]
            name = f"{p} cubed, {channels} ch, {degrees:.0f} deg, {'elastic' if elastic else 'affine'}"
            rows[name] = row
            print(
                f"{name:34} {row['fused_ms']:8.3f} {row['graph_ms']:8.3f} {row['built_ms']:8.3f} {row['ratio']:6.2f} "
                f"{row['floor_ms']:8.3f} {row['share_of_floor']:6.0%}",
                flush=True,
            )
        rows[f"whole volume warped, then 8 crops of 96 cubed, {channels} ch"] = whole_volume(images[:1], floats[:1])
    sources = [Source((v.data[:1] * 1000).to(torch.int16), np.array([[1e-3, 0.0]]), np.zeros(1)) for v in volumes]
    rows["int16, 96 cubed, 30 deg, elastic"] = {
        "graph_ms": milliseconds(replayed(batch(sources, labels, 96, 30.0, True)))
    }
    return rows


def whole_volume(image: Tensor, label: Tensor) -> dict[str, float]:
    """What peers do: warp one volume, then cut 8 patches; per volume, so per 8 patches."""
    theta = torch.eye(3, 4, device=image.device)[None] + 0.1

    def run() -> None:
        grid = functional.affine_grid(theta, [1, 1, SIDE, SIDE, SIDE], align_corners=False)
        warped = functional.grid_sample(image, grid, "bilinear", "zeros", align_corners=False)
        regions = functional.grid_sample(label, grid, "nearest", "zeros", align_corners=False)
        for n in range(8):
            warped[:, :, n : n + 96, n : n + 96, n : n + 96].clone()
            regions[:, :, n : n + 96, n : n + 96, n : n + 96].long()

    row = {"built_ms": milliseconds(run, 10)}
    print(f"whole volume warped, then 8 crops of 96 cubed: {row['built_ms']:.3f} ms")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and times the Triton gather.")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available() and not triton_cuda.is_interpreted()
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else "interpreter"
    begin = time.perf_counter()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    result: dict[str, Any] = {"device": name, "date": time.strftime("%Y-%m-%d"), **versions}
    result["errors"] = check(device, small=not on_gpu)
    if on_gpu:
        result["times"] = time_all(device)
        path = arguments.json or pathlib.Path(__file__).parent / "results" / f"gpu_{name.replace(' ', '_')}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print("written:", path)
    else:
        print("no CUDA device: times not measured")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
