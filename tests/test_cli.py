"""The command line: what it offers, and what it says when something is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpuqueue.cli import main


def test_help_names_the_commands_and_needs_no_optional_package() -> None:
    code = (
        "import sys\nfrom gpuqueue.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'rich', 'monai', 'matplotlib', 'nilearn', 'kornia'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["fly"], ["demo", "--device", "abacus"], ["demo", "--workers", "many"]])
def test_a_command_line_that_makes_no_sense_ends_with_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: gpuqueue" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "no/such/folder"], "no/such/folder is not a folder"),
        (["--patch-size", "30"], "patch_size=30"),
        (["--epochs", "0"], "epochs=0"),
    ],
)
def test_an_error_is_one_line_on_stderr_and_status_1(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *arguments]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("gpuqueue: ") and error.count("\n") == 1


def test_a_missing_package_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nilearn", None)
    monkeypatch.setitem(sys.modules, "nilearn.datasets", None)
    assert main(["demo", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "nilearn" in error and "gpuqueue[demo]" in error
