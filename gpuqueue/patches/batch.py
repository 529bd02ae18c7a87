"""From resident volumes to the tensors of a batch: draw, compose into one map per patch, gather, augment, cast."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuqueue.errors import StageError
from gpuqueue.patches.forward import Placed, Site, Tally, place
from gpuqueue.patches.gather.contract import Mode, Read, Size, Source, gather, warm_up
from gpuqueue.patches.prepare import Prepared
from gpuqueue.patches.samplers import DrawnVoxel, PatchRandom, Sampler
from gpuqueue.patches.spatial import pull_back
from gpuqueue.patches.transforms import RandomAffine, RandomElasticDeformation, RandomFlip
from gpuqueue.rng import Random, hash_id, make_key, philox
from gpuqueue.volumes.grid import crop_affine
from gpuqueue.volumes.residents import Resident
from gpuqueue.volumes.workers import FORK_LOCK

Batch = dict[str, Any]
Stage = Callable[[Batch], Batch]
_BLOCKS_AHEAD = 5  # of random numbers, made for all patches at once; a sampler that needs more makes them alone


@dataclass(frozen=True)
class Augmentation:
    """The `augment=` list, split: spatial transforms become one map, at most one elastic after them, then stages."""

    spatial: tuple[RandomFlip | RandomAffine, ...] = ()
    elastic: RandomElasticDeformation | None = None
    stages: tuple[Stage, ...] = ()


def split_augmentation(augment: Sequence[Any]) -> Augmentation:
    """Splits and checks the list; ValueError for another order, a second elastic, or what cannot be called."""
    spatial: list[RandomFlip | RandomAffine] = []
    elastic: RandomElasticDeformation | None = None
    stages: list[Stage] = []
    for transform in augment:
        name = stage_name(transform)
        if isinstance(transform, (RandomFlip, RandomAffine)):
            if elastic is not None or stages:
                raise ValueError(f"augment: {name} must come before the elastic deformation and all other stages")
            spatial.append(transform)
        elif isinstance(transform, RandomElasticDeformation):
            if elastic is not None:
                raise ValueError("augment: one RandomElasticDeformation at most; its control points say how fine it is")
            if stages:
                raise ValueError(f"augment: {name} must come before {stage_name(stages[0])}: patches are gathered once")
            elastic = transform
        elif callable(transform):
            stages.append(transform)
        else:
            raise ValueError(f"augment: {transform!r} is neither a transform nor a function batch -> batch")
    return Augmentation(tuple(spatial), elastic, tuple(stages))


def stage_name(stage: Any) -> str:
    """How messages and keys name a stage."""
    return getattr(stage, "__name__", type(stage).__name__)


@dataclass(frozen=True, eq=False)
class Wanted:
    """One patch to make: the `index`-th (k) of a resident in `epoch`, at its `visit`-th load or redraw."""

    resident: Resident
    epoch: int
    index: int
    visit: int


@dataclass(frozen=True, eq=False)
class Patch:
    """One patch, decided: its first voxel, its size and affine, what is read for each key, and the parameters drawn."""

    wanted: Wanted
    start: NDArray[np.int64]
    size: Size
    affine: NDArray[np.float64]
    reads: dict[str, Read]
    parameters: dict[str, Any]


@dataclass(frozen=True, eq=False)
class PatchMaker:
    """Draws patches and gathers them; every draw is a pure function of (seed, epoch, volume id, k or visit, stage).

    `size` None takes each volume's whole reference grid. `tally` counts what was drawn.
    """

    size: Size | None
    sampler: Sampler
    augmentation: Augmentation
    seed: int
    augment_per: str = "patch"
    label_interpolation: Mode = "nearest"
    same_every_epoch: bool = False
    backend: str = "auto"
    tally: Tally = field(default_factory=Tally)

    def draw(self, wanted: Sequence[Wanted]) -> list[Patch]:
        """Decides the patches; nothing is read yet. Raises StageError with the volume's id, epoch and k."""
        prepared: list[Prepared] = [item.resident.prepared for item in wanted]
        grids = [item.reference for item in prepared]
        forward = [np.eye(4) for _ in wanted]
        for number, transform in enumerate(self.augmentation.spatial):
            drawn = transform.draw(self._random(wanted, f"{stage_name(transform)}:{number}"), grids)
            forward = [new @ old for new, old in zip(drawn, forward)]
        control_points: list[NDArray[np.float64] | None] = [None] * len(wanted)
        if self.augmentation.elastic is not None:
            ids = [item.resident.id for item in wanted]
            control_points = self.augmentation.elastic.draw(self._random(wanted, "elastic"), grids, ids)
        placed = self._placed(wanted, forward, control_points)
        return [self.patch(*parts) for parts in zip(wanted, placed, forward, control_points)]

    def gather_into(self, patches: Sequence[Patch], out: dict[str, Tensor]) -> None:
        """Fills `out[key]` (B, C, *size), as allocated by `allocate`. ValueError where a patch has another size."""
        i, j, k = next(iter(out.values())).shape[2:]
        if odd := [patch for patch in patches if patch.size != (i, j, k)]:
            raise ValueError(
                f"patch_size=None delivers whole volumes: {odd[0].wanted.resident.id!r} is {odd[0].size} and the first "
                f"of its batch {(i, j, k)}; take batch_size=1"
            )
        reads = {key: [patch.reads[key] for patch in patches] for key in out}
        roles = patches[0].wanted.resident.roles
        gather(reads, {key: self.mode(roles[key]) for key in out}, (i, j, k), out, self.backend)

    def mode(self, role: str) -> Mode:
        """How keys of a role are read."""
        return self.label_interpolation if role == "label" else "linear"

    def kernels(self, resident: Resident) -> frozenset[tuple[Mode, torch.dtype]]:
        """Which kernels reading this volume takes."""
        return frozenset((self.mode(resident.roles[key]), array.dtype) for key, array in resident.arrays.items())

    def warm_up(self, kernels: Iterable[tuple[Mode, torch.dtype]], device: torch.device) -> None:
        """Compiles these kernels, or loads them from disk, while no worker is being forked."""
        with FORK_LOCK:
            warm_up(kernels, device, self.backend)

    def allocate(self, resident: Resident, count: int, device: torch.device) -> dict[str, Tensor]:
        """Fresh tensors for `count` patches of volumes like this one."""
        size = self.size_of(resident)
        return {
            key: torch.empty(
                (count, len(array), *size),
                dtype=torch.int64 if resident.roles[key] == "label" else torch.float32,
                device=device,
            )
            for key, array in resident.arrays.items()
        }

    def size_of(self, resident: Resident) -> Size:
        """Voxels of this volume's patches."""
        prepared: Prepared = resident.prepared
        return prepared.reference.shape if self.size is None else self.size

    def _random(self, wanted: Sequence[Wanted], stage: str) -> Random:
        by_volume = self.augment_per == "volume"
        turns = [f"visit{item.visit}" if by_volume else f"k{item.index}" for item in wanted]
        return Random([self._key(item, turn, stage) for item, turn in zip(wanted, turns)])

    def _key(self, item: Wanted, turn: str, stage: str) -> int:
        epoch = 0 if self.same_every_epoch else item.epoch
        return make_key(self.seed, epoch, hash_id(item.resident.id), turn, stage)

    def _placed(
        self,
        wanted: Sequence[Wanted],
        forward: Sequence[NDArray[np.float64]],
        control_points: Sequence[NDArray[np.float64] | None],
    ) -> list[Placed]:
        keys = [self._key(item, f"k{item.index}", "sampler") for item in wanted]
        words = philox(np.array(keys, np.uint64), 0, _BLOCKS_AHEAD).reshape(len(keys), -1)
        sites = [
            Site(
                item.resident.prepared.reference,
                self.size_of(item.resident),
                {key: grid.affine for key, grid in item.resident.grids.items()},
                forward[n],
                control_points[n],
                functools.partial(self._drawn, item, PatchRandom(keys[n], item.index, words[n])),
            )
            for n, item in enumerate(wanted)
        ]
        placed = place(sites)
        for item, where in zip(wanted, placed):
            if warning := self.tally.add(item.resident.id, item.resident.prepared.sampler, where):
                warnings.warn(warning, stacklevel=2)
        return placed

    def _drawn(self, item: Wanted, random: PatchRandom, previous: DrawnVoxel | None) -> NDArray[np.int64] | DrawnVoxel:
        prepared: Prepared = item.resident.prepared
        try:
            if previous is not None and previous.again is not None:
                return previous.again(random)
            drawn = self.sampler.draw(prepared.sampler, prepared.reference, self.size_of(item.resident), random)
            if isinstance(drawn, DrawnVoxel):
                return drawn
            start = np.asarray(drawn)
            if start.shape != (3,):
                raise ValueError(f"the sampler's draw must be three whole numbers, got an array of shape {start.shape}")
            return start.astype(np.int64)
        except Exception as error:
            raise _stage_error("sampling", item, error) from error

    def patch(
        self,
        item: Wanted,
        placed: Placed,
        forward: NDArray[np.float64],
        control_points: NDArray[np.float64] | None,
    ) -> Patch:
        """The patch that starts there, through this map."""
        resident, prepared = item.resident, item.resident.prepared
        start, size, drawn = placed.start, self.size_of(resident), placed.drawn
        maps: dict[bytes, Any] = {}
        reads = {}
        for key, array in resident.arrays.items():
            affine = resident.grids[key].affine
            if (name := affine.tobytes()) not in maps:
                try:
                    maps[name] = pull_back(prepared.reference, affine, forward, control_points, start.tolist(), size)
                except ValueError as error:
                    raise _stage_error("spatial transform", item, error) from error
            reads[key] = Read(Source(array, resident.scale[key], prepared.pads[key]), maps[name])
        parameters = {
            "affine": forward,
            "control_points": control_points,
            "drawn_voxel": None if drawn is None else drawn.voxel,
            "drawn_label": None if drawn is None else drawn.label,
        }
        return Patch(item, start, size, crop_affine(prepared.reference.affine, start), reads, parameters)


def assemble(patches: Sequence[Patch], tensors: Mapping[str, Tensor], return_parameters: bool) -> Batch:
    """The batch: the tensors, and what is known about each patch (on the CPU)."""
    batch: Batch = dict(tensors)
    batch["volume"] = [patch.wanted.resident.id for patch in patches]
    batch["start"] = torch.from_numpy(np.stack([patch.start for patch in patches]))
    batch["affine"] = torch.from_numpy(np.stack([patch.affine for patch in patches]))
    batch["epoch"] = patches[0].wanted.epoch
    batch["index"] = torch.tensor([patch.wanted.index for patch in patches])
    if return_parameters:
        batch["parameters"] = [patch.parameters for patch in patches]
    return batch


def run_stages(batch: Batch, stages: Sequence[Stage]) -> Batch:
    """Runs the user's stages in order; StageError names the stage and the patches of the batch."""
    volumes, index, epoch = batch["volume"], batch["index"].tolist(), batch["epoch"]  # a stage may drop them
    for stage in stages:
        name = stage_name(stage)
        try:
            batch = stage(batch)
            if not isinstance(batch, dict):
                raise TypeError(f"a stage must return the batch, a dict; {name} returned {type(batch).__name__}")
        except Exception as error:
            which = ", ".join(f"{volume!r} k={k}" for volume, k in zip(volumes, index))
            raise StageError(
                f"stage {name!r} failed in epoch {epoch} on a batch of the patches {which}: "
                f"{type(error).__name__}: {error}",
                stage=name,
                volume=volumes[0],
                epoch=epoch,
                index=index[0],
            ) from error
    return batch


def cast(batch: Batch, roles: Mapping[str, str], dtypes: Mapping[str, torch.dtype]) -> Batch:
    """Casts keys as `dtypes` (by key or role) asks, rounding and saturating towards integers.

    >>> cast({"image": torch.tensor([254.6, 300.0, -3.0])}, {"image": "image"}, {"image": torch.uint8})["image"]
    tensor([255, 255,   0], dtype=torch.uint8)
    """
    for key, role in roles.items():
        dtype = dtypes.get(key, dtypes.get(role))
        if dtype is None or not isinstance(batch.get(key), Tensor):
            continue
        values = batch[key]
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            values = values.round() if values.is_floating_point() else values
            values = values.clamp(limits.min, limits.max)
        batch[key] = values.to(dtype)
    return batch


def _stage_error(stage: str, item: Wanted, error: Exception) -> StageError:
    return StageError(
        f"{stage} failed for volume {item.resident.id!r}, epoch {item.epoch}, k={item.index}: "
        f"{type(error).__name__}: {error}",
        stage=stage,
        volume=item.resident.id,
        epoch=item.epoch,
        index=item.index,
    )
