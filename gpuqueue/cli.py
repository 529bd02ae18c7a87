"""The command `gpuqueue`: which subcommands there are, their options, and how their results are printed."""

from __future__ import annotations

import argparse
import pathlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpuqueue.errors import GPUQueueError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from gpuqueue.demo import DemoReport, Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; the exit status: 0, 1 for an error that its message explains, 130 after Ctrl-C.

    `argv` is what follows the program's name; by default that of this process.
    """
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
        return status
    except ModuleNotFoundError as error:
        return _fail(f"{error.name} is missing; pip install 'gpuqueue[demo]' brings it")
    except (GPUQueueError, ValueError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130


def _fail(message: str) -> int:
    sys.stderr.write(f"gpuqueue: {message}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpuqueue", description="Feeds 3D medical-image training.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_demo(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "train a small U-Net on augmented patches and report its Dice, the waiting and the memory"
    demo = commands.add_parser("demo", help=text, description=text.capitalize() + ".")
    demo.add_argument(
        "--data", type=pathlib.Path, metavar="FOLDER",
        help="your own volumes: imagesTr and labelsTr, or NAME_image.nii.gz and NAME_label.nii.gz (default: blocks of "
        "the MNI152 template)",
    )  # fmt: skip
    demo.add_argument("--out", type=pathlib.Path, default=pathlib.Path("demo_output"), metavar="FOLDER")
    demo.add_argument("--epochs", type=int, default=10, help="of the training (default: 10)")
    demo.add_argument("--seconds", type=float, default=150, help="after which the training ends at the latest (150)")
    demo.add_argument("--patch-size", type=int, default=32, help="voxels, a multiple of 4 (32)")
    demo.add_argument(
        "--device", type=_device, default="auto", help="where batches and network are: auto, cpu, cuda (auto)"
    )
    demo.add_argument(
        "--augment-device", type=_device, help="where volumes stay and patches are made (that of --device)"
    )
    demo.add_argument("--workers", type=_workers, default="auto", help="processes that read volumes (auto)")
    demo.add_argument("--seed", type=int, default=0)
    demo.set_defaults(run=_demo)


def _workers(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _device(text: str) -> str:
    import torch

    try:
        return text if text == "auto" else str(torch.device(text))
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no device; take auto, cpu, cuda or cuda:1") from None


def _demo(options: argparse.Namespace) -> int:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    fields = {name: value for name, value in vars(options).items() if name != "run"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other packages' warnings are not the reader's business
        from gpuqueue.demo import DemoSettings, run

        with _progress_bar(console) as progress:
            report = run(DemoSettings(**fields), console.print, progress)
    console.print(_figures(report), _dice(report))
    written = dict.fromkeys(file if file.suffix == ".png" else file.parent for file in report.files)
    console.print("Written:", *written, soft_wrap=True)
    console.print(
        "Patches in 'plain' lie over their volumes in any viewer; those in 'augmented' show them moved and bent.",
        soft_wrap=True,
    )
    return 0


@contextmanager
def _progress_bar(console: Console) -> Iterator[Progress]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("reading volumes", total=1.0)

        def advance(done: float, text: str) -> None:
            bar.update(task, completed=done, description=text)

        yield advance


def _figures(report: DemoReport) -> Table:
    from rich.table import Table

    stats = report.stats
    table = Table("Training", "", title_justify="left")
    table.add_row("steps, patches", f"{report.steps}, {stats.patches}")
    table.add_row("patches per second, training included", f"{stats.patches_per_second:.1f}")
    table.add_row("first batch after", f"{report.first_batch_seconds:.2f} s")
    table.add_row("share of the time that training waited for data", f"{100 * stats.wait_share:.1f} %")
    table.add_row(
        "most volumes resident", f"{stats.most_resident_volumes} ({stats.most_resident_bytes / 2**20:.1f} MiB)"
    )
    return table


def _dice(report: DemoReport) -> Table:
    from rich.table import Table

    table = Table("Dice on validation", "before", "after")
    for label, after in report.dice_after.items():
        table.add_row(f"label {label}", f"{report.dice_before[label]:.3f}", f"{after:.3f}")
    before = sum(report.dice_before.values()) / len(report.dice_before)
    table.add_row("mean", f"{before:.3f}", f"{report.mean_dice:.3f}")
    return table
