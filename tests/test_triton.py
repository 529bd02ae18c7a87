"""The Triton kernels without a GPU: compiled offline against a budget, and interpreted across brick edges."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_gather
import torch
from test_gather import MODES, elastic, expected, mapping, near_a_tie, rotation, run, source

from gpuqueue.patches.gather.contract import PullBack, Read, Spline, spline_weights

pytest.importorskip("triton", reason="Triton is not installed")
from gpuqueue.patches.gather import triton_cuda, triton_records

ROOT = pathlib.Path(test_gather.__file__).resolve().parents[1]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled where there is CUDA")

# Instructions per voxel: bounds tested, then never tested. Keys: one float32 image of one channel unless said, and a
# uint8 label.
BUDGET = {
    "affine": (185, 140),
    "affine label": (185 + 45, 140 + 25),
    "cubic": (245, 195),
    "cubic label": (245 + 45, 195 + 25),
    "cubic vote": (245 + 170, 195 + 170),
    "affine int16": (185, 140),
    "cubic label int16": (245 + 45, 195 + 25),
}

COMPILE = r"""
import json, pathlib, re, subprocess, sys, tempfile
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gpuqueue.patches.gather import triton_cuda as host, triton_kernels as kernels, triton_records as records

def compiled(kernel, names, constants, architecture, options):
    signature = {**names, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)

def code(mode, dtype, direct=True):
    return records.MODES[mode] | records.DTYPES.index(dtype) << 2 | int(direct) << 5

def gather(keys, spline, architecture, path=0, size=(96, 96, 96)):
    constants = host.constants(keys, spline, size, host.TILE, path)
    names = {"ints": "*i64", "floats": "*fp32", "table": "*fp32"}
    return compiled(kernels.gather_kernel, names, constants, architecture, host.options(keys))

def tool(kernel, flag):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        folder = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        return subprocess.check_output([folder / "cuobjdump", flag, file.name], text=True)

def instructions(kernel):
    lines = [line for line in tool(kernel, "--dump-sass").splitlines() if re.match(r"\s+/\*[0-9a-f]{4,5}\*/", line)]
    threads = 32 * host.OPTIONS["num_warps"]
    return sum("NOP" not in line for line in lines) / (host.TILE[0] * host.TILE[1] * host.TILE[2] / threads)

def memory(kernel):
    found = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", tool(kernel, "--dump-resource-usage"))
    return [int(number) for number in found.groups()]

def describe(name):
    image = code("linear", torch.int16 if "int16" in name else torch.float32)
    keys = [(image, 4 if "four" in name else 1)]
    keys += [(code("nearest", torch.uint8), 1)] * ("label" in name)
    keys += [(code("vote", torch.uint8), 1)] * ("vote" in name)
    return tuple(keys), "cubic" in name
"""

COUNT = (
    COMPILE
    + r"""
result = {}
for architecture in (80, 90):
    for name in json.loads(sys.argv[1]):
        keys, spline = describe(name)
        result[f"{name}, sm_{architecture}"] = {
            "bounded": instructions(gather(keys, spline, architecture, 1)),
            "interior": instructions(gather(keys, spline, architecture, 2)),
            "memory": memory(gather(keys, spline, architecture)),
        }
print(json.dumps(result))
"""
)

ONES = (
    COMPILE
    + r"""
keys = ((code("linear", torch.bfloat16, False), 3), (code("nearest", torch.float16, False), 1),
        (code("vote", torch.int32, True), 2))
for size in ((1, 1, 1), (33, 1, 97)):
    affine = [gather(keys, spline, 80, size=size) for spline in (True, False)][1]
    names = {"ints": "*i64", "floats": "*fp32", "coefficients": "*fp32", "table": "*fp32"}
    constants = {"SIZE_J": size[1], "BLOCK": host.CONTRACT_BLOCK}
    contract = compiled(kernels.contract_kernel, names, constants, 80, host.OPTIONS)
    assert memory(contract)[1:] == [0, 0]
    print(json.dumps([line for line in affine.asm["ttir"].splitlines() if "muli" in line and "tensor<512x" in line]))
"""
)


def compile_in_process(script: str, *arguments: str) -> list[str]:
    """Lines that a process prints whose kernels are compiled, not interpreted."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_compiled_kernels_keep_to_their_budget_of_instructions_and_registers() -> None:
    names = [*BUDGET, "cubic label four"]
    result: dict[str, Any] = json.loads(compile_in_process(COUNT, json.dumps(names))[-1])
    print(f"\n{'instructions per voxel':32} bounded interior registers")
    for name, found in result.items():
        registers, stack, local = found["memory"]
        print(f"{name:32} {found['bounded']:7.0f} {found['interior']:8.0f} {registers:9}")
        assert stack == 0 and local == 0, f"{name} spills"
        assert registers <= (200 if "four" in name else 128), name
        limits = BUDGET.get(name.split(",")[0])
        if limits:
            assert found["bounded"] <= limits[0] and found["interior"] <= limits[1], name


def test_every_form_compiles_for_axes_of_one_voxel_and_multiplies_strides_in_64_bits() -> None:
    for line in compile_in_process(ONES):
        products = json.loads(line)
        assert sum("tensor<512xi64>" in product for product in products) >= 9  # three strides of each of three keys


@interpreted
def test_bricks_that_cross_the_edges_of_odd_patches_and_volumes_of_two_kinds_share_a_batch() -> None:
    size = (9, 21, 19)
    reads: dict[str, list[Read]] = {key: [] for key in MODES}
    for n, (shape, dtype) in enumerate([((30, 34, 38), torch.float32), ((41, 27, 33), torch.int16)]):
        pull_back = mapping(rotation((12, -17, 9)), (12.3, 14.1, 33.8), elastic(n, shape, (3, 4, 20), 3.0))
        image = source((2, *shape), dtype, seed=n, scale=True)
        label = source((1, *shape), torch.uint8, seed=n + 3, label=True)
        for key, array in zip(MODES, (image, label, label)):
            reads[key].append(Read(array, pull_back))
    out = {key: torch.full((2, 2 if key == "image" else 1, *size), -7, dtype=torch.int64) for key in MODES}
    out["image"] = out["image"].float()
    triton_cuda.gather(reads, MODES, size, out, tile=(4, 16, 8))
    for n, read in enumerate(reads["image"]):
        want = expected(read, "linear", size)
        assert np.abs(out["image"][n].numpy() - want).max() <= 2e-5 * np.ptp(want)
    for key in ("label", "vote"):
        for n, read in enumerate(reads[key]):
            wrong = (out[key][n].numpy() != expected(read, MODES[key], size)).any(axis=0)
            assert not (wrong & ~near_a_tie(read, MODES[key], size)).any()


@interpreted
def test_a_brick_inside_gives_what_the_tested_path_gives() -> None:
    """The same patch from a volume where it lies inside, and from its own crop, where bricks touch the border."""
    size, whole = (8, 8, 16), source((1, 60, 60, 60))
    pull_back = mapping(rotation((4, 5, 6)), (30.2, 30.4, 29.9))
    crop = source((1, 60, 60, 60))
    inner = type(crop)(crop.data[:, 20:41, 20:41, 18:43], crop.scale, crop.pad)
    shifted = PullBack(pull_back.matrix, pull_back.base - np.array([20, 20, 18]), pull_back.rest)
    inside = run("triton", {"image": [Read(whole, pull_back)]}, {"image": "linear"}, size)["image"]
    tested = run("triton", {"image": [Read(inner, shifted)]}, {"image": "linear"}, size)["image"]
    np.testing.assert_array_equal(inside, tested)


# The host's part -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "size", "extent", "points"), [(0, 50, 50, 7), (-9, 40, 20, 4), (170, 30, 197, 12), (60, 9, 64, 64)]
)
def test_the_part_of_an_axis_that_a_patch_sees_holds_all_its_weights(
    start: int, size: int, extent: int, points: int
) -> None:
    axis = triton_records.see_axis(start, size, extent, points)
    weights = spline_weights(start, size, extent, points)
    inside = weights[:, axis.first : axis.first + axis.count]
    np.testing.assert_allclose(inside.sum(axis=1), 1)
    t = np.clip(axis.fraction + np.arange(size) * axis.step, axis.least, axis.greatest)
    cells = np.minimum(np.floor(t), axis.greatest - 1).astype(int)
    assert cells.min() >= 0 and cells.max() + 4 <= axis.count
    f = t - cells
    np.testing.assert_allclose(inside[np.arange(size), cells], (1 - f) ** 3 / 6, atol=1e-12)


def test_a_contracted_table_takes_about_one_byte_a_voxel() -> None:
    spline = Spline(np.zeros((3, 10, 10, 10)), (52, 50, 47), (200, 200, 200))
    seen = triton_records.describe_spline(spline, (96, 96, 96))
    assert seen.table_size * 4 / 96**3 <= 1.2


def test_the_interpreter_is_refused_for_cuda_and_the_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: dict[str, list[Read]] = {"image": []}
    for is_on, kind, match in ((True, "cuda", "TRITON_INTERPRET"), (False, "cpu", "backend='auto'")):
        monkeypatch.setattr(triton_cuda, "is_interpreted", lambda is_on=is_on: is_on)
        out: Any = {"image": SimpleNamespace(device=torch.device(kind))}
        with pytest.raises(ValueError, match=match):
            triton_cuda.gather(reads, MODES, (4, 4, 4), out)


@pytest.fixture(autouse=True)
def _quiet_interpreter() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield
