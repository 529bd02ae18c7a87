"""GPUQueue: runs a command stream over volumes and patches. The one object a user holds."""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, get_worker_info

from gpuqueue.engine import Engine, PatchSource, Run
from gpuqueue.errors import QueueClosed
from gpuqueue.patches.batch import Batch, PatchMaker, split_augmentation
from gpuqueue.patches.prepare import Pad, Preparation, check_pad
from gpuqueue.patches.samplers import Sampler, UniformSampler, as_size
from gpuqueue.profiling.stats import Stats
from gpuqueue.replay import handful_batches, replay_patch, visit_of
from gpuqueue.stream.commands import Command
from gpuqueue.stream.planner import Planner
from gpuqueue.volumes.loader import (
    ForeignReader,
    Order,
    Reader,
    ReadSettings,
    as_list,
    count_volumes,
    volume_loader,
)
from gpuqueue.volumes.feed import VolumeReader
from gpuqueue.volumes.volume import Volume, as_volume

_HEADERS_CHECKED = 256  # volumes of a path dataset whose headers are looked at before the first load


class GPUQueue:
    """Batches of augmented patches from a DataLoader of volumes; iterate over it once per epoch.

    Args:
        loader: A dataset of volumes (`VolumeDataset`, a list of `Volume`, any map-style dataset of Volume or of dicts of
            arrays), a `volume_loader` of one, or a DataLoader of your own, whose order and sharding are kept.
        patch_size: Voxels of the reference grid; one number or three.
        patches_per_volume: One number, `{id: number}`, or a function of the id; 0 is never loaded.
        volumes_in_memory: How many volumes the stream may hold at once.
        lookahead: Volumes that may be loaded before the stream asks for them; "group" is `volumes_in_memory`.
        batch_size, drop_last: As in a DataLoader; the last batch of an epoch is short, or left out.
        patch_queue_size: Patches gathered ahead in a background thread; None is two batches when gathering on the CPU
            and 0 on CUDA. With 0 and `num_workers=0` everything runs in the caller's thread.
        sampler: Where patches start; default `UniformSampler()`.
        augment: Spatial transforms (composed in order), then at most one elastic, then any functions batch -> batch.
        augment_per: "patch", or "volume": one draw of the transforms for each load.
        strategy: "sliding", "basic", "sequential", "merge_incomplete" ..., a callable (counts, capacity, rng) ->
            commands, a list of commands, their text, or a generator (which runs once).
        shuffle: Volumes in another order every epoch; with False in the dataset's. Patches are mixed by the strategy.
        same_every_epoch: Every epoch draws as epoch 0 does: for validation.
        batches_per_epoch: Exactly this many batches per epoch (and rank).
        orientation, spacing: The grid patches are cut from: axes nearest to these codes ("RAS"), voxels of this size
            (mm; one number or three). Coarser spacing aliases, as in every resampling without a filter.
        pad: Per key or role, what lies outside: a number, "minimum" or "mean" of the volume's channel.
        on_small: "pad" or "raise", when a patch is larger than its volume.
        dtypes: Per key or role, the dtype of delivered tensors; rounding and saturating towards integers.
        device: Where batches are delivered; "auto" is the current CUDA device, else the CPU.
        augment_device: Where volumes stay and patches are gathered; default `device`.
        backend: The gather's: "auto", "torch" or "numba".
        seed: The one seed of order, mixing, positions and augmentation.
        rank, world_size: Default: of torch.distributed, else RANK and WORLD_SIZE, else one.
        uneven: "pad", "drop" or "error", when ranks cannot share the patches evenly.
        roles: `{key: role}` for dicts of arrays; see `Volume`.
        on_nonfinite: "raise", "replace" (NaN by 0, infinities by the extreme finite values) or "keep".
        return_parameters: Adds `parameters`, a list of dicts, to each batch.

    A batch is a dict: each key `(B, C, *patch_size)` (images and maps float32, labels int64), `volume` (ids), `start`
    (B, 3) int64 in the reference grid, `affine` (B, 4, 4) float64 of each patch's first voxel, `epoch`, and `index` (B,)
    the patch's number among its volume's in this epoch. It is the consumer's own and never changes.

    Raises:
        ValueError: Arguments that make no sense, with the remedy. Later, from `next()`: StageError, VolumeError,
            WorkerError, StreamError; see `gpuqueue.errors`.

    >>> volumes = [Volume(n, {"image": np.full((8, 8, 8), n), "label": np.zeros((8, 8, 8), int)}) for n in range(3)]
    >>> queue = GPUQueue(volumes, patch_size=4, patches_per_volume=4, batch_size=6, device="cpu")
    >>> [tuple(batch["image"].shape) for batch in queue]
    [(6, 1, 4, 4, 4), (6, 1, 4, 4, 4)]
    """

    def __init__(
        self,
        loader: Any,
        patch_size: int | Sequence[int],
        patches_per_volume: int | Mapping[str, int] | Callable[[str], int] = 32,
        *,
        volumes_in_memory: int = 8,
        lookahead: int | str = 1,
        batch_size: int = 8,
        drop_last: bool = False,
        patch_queue_size: int | None = None,
        sampler: Sampler | None = None,
        augment: Sequence[Any] = (),
        augment_per: str = "patch",
        strategy: Any = "sliding",
        shuffle: bool = True,
        same_every_epoch: bool = False,
        batches_per_epoch: int | None = None,
        orientation: str | None = None,
        spacing: float | Sequence[float] | None = None,
        pad: Mapping[str, Pad] | None = None,
        on_small: str = "pad",
        dtypes: Mapping[str, torch.dtype] | None = None,
        device: str | torch.device = "auto",
        augment_device: str | torch.device | None = None,
        backend: str = "auto",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: str = "pad",
        roles: Mapping[str, str] | None = None,
        on_nonfinite: str = "raise",
        return_parameters: bool = False,
    ) -> None:
        _refuse_worker()
        for name, number in (("volumes_in_memory", volumes_in_memory), ("batch_size", batch_size)):
            _whole(name, number, 1)
        if lookahead == "group":
            lookahead = volumes_in_memory
        lookahead = _whole("lookahead", lookahead, 0)
        _one_of("augment_per", augment_per, ("patch", "volume"))
        _one_of("on_small", on_small, ("pad", "raise"))
        _one_of("backend", backend, ("auto", "torch", "numba"))
        _one_of("on_nonfinite", on_nonfinite, ("raise", "replace", "keep"))
        self.patch_sampler: Sampler = UniformSampler() if sampler is None else sampler
        size = as_size(patch_size, "patch_size")
        augmentation = split_augmentation(augment)
        self._preparation = Preparation(
            size, self.patch_sampler, augmentation.elastic, _codes(orientation), _spacing(spacing), check_pad(pad),
            on_small, on_nonfinite,
        )
        foreign = isinstance(loader, DataLoader) and loader.collate_fn is not as_list
        foreign = foreign or not (hasattr(loader, "__getitem__") or isinstance(loader, DataLoader))
        self._loader = loader if foreign or isinstance(loader, DataLoader) else volume_loader(loader)
        known = None if foreign else _known_ids(self._loader.dataset)
        self._ids = None if foreign else known or [str(place) for place in range(len(self._loader.dataset))]
        self._settings = ReadSettings(known, roles, True, self._preparation)
        self._at_hand = ReadSettings(None, roles, True, self._preparation)
        self._patches_of = _patches_of(patches_per_volume)
        if not foreign:
            self._preflight(self._loader.dataset)
        delivered, gathered = _devices(device, augment_device)
        rank, world_size = _place(rank, world_size)
        self._planner = Planner(
            counts=self._counts(),
            capacity=volumes_in_memory, strategy=strategy, seed=seed, batch_size=batch_size,
            shuffle=shuffle and not foreign, same_every_epoch=same_every_epoch, drop_last=drop_last,
            batches_per_epoch=batches_per_epoch, rank=0 if foreign else rank,
            world_size=1 if foreign else world_size, uneven=uneven,
        )
        if not self._planner.once:
            self._planner.num_batches()  # the counts, ranks and stream make sense
        ahead = patch_queue_size
        if ahead is None:
            ahead = 2 * batch_size if gathered.type == "cpu" else 0
        ahead = -(-_whole("patch_queue_size", ahead, 0) // batch_size)
        maker = PatchMaker(size, self.patch_sampler, augmentation, seed, augment_per, same_every_epoch, backend)
        self._source = PatchSource(
            maker, batch_size, drop_last, dict(dtypes or {}), gathered, delivered, ahead, return_parameters
        )
        self._workers = getattr(self._loader, "num_workers", 0)
        self._foreign, self._lookahead = foreign, lookahead
        self._epoch = 0
        self._seen: Counter[str] = Counter()
        self._fixed_epoch: int | None = None
        self._engine: Engine | None = None
        self._closed = False

    def __len__(self) -> int:
        """Batches of every epoch on this rank. TypeError for a stream from a generator."""
        return self._planner.num_batches()

    def __iter__(self) -> Iterator[Batch]:
        """The next epoch's batches. Ends an iterator that is still under way."""
        _refuse_worker()
        engine = self._start()
        epoch, self._epoch = self._epoch, self._epoch + 1
        return self._batches(engine.begin(epoch))

    def _batches(self, run: Run) -> Iterator[Batch]:
        try:
            yield from run
        finally:
            run.close()  # also after a break

    def set_epoch(self, epoch: int) -> None:
        """The next `iter(queue)` is this epoch."""
        self._epoch = self._fixed_epoch = _whole("epoch", epoch, 0)

    def stream(self, epoch: int = 0) -> list[Command]:
        """The commands of an epoch. ValueError for a generator, which can run only once."""
        if self._planner.once:
            raise ValueError("the strategy is a generator, which runs once: its stream cannot be shown beforehand")
        return list(self._planner.commands(epoch))

    def patches(self, volumes: Iterable[Any]) -> Iterator[Batch]:
        """Batches from a handful of volumes, as a `volume_loader` or plain DataLoader gives them.

        All of them are resident together and their patches mixed; each volume's epoch is how often its id came before,
        unless `set_epoch` was called. A batch never mixes epochs.
        """
        given = volumes if isinstance(volumes, (list, tuple)) else [volumes]
        items = [as_volume(item, str(place), self._settings.roles, True) for place, item in enumerate(given)]
        by_epoch: dict[int, list[Volume]] = {}
        for volume in items:
            epoch = self._seen[volume.id] if self._fixed_epoch is None else self._fixed_epoch
            self._seen[volume.id] += 1
            by_epoch.setdefault(epoch, []).append(volume)
        for epoch, together in by_epoch.items():
            numbers = [self._patches_of(volume.id) for volume in together]
            yield from handful_batches(together, numbers, epoch, self._planner, self._source, self._at_hand)

    def replay(self, volume_id: str, epoch: int, index: int) -> Batch:
        """Reads the volume again and makes its `index`-th (k) patch of `epoch`, as a batch of one.

        Raises ValueError for an unknown id, or where the volumes come from a DataLoader of your own.
        """
        if self._ids is None:
            raise ValueError("replay needs a dataset: a DataLoader of your own cannot be asked for one volume")
        if volume_id not in self._ids:
            raise ValueError(f"no volume has the id {volume_id!r}; ids look like {list(self._ids)[:3]}")
        place = list(self._ids).index(volume_id)
        by_volume = self._source.maker.augment_per == "volume"
        visit = visit_of(self._planner, epoch, place, index) if by_volume else 0
        source = dataclasses.replace(self._source, batch_size=1, drop_last=False)
        settings = dataclasses.replace(self._settings, ids=None if self._settings.ids is None else [volume_id])
        return replay_patch(self._loader.dataset[place], epoch, index, visit, source, settings)

    def stats(self) -> Stats:
        """What was delivered, loaded and waited for so far."""
        return Stats() if self._engine is None else self._engine.stats()

    def close(self) -> None:
        """Ends threads and workers and frees all memory. Idempotent; the queue cannot be used afterwards."""
        self._closed = True
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> GPUQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def batch_sampler(self) -> Any:
        """For PyTorch Lightning, which looks for `batch_sampler.sampler.set_epoch`."""
        return _Lightning(self)

    def __getitem__(self, index: object) -> NoReturn:
        _refuse()

    def __getstate__(self) -> NoReturn:
        _refuse()

    def _start(self) -> Engine:
        if self._closed:
            raise QueueClosed("the queue is closed; make a new one")
        if self._engine is None:
            inline = self._workers == 0 and self._source.batches_ahead == 0
            self._engine = Engine(
                self._planner, self._source, self._make_reader, self._lookahead,
                endless=not self._foreign and not self._planner.once, background=not inline,
            )
            weakref.finalize(self, self._engine.close)
        return self._engine

    def _counts(self) -> list[int]:
        """Patches of each volume of an epoch."""
        if self._ids is not None:
            return [self._patches_of(volume_id) for volume_id in self._ids]
        try:
            one = self._patches_of("")
        except ValueError:
            raise ValueError(
                "patches_per_volume must be one number where the volumes come from a DataLoader of your own"
            ) from None
        return [one] * count_volumes(self._loader)

    @property
    def _make_reader(self) -> Callable[[Order], VolumeReader]:
        loader, settings, seed = self._loader, self._settings, self._planner.seed  # not self: threads would keep it
        if self._foreign:
            return lambda order: ForeignReader(loader, settings, order)
        return lambda order: Reader(loader, settings, order, seed)

    def _preflight(self, dataset: Any) -> None:
        """Finds before any worker starts what can be known by then: sizes and layouts of volumes in memory, headers."""
        if isinstance(dataset, (list, tuple)):
            first: Volume | None = None
            for volume in (item for item in dataset if isinstance(item, Volume)):
                self._preparation.check_grid(self._preparation.reference_grid(volume.grid()), volume.id)
                first = first or volume
                if (mine := _layout(volume)) != _layout(first):
                    raise ValueError(
                        f"volume {volume.id!r} has {mine} (key: role, channels), but volume {first.id!r} has "
                        f"{_layout(first)}; all volumes of a queue need the same keys, roles and channels"
                    )
        elif hasattr(dataset, "reference_grid") and self._preparation.needs_grid:
            for index in range(min(len(dataset), _HEADERS_CHECKED)):
                if (grid := dataset.reference_grid(index)) is not None:
                    assert self._ids is not None
                    self._preparation.check_grid(self._preparation.reference_grid(grid), self._ids[index])


class _Lightning:
    def __init__(self, queue: GPUQueue) -> None:
        self.sampler = queue


def _layout(volume: Volume) -> dict[str, tuple[str, int]]:
    return {key: (volume.roles[key], len(array)) for key, array in volume.arrays.items()}


def _refuse() -> NoReturn:
    raise ValueError(
        "a GPUQueue is a loader itself and cannot go into a DataLoader or another process: write "
        "`for batch in queue: ...`; num_workers belongs to the volumes, gpuqueue.volume_loader(dataset, num_workers=4)"
    )


def _refuse_worker() -> None:
    if get_worker_info() is not None:
        _refuse()


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of {least} or more")
    return int(value)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: take {' or '.join(map(repr, allowed))}")


def _codes(orientation: str | None) -> str | None:
    if orientation is None:
        return None
    codes = orientation.upper() if isinstance(orientation, str) else ""
    if len(codes) != 3 or {frozenset("LR"), frozenset("PA"), frozenset("IS")} != {
        frozenset(pair) for pair in ("LR", "PA", "IS") if set(pair) & set(codes)
    } or not set(codes) <= set("LRPAIS"):
        raise ValueError(f"orientation={orientation!r}: three letters, one each of L/R, P/A and I/S, such as 'RAS'")
    return codes


def _spacing(spacing: float | Sequence[float] | None) -> tuple[float, float, float] | None:
    if spacing is None:
        return None
    values = np.broadcast_to(np.asarray(spacing, np.float64), 3) if np.size(spacing) in (1, 3) else np.zeros(3)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"spacing={spacing!r}: a positive number of mm, or three")
    return float(values[0]), float(values[1]), float(values[2])


def _devices(device: str | torch.device, augment_device: str | torch.device | None) -> tuple[torch.device, torch.device]:
    def resolve(name: str | torch.device) -> torch.device:
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        found = torch.device(name)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device {name!r}: CUDA is not available here; take 'cpu' or 'auto'")
        return torch.device("cuda", torch.cuda.current_device()) if found.type == "cuda" and found.index is None else found

    delivered = resolve(device)
    return delivered, delivered if augment_device is None else resolve(augment_device)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, of torch.distributed, of torchrun's environment, or one."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank!r} and world_size={world_size!r}: give both or none")
    if rank is not None and world_size is not None:
        return rank, world_size
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _known_ids(dataset: Any) -> list[str] | None:
    """The ids of a dataset's volumes, in order; None where only reading tells. ValueError for one that repeats."""
    ids = _own_ids(dataset)
    if ids is not None and len(set(ids)) < len(ids):
        twice = next(volume_id for volume_id, times in Counter(ids).items() if times > 1)
        raise ValueError(f"the id {twice!r} occurs twice; ids must be unique in a dataset")
    return ids


def _own_ids(dataset: Any) -> list[str] | None:
    if isinstance(dataset, Subset):
        inner = _own_ids(dataset.dataset)
        return None if inner is None else [inner[place] for place in dataset.indices]
    if hasattr(dataset, "ids"):
        return [str(volume_id) for volume_id in dataset.ids]
    if isinstance(dataset, (list, tuple)):
        return [
            item.id if isinstance(item, Volume) else str(item.get("id", place) if isinstance(item, Mapping) else place)
            for place, item in enumerate(dataset)
        ]
    return None


def _patches_of(patches: int | Mapping[str, int] | Callable[[str], int]) -> Callable[[str], int]:
    """The number of patches of a volume, by its id."""

    def of(volume_id: str) -> int:
        if callable(patches):
            return _whole(f"patches_per_volume({volume_id!r})", patches(volume_id), 0)
        if not isinstance(patches, Mapping):
            return _whole("patches_per_volume", patches, 0)
        given = {str(key): number for key, number in patches.items()}
        if volume_id not in given:
            raise ValueError(f"patches_per_volume has no number for volume {volume_id!r}")
        return _whole(f"patches_per_volume[{volume_id!r}]", given[volume_id], 0)

    return of
