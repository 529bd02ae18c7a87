"""Feeds 3D medical-image training: raw volumes stay on the device, each patch is augmented in one gather."""

import logging as _logging

from gpuqueue.aggregator import Aggregator
from gpuqueue.errors import GPUQueueError, QueueClosed, StageError, StreamError, VolumeError, WorkerError
from gpuqueue.inference import Prediction, predict
from gpuqueue.patches.samplers import (
    DrawnVoxel,
    GridSampler,
    LabelSampler,
    MixedSampler,
    UniformSampler,
    WeightedSampler,
)
from gpuqueue.patches.transforms import RandomAffine, RandomElasticDeformation, RandomFlip
from gpuqueue.profiling.report import show
from gpuqueue.profiling.stats import Stats
from gpuqueue.profiling.timeline import timeline
from gpuqueue.queue import GPUQueue
from gpuqueue.stream.advise import Advice, advise
from gpuqueue.stream.commands import Command, check, parse, to_text
from gpuqueue.stream.rewrites import optimize, randomize, shift
from gpuqueue.stream.simulate import Simulation, simulate
from gpuqueue.stream.strategies import classic, command_stream
from gpuqueue.volumes.dataset import VolumeDataset
from gpuqueue.volumes.loader import volume_loader
from gpuqueue.volumes.volume import Volume
from gpuqueue.volumes.writing import save_nifti

_logging.getLogger("gpuqueue").addHandler(_logging.NullHandler())  # silent until the user adds a handler
__version__ = "0.1.0"
__all__ = [
    "Advice",
    "Aggregator",
    "Command",
    "DrawnVoxel",
    "GPUQueue",
    "GPUQueueError",
    "GridSampler",
    "LabelSampler",
    "MixedSampler",
    "Prediction",
    "QueueClosed",
    "RandomAffine",
    "RandomElasticDeformation",
    "RandomFlip",
    "Simulation",
    "StageError",
    "Stats",
    "StreamError",
    "UniformSampler",
    "Volume",
    "VolumeDataset",
    "VolumeError",
    "WeightedSampler",
    "WorkerError",
    "advise",
    "check",
    "classic",
    "command_stream",
    "optimize",
    "parse",
    "predict",
    "randomize",
    "save_nifti",
    "shift",
    "show",
    "simulate",
    "timeline",
    "to_text",
    "volume_loader",
]
