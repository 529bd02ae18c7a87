"""Several samplers, each for its share of the patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpuqueue.patches.gather.contract import Size
from gpuqueue.patches.samplers.protocol import DrawnVoxel, Prepared, Sampler, own_count
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid
from gpuqueue.volumes.volume import Volume


class MixedSampler:
    """Draws from several samplers in the shares given.

    Args:
        parts: (sampler, share) each; shares are relative. Instead of a share, "once" lets a sampler with a count of its
            own, such as GridSampler, give each of its patches first: the volume's patches k = 0, 1, ... are its.

    Raises:
        ValueError: Nothing to draw from, or shares that are no shares.

    >>> from gpuqueue.patches.samplers import GridSampler, UniformSampler
    >>> mixed = MixedSampler([(GridSampler(), "once"), (UniformSampler(), 1)])  # the grid once, the rest random
    """

    def __init__(self, parts: Sequence[tuple[Sampler, float | str]]) -> None:
        self.once = [sampler for sampler, share in parts if share == "once"]
        shared = [(sampler, share) for sampler, share in parts if share != "once"]
        for _, share in shared:
            if isinstance(share, str) or not (np.isfinite(share) and share > 0):
                raise ValueError(f"MixedSampler: a share is a number above 0, or 'once', got {share!r}")
        if not shared:
            raise ValueError("MixedSampler: give at least one (sampler, share) with a number for its share")
        self.samplers = [sampler for sampler, _ in shared]
        self.ends = (np.cumsum([float(share) for _, share in shared]) / sum(float(s) for _, s in shared)).tolist()

    def prepare(self, volume: Volume) -> Prepared:
        """All parts' arrays, each under its number; what classes are missing, by the parts' shares."""
        prepared: dict[str, NDArray[Any]] = {}
        missing: list[NDArray[np.float64]] = [np.empty((0, 2))]
        shares = [0.0] * len(self.once) + np.diff(self.ends, prepend=0.0).tolist()
        for number, (sampler, share) in enumerate(zip([*self.once, *self.samplers], shares)):
            for name, array in sampler.prepare(volume).items():
                if name == "missing":
                    missing.append(np.asarray(array) * (1, share))
                else:
                    prepared[name if name == "warning" else f"{number}:{name}"] = array
        return prepared | {"missing": np.concatenate(missing)}

    def draw(self, prepared: Prepared, grid: Grid, patch_size: Size, random: Random) -> ArrayLike | DrawnVoxel:
        """What the part whose turn it is draws."""
        left = getattr(random, "index", 0)
        for number, sampler in enumerate(self.once):
            count = own_count(sampler, grid, patch_size)
            if left < count:
                return sampler.draw(_part(prepared, number), grid, patch_size, random)
            left -= count
        number = min(int(np.searchsorted(self.ends, random.uniform(), side="right")), len(self.ends) - 1)
        return self.samplers[number].draw(_part(prepared, len(self.once) + number), grid, patch_size, random)


def _part(prepared: Prepared, number: int) -> Prepared:
    prefix = f"{number}:"
    return {name.removeprefix(prefix): array for name, array in prepared.items() if name.startswith(prefix)}
