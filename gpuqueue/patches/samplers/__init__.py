"""Where patches start: one file for each sampler, and `protocol.py` for what all of them are."""

from gpuqueue.patches.samplers.grid import GridSampler
from gpuqueue.patches.samplers.label import LabelSampler
from gpuqueue.patches.samplers.mixed import MixedSampler
from gpuqueue.patches.samplers.protocol import DrawnVoxel, PatchRandom, Sampler, as_size, clamped_start, own_count
from gpuqueue.patches.samplers.uniform import UniformSampler
from gpuqueue.patches.samplers.weighted import WeightedSampler

__all__ = [
    "DrawnVoxel",
    "GridSampler",
    "LabelSampler",
    "MixedSampler",
    "PatchRandom",
    "Sampler",
    "UniformSampler",
    "WeightedSampler",
    "as_size",
    "clamped_start",
    "own_count",
]
