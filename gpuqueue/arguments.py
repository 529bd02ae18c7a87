"""What the queue's arguments mean, and the refusals of those that mean nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from gpuqueue.volumes.volume import Volume

PatchCounts = int | Mapping[str, int] | Callable[[str], int]
Weights = Mapping[str, float] | Callable[[str], float] | tuple[Callable[[str], str], Mapping[str, float]]


def whole(name: str, value: Any, least: int) -> int:
    """The value as an int of at least `least`; ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of {least} or more")
    return int(value)


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: take {' or '.join(map(repr, allowed))}")


def axis_codes(orientation: str | None) -> str | None:
    """Three letters such as "RAS", upper case; ValueError for what names no orientation.

    >>> axis_codes("las")
    'LAS'
    """
    if orientation is None:
        return None
    codes = orientation.upper() if isinstance(orientation, str) else ""
    if len(codes) != 3 or any(sum(code in pair for code in codes) != 1 for pair in ("LR", "PA", "IS")):
        raise ValueError(f"orientation={orientation!r}: three letters, one each of L/R, P/A and I/S, such as 'RAS'")
    return codes


def three_spacings(spacing: float | Sequence[float] | None) -> tuple[float, float, float] | None:
    """Voxel sizes in mm; ValueError unless one or three positive numbers."""
    if spacing is None:
        return None
    values = np.broadcast_to(np.asarray(spacing, np.float64), 3) if np.size(spacing) in (1, 3) else np.zeros(3)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError(f"spacing={spacing!r}: a positive number of mm, or three")
    return float(values[0]), float(values[1]), float(values[2])


def devices(device: str | torch.device, augment_device: str | torch.device | None) -> tuple[torch.device, torch.device]:
    """Where batches are delivered, and where volumes stay; ValueError for CUDA where there is none."""

    def resolve(name: str | torch.device) -> torch.device:
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            found = torch.device(name)
        except RuntimeError:
            raise ValueError(f"device {name!r} is unknown; take 'auto', 'cpu', 'cuda' or 'cuda:1'") from None
        if found.type != "cuda":
            return found
        if not torch.cuda.is_available():
            raise ValueError(f"device {name!r}: CUDA is not available here; take 'cpu' or 'auto'")
        return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())

    delivered = resolve(device)
    return delivered, delivered if augment_device is None else resolve(augment_device)


def place_among_ranks(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and world size: as given, else of torch.distributed, else of torchrun's environment, else one."""
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank={rank!r} and world_size={world_size!r}: give both or none")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must be from 0 to world_size - 1, and world_size is {world_size}")
    return rank, world_size


def known_ids(dataset: Any) -> list[str] | None:
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


def patches_of(patches: PatchCounts) -> Callable[[str], int]:
    """The number of patches of a volume, by its id."""
    given = {str(key): number for key, number in patches.items()} if isinstance(patches, Mapping) else {}

    def of(volume_id: str) -> int:
        if callable(patches):
            return whole(f"patches_per_volume({volume_id!r})", patches(volume_id), 0)
        if not isinstance(patches, Mapping):
            return whole("patches_per_volume", patches, 0)
        if volume_id not in given:
            raise ValueError(f"patches_per_volume has no number for volume {volume_id!r}")
        return whole(f"patches_per_volume[{volume_id!r}]", given[volume_id], 0)

    return of


def weights_by_index(weights: Weights | None, ids: Sequence[str], counts: Sequence[int]) -> list[float] | None:
    """A factor for each volume's share of an epoch's patches. ValueError for an id or group without a weight.

    `weights` is `{id: weight}` or a function of the id; or, by group, (a function from id to group, {group: weight}):
    then a group's weight is its share, however many volumes it has.

    >>> weights_by_index((lambda v: v[0], {"a": 1, "b": 1}), ["a1", "a2", "b1"], [4, 4, 4])
    [0.125, 0.125, 0.25]
    """
    if weights is None:
        return None
    if isinstance(weights, tuple):
        group_of, shares = weights
        groups = [group_of(volume_id) for volume_id in ids]
        if missing := [group for group in groups if group not in shares]:
            raise ValueError(f"volume_weights has no weight for the group {missing[0]!r}")
        sizes: Counter[str] = Counter()
        for group, count in zip(groups, counts):
            sizes[group] += count
        return [shares[group] / max(sizes[group], 1) for group in groups]
    if callable(weights):
        return [float(weights(volume_id)) for volume_id in ids]
    given = {str(key): float(weight) for key, weight in weights.items()}
    if missing := [volume_id for volume_id in ids if volume_id not in given]:
        raise ValueError(f"volume_weights has no weight for volume {missing[0]!r} ({len(missing)} are missing)")
    return [given[volume_id] for volume_id in ids]
