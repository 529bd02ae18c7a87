"""GPUQueue: runs a command stream over volumes and patches. The one object a user holds.

Over 300 lines, since a third of them is the one signature that users read, with what each argument means.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch.utils.data import get_worker_info

from gpuqueue.arguments import (
    PatchCounts,
    Weights,
    axis_codes,
    devices,
    one_of,
    patches_of,
    place_among_ranks,
    three_spacings,
    weights_by_index,
    whole,
)
from gpuqueue.engine import Engine, PatchSource, Run
from gpuqueue.errors import QueueClosed
from gpuqueue.patches.batch import Batch, PatchMaker, split_augmentation
from gpuqueue.patches.gather.contract import BACKENDS
from gpuqueue.patches.prepare import Pad, Preparation, check_pad
from gpuqueue.patches.samplers import Sampler, UniformSampler, as_size
from gpuqueue.profiling.stats import Stats
from gpuqueue.replay import handful_batches, replay_patch, visit_of
from gpuqueue.sources import Volumes
from gpuqueue.state import VERSION, check_state, describe, digest
from gpuqueue.stream.commands import Command, to_text
from gpuqueue.stream.planner import Planner
from gpuqueue.volumes.volume import Volume, as_volume


class GPUQueue:
    """Batches of augmented patches from a DataLoader of volumes; iterate over it once per epoch.

    Args:
        loader: A dataset of volumes (`VolumeDataset`, a list of `Volume`, any map-style dataset of Volume or of dicts
            of arrays), a `volume_loader` of one, or a DataLoader of your own, whose order and sharding are kept.
        patch_size: Voxels of the reference grid; one number or three. None delivers each volume's whole reference grid;
            volumes of different shapes then need `batch_size=1`.
        patches_per_volume: One number, `{id: number}`, or a function of the id; 0 is never loaded. None: the sampler's
            own, as `GridSampler` has.
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
        volume_weights: `{id: weight}` or a function of the id: how often a volume is drawn relative to its patches; or
            (id -> group, {group: share}) for patients, sites or classes. An epoch keeps its number of patches.
        batches_per_epoch: Exactly this many batches per epoch (and rank).
        orientation, spacing: The grid patches are cut from: axes nearest to these codes ("RAS"), voxels of this size
            (mm; one number or three). Coarser spacing aliases, as in every resampling without a filter.
        pad: Per key or role, what lies outside: a number, "minimum" or "mean" of the volume's channel.
        label_interpolation: "nearest", or "vote": the label with the greatest summed trilinear weight among the eight
            neighbours, which is smoother and never a new value.
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
    (B, 3) int64 in the reference grid, `affine` (B, 4, 4) float64 of each patch's first voxel, `epoch`, and `index`
    (B,) the patch's number among its volume's in this epoch. It is the consumer's own and never changes.

    Raises:
        ValueError: Arguments that make no sense, with the remedy. Later, from `next()`: StageError, VolumeError,
            WorkerError, StreamError; see `gpuqueue.errors`.

    >>> import numpy as np
    >>> volumes = [Volume(n, {"image": np.full((8, 8, 8), n), "label": np.zeros((8, 8, 8), int)}) for n in range(3)]
    >>> queue = GPUQueue(volumes, patch_size=4, patches_per_volume=4, batch_size=6, device="cpu")
    >>> [tuple(batch["image"].shape) for batch in queue]
    [(6, 1, 4, 4, 4), (6, 1, 4, 4, 4)]
    """

    def __init__(
        self,
        loader: Any,
        patch_size: int | Sequence[int] | None,
        patches_per_volume: PatchCounts | None = 32,
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
        volume_weights: Weights | None = None,
        batches_per_epoch: int | None = None,
        orientation: str | None = None,
        spacing: float | Sequence[float] | None = None,
        pad: Mapping[str, Pad] | None = None,
        label_interpolation: Literal["nearest", "vote"] = "nearest",
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
        whole("volumes_in_memory", volumes_in_memory, 1)
        whole("batch_size", batch_size, 1)
        one_of("augment_per", augment_per, ("patch", "volume"))
        one_of("label_interpolation", label_interpolation, ("nearest", "vote"))
        one_of("on_small", on_small, ("pad", "raise"))
        one_of("backend", backend, BACKENDS)
        one_of("on_nonfinite", on_nonfinite, ("raise", "replace", "keep"))
        self.patch_sampler: Sampler = UniformSampler() if sampler is None else sampler
        size = None if patch_size is None else as_size(patch_size, "patch_size")
        augmentation = split_augmentation(augment)
        preparation = Preparation(
            size,
            self.patch_sampler,
            augmentation.elastic,
            axis_codes(orientation),
            three_spacings(spacing),
            check_pad(pad),
            on_small,
            on_nonfinite,
        )
        self._volumes = Volumes.of(loader, roles, preparation)
        self._lookahead = volumes_in_memory if lookahead == "group" else whole("lookahead", lookahead, 0)
        self._number_of: Callable[[Volume], int]
        if patches_per_volume is None:
            self._number_of = lambda volume: preparation.own_count(volume.grid())
            counts = self._volumes.own_counts(preparation)
        else:
            number_of = patches_of(patches_per_volume)
            self._number_of = lambda volume: number_of(volume.id)
            counts = self._volumes.counts(number_of)
        rank, world_size = (0, 1) if self._volumes.foreign else place_among_ranks(rank, world_size)
        self._planner = Planner(
            counts,
            volumes_in_memory,
            strategy,
            seed,
            batch_size,
            shuffle and not self._volumes.foreign,
            same_every_epoch,
            drop_last,
            batches_per_epoch,
            rank,
            world_size,
            uneven,
            weights_by_index(volume_weights, self._volumes.ids, counts),
        )
        self._planner.check()
        delivered, gathered = devices(device, augment_device)
        if patch_queue_size is None:
            patch_queue_size = 2 * batch_size if gathered.type == "cpu" else 0
        ahead = -(-whole("patch_queue_size", patch_queue_size, 0) // batch_size)
        maker = PatchMaker(
            size, self.patch_sampler, augmentation, seed, augment_per, label_interpolation, same_every_epoch, backend
        )
        self._source = PatchSource(
            maker, batch_size, drop_last, dict(dtypes or {}), gathered, delivered, ahead, return_parameters
        )
        self._epoch, self._batches_before = 0, 0
        self._seen: Counter[str] = Counter()
        self._fixed_epoch: int | None = None
        self._run: Run | None = None
        self._engine: Engine | None = None
        self._closed = False

    def __len__(self) -> int:
        """Batches of every epoch on this rank. TypeError for a stream from a generator."""
        return self._planner.num_batches()

    def __iter__(self) -> Iterator[Batch]:
        """The next epoch's batches. Ends an iterator that is still under way."""
        _refuse_worker()
        engine = self._start()
        epoch, before = self._epoch, self._batches_before
        self._epoch, self._batches_before = epoch + 1, 0
        self._run = engine.begin(epoch, before)
        return self._batches(self._run)

    def _batches(self, run: Run) -> Iterator[Batch]:
        try:
            yield from run
        finally:
            run.close()  # also after a break

    def set_epoch(self, epoch: int) -> None:
        """The next `iter(queue)` is this epoch, from its first batch, or from where a loaded state of it stopped."""
        if epoch != self._epoch:
            self._batches_before = 0
        self._epoch = self._fixed_epoch = whole("epoch", epoch, 0)
        self._run = None

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is: small, JSON-able, the same on every rank; not what was prefetched.

        Raises ValueError where the stream cannot be found again: a DataLoader of your own, a generator.
        """
        self._check_resumable()
        epoch, batches = self._epoch, self._batches_before
        if self._run is not None:
            epoch, batches = self._run.position
        return {"version": VERSION, "epoch": epoch, "batches": batches, "settings": self._describe()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter(queue)` goes on with the very next batch; only the volumes resident then are read again.

        Raises ValueError naming each setting that would change the patches; workers, lookahead, devices and backend
        may differ.
        """
        self._check_resumable()
        self._epoch, self._batches_before = check_state(state, self._describe())
        if self._batches_before >= len(self):
            self._epoch, self._batches_before = self._epoch + 1, 0
        self._run = None

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
        settings = dataclasses.replace(self._volumes.settings, ids=None)
        items = [as_volume(item, str(place), settings.roles, True) for place, item in enumerate(given)]
        by_epoch: dict[int, list[Volume]] = {}
        for volume in items:
            epoch = self._seen[volume.id] if self._fixed_epoch is None else self._fixed_epoch
            self._seen[volume.id] += 1
            by_epoch.setdefault(epoch, []).append(volume)
        for epoch, together in by_epoch.items():
            numbers = [self._number_of(volume) for volume in together]
            yield from handful_batches(together, numbers, epoch, self._planner, self._source, settings)

    def replay(self, volume_id: str, epoch: int, index: int) -> Batch:
        """Reads the volume again and makes its `index`-th (k) patch of `epoch`, as a batch of one.

        Raises ValueError for an unknown id, or where the volumes come from a DataLoader of your own.
        """
        place = self._volumes.place(volume_id)
        by_volume = self._source.maker.augment_per == "volume"
        visit = visit_of(self._planner, epoch, place, index) if by_volume else 0
        source = dataclasses.replace(self._source, batch_size=1, drop_last=False)
        return replay_patch(self._volumes.dataset[place], epoch, index, visit, source, self._volumes.only(place))

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
            inline = self._volumes.workers == 0 and self._source.batches_ahead == 0
            endless = not self._volumes.foreign and not self._planner.once
            self._engine = Engine(
                self._planner,
                self._source,
                self._volumes.reader(self._planner.seed),
                self._lookahead,
                endless,
                background=not inline,
            )
            weakref.finalize(self, self._engine.close)
        return self._engine

    def _check_resumable(self) -> None:
        if self._volumes.foreign:
            raise ValueError(
                "a DataLoader of your own gives volumes in an order of its own, so a position in it cannot be found "
                "again; give the queue gpuqueue.volume_loader(dataset) to resume"
            )
        if self._planner.once:
            raise ValueError("a stream from a generator cannot be resumed; give a callable or a list")

    def _describe(self) -> dict[str, Any]:
        """Everything that decides which patches come in which order on which rank."""
        maker, planner, preparation = self._source.maker, self._planner, self._volumes.settings.prepare
        assert isinstance(preparation, Preparation)
        strategy = (
            planner.strategy
            if callable(planner.strategy) or isinstance(planner.strategy, str)
            else to_text(planner.strategy)
        )
        augmentation = maker.augmentation
        return {
            "ids": digest(self._volumes.ids),
            "patches_per_volume": digest(planner.counts),
            "volume_weights": digest(planner.weights or []),
            "sampler": describe(maker.sampler),
            "augment": describe([*augmentation.spatial, augmentation.elastic, *augmentation.stages]),
            "strategy": describe(strategy),
        } | {
            name: describe(getattr(holder, name))
            for holder, names in (
                (
                    planner,
                    (
                        "seed",
                        "capacity",
                        "batch_size",
                        "shuffle",
                        "same_every_epoch",
                        "drop_last",
                        "batches_per_epoch",
                        "world_size",
                        "uneven",
                    ),
                ),
                (preparation, ("patch_size", "orientation", "spacing")),
                (maker, ("augment_per", "label_interpolation")),
            )
            for name in names
        }


class _Lightning:
    def __init__(self, queue: GPUQueue) -> None:
        self.sampler = queue


def _refuse() -> NoReturn:
    raise ValueError(
        "a GPUQueue is a loader itself and cannot go into a DataLoader or another process: write "
        "`for batch in queue: ...`; num_workers belongs to the volumes, gpuqueue.volume_loader(dataset, num_workers=4)"
    )


def _refuse_worker() -> None:
    if get_worker_info() is not None:
        _refuse()
