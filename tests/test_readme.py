"""What the README shows runs, and prints what it says."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

import nibabel as nib
import numpy as np

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def test_the_readmes_examples_run_and_print_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases").mkdir()
    for n in range(5):
        for key, array in (("image", np.random.default_rng(n).random((34, 36, 40))), ("label", np.ones((34, 36, 40)))):
            nib.save(nib.Nifti1Image(array.astype(np.float32), np.eye(4)), f"cases/c{n}_{key}.nii.gz")
    blocks = re.findall(r"```(python)?\n(.*?)```", README, re.DOTALL)
    names, checked = {}, 0
    for number, (kind, code) in enumerate(blocks):
        if kind != "python":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"README block {number}", "exec"), names)
        following = blocks[number + 1] if number + 1 < len(blocks) else ("python", "")
        if following[0] == "":
            assert out.getvalue() == following[1]
            checked += 1
    assert checked == 2


def test_its_files_exist():
    root = pathlib.Path(__file__).parents[1]
    for name in ("constraints.txt", "gpuqueue/errors.py", "notebooks"):
        assert name in README and (root / name).exists()
