"""What `gpuqueue demo` does: its data, its training and its pictures. How that is printed is decided in cli.py.

The embedded data are blocks of one template brain; `data` is any folder that `VolumeDataset.from_folder` knows.
"""

from __future__ import annotations

import itertools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import nibabel
import numpy as np
import torch
from torch import Tensor

from gpuqueue.patches.samplers import LabelSampler
from gpuqueue.patches.transforms import RandomAffine, RandomElasticDeformation, RandomFlip
from gpuqueue.profiling.report import show
from gpuqueue.profiling.stats import Stats
from gpuqueue.queue import GPUQueue
from gpuqueue.volumes.dataset import VolumeDataset
from gpuqueue.volumes.grid import crop_affine
from gpuqueue.volumes.loader import volume_loader
from gpuqueue.volumes.writing import save_nifti

Box = tuple[slice, slice, slice]
Progress = Callable[[float, str], None]  # share done, 0 to 1, and what is going on
_TRAINING_CUTS = ((24, 84, 128, 172), (28, 66, 120, 156), (2, 70, 158))  # voxels of the template, one tuple an axis
_VALIDATION_CUTS = ((24, 92, 172), (160, 208), (2, 80, 158))
_PICTURED = 6  # patches drawn and saved


@dataclass(frozen=True)
class DemoSettings:
    """What the command line may change. The training ends after `epochs`, or after `seconds` if that comes first."""

    data: pathlib.Path | None = None
    out: pathlib.Path = pathlib.Path("demo_output")
    epochs: int = 10
    seconds: float = 150.0
    patch_size: int = 32
    patches_per_volume: int = 16
    batch_size: int = 4
    device: str = "auto"
    augment_device: str | None = None
    workers: int | str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class DemoReport:
    """What came out; Dice by label, over all validation voxels together."""

    dice_before: dict[int, float]
    dice_after: dict[int, float]
    steps: int
    stats: Stats
    first_batch_seconds: float
    files: list[pathlib.Path]

    @property
    def mean_dice(self) -> float:
        """Mean Dice after training over all labels but 0."""
        return float(np.mean(list(self.dice_after.values())))


@dataclass(frozen=True, eq=False)
class ForNetwork:
    """The one stage after the spatial ones: what a network wants of values. Any `fn(batch) -> batch` is a stage.

    `ranges` holds each volume's 1st and 99th percentiles (2, C), which become -1 and 1; `labels` become 0, 1, 2 ... in
    their order.
    """

    labels: Tensor
    ranges: Mapping[str, Tensor]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with `image` and `label` exchanged."""
        batch["image"] = self.scaled(batch["image"], batch["volume"])
        batch["label"] = torch.searchsorted(self.labels.to(batch["label"].device), batch["label"])
        return batch

    def scaled(self, images: Tensor, ids: Sequence[str]) -> Tensor:
        """Images (B, C, I, J, K) of the volumes `ids`, each by its own volume's range."""
        ranges = torch.stack([self.ranges[volume_id] for volume_id in ids], dim=1)
        low, high = ranges[..., None, None, None].to(images.device).unbind()
        return (images - low) / (high - low).clamp_min(1e-6) * 2 - 1


def blocks() -> dict[str, Box]:
    """The embedded data's blocks: name -> voxels of the template. No two share a voxel.

    >>> len(blocks()), blocks()["validation_01"][1]
    (22, slice(160, 208, None))
    """
    named = {}
    for name, cuts in (("training", _TRAINING_CUTS), ("validation", _VALIDATION_CUTS)):
        spans = [list(itertools.starmap(slice, itertools.pairwise(cut))) for cut in cuts]
        for number, (i, j, k) in enumerate(itertools.product(*spans), 1):
            named[f"{name}_{number:02d}"] = (i, j, k)
    return named


def write_blocks(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Writes the blocks as NIfTI pairs; returns the ids for training and for validation. Needs nilearn."""
    from nilearn.datasets import load_mni152_gm_template, load_mni152_template, load_mni152_wm_template

    template, grey, white = (
        load(resolution=1) for load in (load_mni152_template, load_mni152_gm_template, load_mni152_wm_template)
    )
    tissues = np.stack([grey.get_fdata(dtype=np.float32), white.get_fdata(dtype=np.float32)])
    label = np.argmax(np.stack([1 - tissues.sum(0), *tissues]), axis=0).astype(np.uint8)
    image = np.rint(255 * template.get_fdata(dtype=np.float32)).astype(np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    for name, box in blocks().items():
        affine = crop_affine(template.affine, [side.start for side in box])
        for key, voxels in (("image", image), ("label", label)):
            file = nibabel.Nifti1Image(voxels[box], affine)
            file.set_qform(affine, code="mni")  # with the sform, for viewers that look at one of them
            file.to_filename(folder / f"{name}_{key}.nii.gz")
    training = [name for name in blocks() if name.startswith("training")]
    return training, [name for name in blocks() if name not in training]


def split(ids: Sequence[str], seed: int) -> tuple[list[str], list[str]]:
    """Ids for training and for validation: a quarter, at least one, drawn by `seed`. ValueError for fewer than two.

    >>> split(["a", "b", "c", "d"], 0)
    (['a', 'c', 'd'], ['b'])
    """
    if len(ids) < 2:
        raise ValueError(f"the folder holds {len(ids)} volume; training and validation need two or more")
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(ids))
    held_out = {ids[place] for place in order[: max(1, len(ids) // 4)]}
    return [i for i in ids if i not in held_out], [i for i in ids if i in held_out]


def survey(dataset: VolumeDataset, workers: int | str) -> ForNetwork:
    """Reads every volume once, for the labels there are and each image's range. ValueError where labels are missing."""
    labels: set[int] = set()
    ranges = {}
    for volume in itertools.chain.from_iterable(volume_loader(dataset, num_workers=workers)):
        if "label" not in volume.arrays or len(volume.arrays["label"]) > 1:
            raise ValueError(f"volume {volume.id!r} has no label of one channel; the demo trains on image and label")
        labels.update(volume["label"].unique().tolist())
        values = volume["image"].flatten(1).numpy()
        sparse = values[:, :: max(1, values.shape[1] // 100_000)]
        ranges[volume.id] = torch.from_numpy(np.percentile(sparse, [1, 99], axis=1).astype(np.float32))
    if len(labels) < 2:
        raise ValueError(f"all labels are {labels}: there is nothing to learn")
    return ForNetwork(torch.tensor(sorted(labels)), ranges)


def make_network(channels: int, classes: int, seed: int) -> torch.nn.Module:
    """A small MONAI U-Net; its weights come from `seed`, and torch's own random state is put back."""
    from monai.networks.nets import UNet

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network: torch.nn.Module = UNet(3, channels, classes, channels=(16, 32, 64), strides=(2, 2), num_res_units=1)
    return network


def train(network: torch.nn.Module, queue: GPUQueue, settings: DemoSettings, progress: Progress) -> tuple[int, float]:
    """Trains on the queue; returns steps and the seconds to the first batch."""
    from monai.losses import DiceCELoss

    total = len(queue) * settings.epochs
    optimiser = torch.optim.AdamW(network.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=1e-2, total_steps=total)
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    network.train()
    began, first_batch, steps = time.perf_counter(), 0.0, 0
    for batch in itertools.chain.from_iterable(queue for _ in range(settings.epochs)):
        first_batch = first_batch or queue.stats().first_batch_seconds
        loss = loss_of(network(batch["image"]), batch["label"])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        steps += 1
        used = (time.perf_counter() - began) / settings.seconds
        if steps % 10 == 0 or steps == total or used >= 1:
            progress(max(steps / total, min(used, 1)), f"training, step {steps} of {total}, loss {loss.item():.2f}")
        if used >= 1:
            break
    return steps, first_batch


@torch.no_grad()
def dice(
    network: torch.nn.Module, dataset: VolumeDataset, prepare: ForNetwork, window: int, device: torch.device
) -> dict[int, float]:
    """Dice of each label but 0 over all voxels of the dataset, whole volumes by MONAI's sliding window."""
    from monai.inferers import sliding_window_inference

    network.eval()
    classes = len(prepare.labels)
    overlap, size = torch.zeros(classes), torch.zeros(classes)
    for volume in (dataset[place] for place in range(len(dataset))):
        image = prepare.scaled(volume["image"][None].to(device), [volume.id])
        output = sliding_window_inference(image, (window,) * 3, 4, network, cval=-1.0)
        found = output.argmax(1).flatten().cpu()
        truth = torch.searchsorted(prepare.labels, volume["label"].flatten().long())
        overlap += found[found == truth].bincount(minlength=classes)
        size += found.bincount(minlength=classes) + truth.bincount(minlength=classes)
    scores = (2 * overlap / size.clamp_min(1)).tolist()
    return {label: score for label, score in zip(prepare.labels.tolist(), scores) if label != 0}


def draw_patches(
    dataset: VolumeDataset, settings: DemoSettings, augment: Sequence[Any], name: str
) -> list[pathlib.Path]:
    """One patch of some volumes, about a labelled voxel, as a picture `NAME.png` and as NIfTI in the folder `NAME`."""
    some = dataset.subset(dataset.ids[:: max(1, len(dataset) // _PICTURED)][:_PICTURED])
    options = {"patches_per_volume": 1, "batch_size": _PICTURED, "sampler": LabelSampler("label"), "augment": augment}
    with make_queue(some, settings, **options) as queue:
        batch = next(iter(queue))
    show(batch, file=settings.out / f"{name}.png")
    return [settings.out / f"{name}.png", *save_nifti(batch, settings.out / name)]


def make_queue(dataset: VolumeDataset, settings: DemoSettings, **options: Any) -> GPUQueue:
    """A queue of the demo's settings; `options` are others of GPUQueue."""
    return GPUQueue(
        volume_loader(dataset, num_workers=settings.workers),
        settings.patch_size,
        device=settings.device,
        augment_device=settings.augment_device,
        seed=settings.seed,
        **options,
    )


def run(settings: DemoSettings, say: Callable[[str], None], progress: Progress) -> DemoReport:
    """The whole demo. `say` gets sentences for the reader, `progress` the state of the training.

    Raises ValueError for settings and data that make no sense; ModuleNotFoundError without nilearn or matplotlib.
    """
    if settings.patch_size < 8 or settings.patch_size % 4:
        raise ValueError(f"patch_size={settings.patch_size}: the network halves a patch twice; take 8, 12, 16 ...")
    if settings.epochs < 1 or settings.seconds <= 0:
        raise ValueError(f"epochs={settings.epochs}, seconds={settings.seconds:g}: both must be above 0")
    if settings.data is None:
        folder = settings.out / "volumes"
        training, validation = write_blocks(folder)
        dataset = VolumeDataset.from_folder(folder).subset([*training, *validation])
        say(_about_blocks(folder))
    else:
        dataset = VolumeDataset.from_folder(settings.data)
        training, validation = split(dataset.ids, settings.seed)
        named = ", ".join(validation[:5]) + (", ..." if len(validation) > 5 else "")
        say(f"Data: {settings.data}, {len(training)} volumes for training, {len(validation)} for validation ({named}).")
    prepare = survey(dataset, settings.workers)
    say(f"Labels: {', '.join(map(str, prepare.labels.tolist()))}; each image scaled by its 1st and 99th percentiles.")
    return _train_and_report(dataset.subset(training), dataset.subset(validation), prepare, settings, progress)


def _train_and_report(
    training: VolumeDataset, validation: VolumeDataset, prepare: ForNetwork, settings: DemoSettings, progress: Progress
) -> DemoReport:
    spatial = [RandomFlip(axes="LR"), RandomAffine(scales=0.1, degrees=15), RandomElasticDeformation()]
    options = {"patches_per_volume": settings.patches_per_volume, "batch_size": settings.batch_size}
    with make_queue(training, settings, augment=[*spatial, prepare], **options) as queue:
        device = _device(settings.device)
        channels = next(iter(prepare.ranges.values())).shape[1]
        network = make_network(channels, len(prepare.labels), settings.seed).to(device)
        progress(0.0, "Dice before training")
        before = dice(network, validation, prepare, settings.patch_size, device)
        steps, first_batch = train(network, queue, settings, progress)
        stats = queue.stats()
    after = dice(network, validation, prepare, settings.patch_size, device)
    files = draw_patches(training, settings, spatial, "augmented") + draw_patches(training, settings, [], "plain")
    return DemoReport(before, after, steps, stats, first_batch, files)


def _device(name: str) -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name)


def _about_blocks(folder: pathlib.Path) -> str:
    training = sum(name.startswith("training") for name in blocks())
    return (
        "Data: the MNI152 T1 template (1 mm) with its grey and white matter maps, as the nilearn package carries them, "
        f"cut into {training} blocks for training and {len(blocks()) - training} for validation, of differing shapes, "
        f"written to {folder}. A label is the larger map: 1 grey matter, 2 white matter, 0 where what both leave is "
        "larger. The template is exactly mirror-symmetric, so its left half gives the right half away; therefore the "
        "blocks are separated from back to front: training blocks end at y = 21 mm, validation blocks begin at y = 26 "
        "mm, and no two blocks share a voxel. This shows that the pipeline works, not how well it does on other people."
    )
