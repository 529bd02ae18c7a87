"""Where a queue's volumes come from: a dataset that it reads in stream order, or somebody's own DataLoader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from gpuqueue.arguments import known_ids
from gpuqueue.patches.prepare import Preparation
from gpuqueue.volumes.feed import VolumeReader
from gpuqueue.volumes.foreign import ForeignReader, count_volumes
from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.loader import Order, Reader, ReadSettings, as_list, volume_loader
from gpuqueue.volumes.volume import Volume

_HEADERS_CHECKED = 256  # volumes of a path dataset whose headers are looked at before the first load


@dataclass(frozen=True, eq=False)
class Volumes:
    """A loader and how its items become volumes. `foreign`: it keeps its own order, and ids are known on reading."""

    loader: Any
    foreign: bool
    settings: ReadSettings
    ids: list[str]

    @classmethod
    def of(cls, loader: Any, roles: Mapping[str, str] | None, preparation: Preparation) -> Volumes:
        """What was given to the queue, checked as far as can be known before a worker starts. Raises ValueError."""
        is_loader = isinstance(loader, DataLoader)
        if not is_loader and not hasattr(loader, "__getitem__") and not hasattr(loader, "__iter__"):
            raise ValueError(
                f"expected a dataset, a list of Volume, or a DataLoader of volumes, got {type(loader).__name__}"
            )
        if (is_loader and loader.collate_fn is not as_list) or not (is_loader or hasattr(loader, "__getitem__")):
            return cls(loader, True, ReadSettings(None, roles, True, preparation), [])
        loader = loader if is_loader else volume_loader(loader)
        ids = known_ids(loader.dataset)
        _check_early(loader.dataset, ids, preparation)
        settings = ReadSettings(ids, roles, True, preparation)
        return cls(loader, False, settings, ids or [str(place) for place in range(len(loader.dataset))])

    @property
    def dataset(self) -> Any:
        """The map-style dataset; not of a foreign loader."""
        return self.loader.dataset

    @property
    def workers(self) -> int:
        """Reader processes."""
        return int(getattr(self.loader, "num_workers", 0))

    def counts(self, patches_of: Callable[[str], int]) -> list[int]:
        """Patches of each volume of an epoch."""
        if not self.foreign:
            return [patches_of(volume_id) for volume_id in self.ids]
        try:
            one = patches_of("")
        except (ValueError, KeyError):
            raise ValueError(
                "patches_per_volume must be one number where the volumes come from a DataLoader of your own"
            ) from None
        return [one] * count_volumes(self.loader)

    def own_counts(self, preparation: Preparation) -> list[int]:
        """The sampler's own number of patches of each volume, from volumes in memory or from headers."""
        if self.foreign:
            raise ValueError("patches_per_volume=None needs a dataset: the volumes of a DataLoader of your own are not "
                             "known beforehand; give one number")  # fmt: skip
        return [preparation.own_count(self._grid(place)) for place in range(len(self.ids))]

    def _grid(self, place: int) -> Grid:
        """The reference grid of a volume before it is read."""
        grid: Grid | None = None
        if isinstance(self.dataset, (list, tuple)) and isinstance(self.dataset[place], Volume):
            grid = self.dataset[place].grid()
        elif hasattr(self.dataset, "reference_grid"):
            grid = self.dataset.reference_grid(place)
        if grid is None:
            raise ValueError(
                f"patches_per_volume=None: the shape of volume {self.ids[place]!r} is not known before it is read, as "
                "for a list of Volume and a VolumeDataset without transform; say how many, {id: number}"
            )
        return grid

    def place(self, volume_id: str) -> int:
        """The volume's place in the dataset; ValueError for an unknown id or a foreign loader."""
        if self.foreign:
            raise ValueError("this needs a dataset: a DataLoader of your own cannot be asked for one volume")
        if volume_id not in self.ids:
            raise ValueError(f"no volume has the id {volume_id!r}; ids look like {self.ids[:3]}")
        return self.ids.index(volume_id)

    def only(self, place: int) -> ReadSettings:
        """The settings for reading one volume by itself."""
        ids = None if self.settings.ids is None else [self.ids[place]]
        return dataclasses.replace(self.settings, ids=ids)

    def reader(self, seed: int) -> Callable[[Order], VolumeReader]:
        """Makes the reader of an order; holds no reference to the queue, which may be dropped."""
        loader, settings = self.loader, self.settings
        if self.foreign:
            return lambda order: ForeignReader(loader, settings, order)
        return lambda order: Reader(loader, settings, order, seed)


def _check_early(dataset: Any, ids: list[str] | None, preparation: Preparation) -> None:
    """Sizes and layouts of volumes in memory, headers of files: what can be known before a worker starts."""
    if isinstance(dataset, (list, tuple)):
        first: Volume | None = None
        for volume in (item for item in dataset if isinstance(item, Volume)):
            preparation.check_grid(preparation.reference_grid(volume.grid()), volume.id)
            first = first or volume
            if volume.layout != first.layout:
                raise ValueError(
                    f"volume {volume.id!r} has {volume.layout} (key: role, channels), but volume {first.id!r} has "
                    f"{first.layout}; all volumes of a queue need the same keys, roles and channels"
                )
    elif hasattr(dataset, "reference_grid") and preparation.needs_grid and ids is not None:
        for index in range(min(len(dataset), _HEADERS_CHECKED)):
            if (grid := dataset.reference_grid(index)) is not None:
                preparation.check_grid(preparation.reference_grid(grid), ids[index])
