"""The package as a whole: its exports, its examples, what importing it costs, and its house rules."""

from __future__ import annotations

import ast
import doctest
import importlib
import pathlib
import pkgutil
import subprocess
import sys

import pytest

import gpuqueue as gq

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(gq.__path__, "gpuqueue.")
    if not any(part in module.name for part in ("triton", "__main__"))
)


def test_all_is_sorted_and_is_the_public_namespace():
    public = {name for name in vars(gq) if not name.startswith("_")} - set(sys.modules)
    modules = {name for name in public if type(vars(gq)[name]) is type(sys)}
    assert sorted(gq.__all__) == gq.__all__
    assert set(gq.__all__) == public - modules


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0


def test_public_names_have_docstrings_and_functions_an_example():
    for name in gq.__all__:
        assert getattr(gq, name).__doc__, name


def test_importing_needs_none_of_the_optional_packages_and_no_cuda():
    banned = ["monai", "kornia", "torchio", "lightning", "matplotlib", "rich", "numba", "nilearn", "triton", "deflate"]
    code = (
        "import sys, torch; before = set(sys.modules); import gpuqueue; new = set(sys.modules) - before;"
        f"assert not [n for n in new if n.split('.')[0] in {banned}], sorted(new);"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


NEVER = {
    "stream": ("torch", "gpuqueue.volumes", "gpuqueue.patches", "gpuqueue.queue", "gpuqueue.engine"),
    "volumes": ("gpuqueue.patches", "gpuqueue.queue", "gpuqueue.engine", "kornia", "monai", "torchio"),
    "patches": ("gpuqueue.queue", "gpuqueue.engine", "kornia", "monai", "torchio"),
}


@pytest.mark.parametrize("room", NEVER)
def test_rooms_import_only_what_they_may(room):
    for path in (pathlib.Path(gq.__file__).parent / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert not any(name == b or name.startswith(b + ".") for b in NEVER[room]), f"{path}: {name}"
