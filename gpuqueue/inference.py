"""Dense inference: windows over volumes, a model over windows, and what it says on each volume's own grid.

Windows are gathered on the device like training patches, from several volumes in one batch. Where another grid was
asked for, what was put together is read back through the inverse change of grid, once, linearly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuqueue.aggregator import MODES, Aggregator, back_to
from gpuqueue.arguments import axis_codes, devices, one_of, three_spacings, whole
from gpuqueue.patches.batch import Augmentation, Patch, PatchMaker, Stage, Wanted, assemble, run_stages
from gpuqueue.patches.forward import Placed
from gpuqueue.patches.gather.contract import BACKENDS, Read, Size
from gpuqueue.patches.prepare import Pad, Preparation, check_pad
from gpuqueue.patches.samplers import UniformSampler, as_size
from gpuqueue.patches.samplers.grid import Overlap, grid_starts, overlap_voxels
from gpuqueue.volumes.grid import Grid, crop_affine
from gpuqueue.volumes.residents import Memory, Resident, memory_for
from gpuqueue.volumes.volume import Volume, as_volume

Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says of one volume: `values` (C, I, J, K) on the volume's own grid; labels are (1, I, J, K) int64.

    `affine` (4, 4) is that of the key that the model saw.
    """

    id: str
    values: Tensor
    affine: NDArray[np.float64]

    def volume(self, key: str | None = None) -> Volume:
        """As a Volume with one key: "label" for whole numbers, else "image", unless `key` names it."""
        role = "image" if self.values.is_floating_point() else "label"
        return Volume(self.id, {key or role: self.values.cpu()}, self.affine, {key or role: role})


def predict(
    model: Model,
    volume: Volume | Iterable[Any],
    patch_size: int | Sequence[int],
    *,
    overlap: Overlap = 0.25,
    batch_size: int = 4,
    mode: str = "average",
    output: str = "values",
    key: str | None = None,
    stages: Sequence[Stage] = (),
    spacing: float | Sequence[float] | None = None,
    orientation: str | None = None,
    margin: int | Sequence[int] = 0,
    pad: Mapping[str, Pad] | None = None,
    device: str | torch.device = "auto",
    out: str | torch.device = "cpu",
    backend: str = "auto",
) -> Any:
    """Runs a model over all of a volume, window by window, and puts its outputs together on the volume's own grid.

    The model runs without gradients, in evaluation mode (each module's mode is put back), under the caller's autocast.

    Args:
        model: From windows (B, C, *patch_size) float32 to outputs (B, any channels, *patch_size).
        volume: One Volume; or several, as a list, dataset or `volume_loader`: then predictions come one by one, in
            order, windows of neighbouring volumes sharing batches.
        patch_size: A window's voxels; one number or three. A smaller volume is padded, and the padding removed.
        overlap: What neighbouring windows share: voxels as int, a share of the window as float; one or three.
        mode: "average", "gaussian", "hann" or "crop"; see `Aggregator`.
        output: "values", as the model gives them, or "label": the channel that is largest, int64.
        key: What the model sees; default the volume's first image.
        stages: Functions batch -> batch before the model, such as a training's normalisation.
        spacing, orientation: The grid of the windows, as in `GPUQueue`.
        margin: Voxels of padding around the grid of windows, so that the volume's border, too, lies inside of some.
        pad: What lies outside, as in `GPUQueue`.
        device: Where windows are gathered and the model runs; "auto" is where the model's parameters are.
        out: Where outputs are summed: "cpu", or a device that has room for them.
        backend: The gather's.

    Returns:
        A `Prediction`, or for several volumes an iterator of them.

    Raises:
        ValueError: Settings that make no sense, or a model that changes the shape of its windows.
        StageError: A stage failed.

    >>> volume = Volume("case1", {"image": np.arange(6 * 7 * 8).reshape(6, 7, 8)})
    >>> prediction = predict(lambda windows: torch.cat([windows, -windows], 1), volume, 4, device="cpu")
    >>> prediction.values.shape, bool((prediction.values[0] == volume["image"][0]).all())
    (torch.Size([2, 6, 7, 8]), True)
    """
    one_of("mode", mode, MODES)
    one_of("output", output, ("values", "label"))
    one_of("backend", backend, BACKENDS)
    size = as_size(patch_size, "patch_size")
    sampler = UniformSampler()
    inference = _Inference(
        model,
        Preparation(size, sampler, None, axis_codes(orientation), three_spacings(spacing), check_pad(pad)),
        PatchMaker(size, sampler, Augmentation(), 0, backend=backend),
        tuple(stages),
        overlap_voxels(overlap, size),
        np.broadcast_to(np.array(margin), 3),
        mode,
        output,
        key,
        whole("batch_size", batch_size, 1),
        devices(_device_of(model) if device == "auto" else device, None)[0],
        torch.device(out),
    )
    if (inference.margin < 0).any() or not np.issubdtype(inference.margin.dtype, np.integer):
        raise ValueError(f"margin={margin!r}: voxels, as whole numbers of 0 or more")
    if isinstance(volume, Volume):
        return next(inference.predictions([volume]))
    return inference.predictions(_each(volume))


@dataclass(eq=False)
class _Case:
    """A volume under way: `left` windows have not been seen by the model."""

    volume: Volume
    resident: Resident
    aggregator: Aggregator
    left: int


@dataclass(frozen=True, eq=False)
class _Inference:
    model: Model
    preparation: Preparation
    maker: PatchMaker
    stages: tuple[Stage, ...]
    overlap: Size
    margin: NDArray[np.int64]
    mode: str
    output: str
    key: str | None
    batch_size: int
    device: torch.device
    out: torch.device

    def predictions(self, volumes: Iterable[Volume]) -> Iterator[Prediction]:
        """Each volume's prediction, as soon as its last window was seen."""
        memory = memory_for(self.device)
        windows = self._windows(volumes, memory)
        try:
            while batch := list(itertools.islice(windows, self.batch_size)):
                kept = self._see(batch, memory)  # noqa: F841, till the next batch was seen, see there
                for case in dict.fromkeys(case for case, _ in batch):
                    if case.left == 0:
                        memory.release(case.resident)
                        yield self._finished(case)
                del batch
        finally:
            memory.close()

    def _windows(self, volumes: Iterable[Volume], memory: Memory) -> Iterator[tuple[_Case, Patch]]:
        assert self.maker.size is not None
        for whole_volume in volumes:
            volume, prepared = self.preparation(self._seen_part(whole_volume))
            resident = memory.load(volume, prepared)
            shape = prepared.reference.shape
            i, j, k = (np.array(shape) + 2 * self.margin).tolist()
            starts = grid_starts((i, j, k), self.maker.size, self.overlap) - self.margin
            case = _Case(volume, resident, Aggregator(shape, self.overlap, self.mode, self.out), len(starts))
            first = self.maker.patch(Wanted(resident, 0, 0, 0), Placed(starts[0]), np.eye(4), None)
            for number, start in enumerate(starts):
                yield case, _moved(first, number, start)

    def _seen_part(self, volume: Volume) -> Volume:
        """The key that the model sees, first, and the others only where stages may ask for them."""
        key = self._key(volume)
        keys = [key, *(other for other in volume.arrays if other != key and self.stages)]
        arrays = {name: volume.arrays[name] for name in keys}
        return Volume(
            volume.id,
            arrays,
            volume.affines,
            volume.roles,
            volume.same_grid,
            scale=volume.scale,
            sources=volume.sources,
        )

    def _key(self, volume: Volume) -> str:
        key = volume.reference if self.key is None else self.key
        if key not in volume.arrays:
            raise ValueError(f"key={key!r}: volume {volume.id!r} has the keys {list(volume.arrays)}")
        return key

    @torch.no_grad()
    def _see(self, windows: Sequence[tuple[_Case, Patch]], memory: Memory) -> Tensor:
        """Gathers the windows, runs the model over them, adds what it gives, and returns that.

        Held by the caller it keeps the heap from shrinking; each layer of the next run would fault its memory in anew.
        """
        patches = [patch for _, patch in windows]
        for case in dict.fromkeys(case for case, _ in windows):
            memory.wait(case.resident)
        some = windows[0][0]
        tensors = self.maker.allocate(some.resident, len(patches), self.device)
        self.maker.gather_into(patches, tensors)
        batch = run_stages(assemble(patches, tensors, False), self.stages)
        with _evaluating(self.model):
            outputs = self.model(batch[self._key(some.volume)])
        if not isinstance(outputs, Tensor) or outputs.ndim != 5 or len(outputs) != len(patches):
            what = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            raise ValueError(
                f"the model must give a tensor ({len(patches)}, C, *patch_size) for {len(patches)} windows, "
                f"got {what}; wrap it in a function that takes its main output"
            )
        first = 0
        for case, same in itertools.groupby(windows, key=lambda window: window[0]):
            locations = [[*patch.start, *(patch.start + patch.size)] for _, patch in same]
            case.aggregator.add_batch(outputs[first : first + len(locations)], locations)
            case.left -= len(locations)
            first += len(locations)
        return outputs

    @torch.no_grad()
    def _finished(self, case: _Case) -> Prediction:
        reference: Grid = case.resident.prepared.reference
        own = case.volume.grid()
        values = back_to(own, case.aggregator.result(), reference, self.maker.backend)
        if self.output == "label":
            if len(values) < 2:
                raise ValueError("output='label' is the largest of several channels, and the model gives one")
            values = values.argmax(0, keepdim=True)
        return Prediction(case.volume.id, values, own.affine)


def _moved(patch: Patch, number: int, start: NDArray[np.int64]) -> Patch:
    """The patch of the same volume that starts elsewhere: its maps are the same but for where they begin."""
    step = (start - patch.start).astype(np.float64)
    moved = {}
    for pulled in {id(read.pull_back): read.pull_back for read in patch.reads.values()}.values():
        point = pulled.rest + pulled.matrix @ step
        whole_voxels = np.floor(point)
        moved[id(pulled)] = dataclasses.replace(
            pulled, base=pulled.base + whole_voxels.astype(np.int64), rest=point - whole_voxels
        )
    reads = {key: Read(read.source, moved[id(read.pull_back)]) for key, read in patch.reads.items()}
    wanted = dataclasses.replace(patch.wanted, index=number)
    return Patch(wanted, start, patch.size, crop_affine(patch.affine, start - patch.start), reads, patch.parameters)


@contextlib.contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """A module's evaluation mode; afterwards every submodule is in the mode it had."""
    training = [part for part in model.modules() if part.training] if isinstance(model, torch.nn.Module) else []
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _device_of(model: Model) -> str | torch.device:
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else iter(())
    return next((parameter.device for parameter in parameters), "auto")


def _each(volumes: Iterable[Any]) -> Iterator[Volume]:
    """The volumes of a list, a map-style dataset, or a loader of lists."""
    number = 0
    indexed = hasattr(volumes, "__getitem__") and hasattr(volumes, "__len__")
    items = (volumes[place] for place in range(len(volumes))) if indexed else volumes  # type: ignore[index,arg-type]
    for item in items:
        for volume in item if isinstance(item, list) else [item]:
            yield as_volume(volume, str(number), None, True)
            number += 1
