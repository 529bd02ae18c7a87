"""What is kept of an exception raised while a volume is read: plain, bounded text that survives the way from a worker.

A DataLoader would rebuild the exception from one string, which loses its attributes, its cause and, for some types, its
message. In a worker the last frames' locals are summed up too, since no debugger reaches them.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
from torch import Tensor

_MOST_MESSAGE = 2000  # characters
_MOST_TRACE = 10000
_FRAMES, _LOCALS, _MOST_LOCAL = 3, 10, 60  # how many frames, variables each, and characters of a plain value
_MOST_VOXELS = 1 << 24  # of an array whose range is looked at


@dataclass(frozen=True, eq=False)
class Failure:
    """What went wrong while reading one volume."""

    volume_id: str
    kind: str
    message: str
    trace: str
    exception: BaseException | None = None  # only in the process where it was raised


def failure_of(error: BaseException, volume_id: str, worker: int | None, hidden: str) -> Failure:
    """The exception as a Failure. `worker`: the number of the worker process, or None in this process. Leading frames
    of the file `hidden`, which only called the user's code, are left out."""
    while (trail := error.__traceback__) and trail.tb_next and trail.tb_frame.f_code.co_filename == hidden:
        error.__traceback__ = trail.tb_next
    kind, message = type(error).__name__, _shortened(_text(error), _MOST_MESSAGE)
    if worker is None:
        return Failure(volume_id, kind, message, "", error)
    trace = "".join(traceback.format_exception(error)).rstrip()
    lines = [
        f"In loader worker {worker}:",
        *locals_of(error),
        _tail(trace, _MOST_TRACE),
    ]  # the cause comes last
    return Failure(volume_id, kind, message, "\n".join(lines))


def locals_of(error: BaseException) -> Iterator[str]:
    """Lines that tell the type, shape, dtype and range of the last frames' variables.

    >>> def mean(image):
    ...     return image[5].mean()
    >>> try:
    ...     mean(np.arange(4.0))
    ... except IndexError as error:
    ...     print(list(locals_of(error))[-1])
      in mean: image = ndarray (4,) float64 0 to 3
    """
    yield "Locals of the last frames:"
    for frame in [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-_FRAMES:]:
        yield f"  in {frame.f_code.co_name}: " + "; ".join(_locals_of(frame))


def _locals_of(frame: FrameType) -> Iterator[str]:
    for place, (name, value) in enumerate(frame.f_locals.items()):
        if place == _LOCALS:
            yield "..."
            return
        yield f"{name} = {describe_value(value)}"


def describe_value(value: Any) -> str:
    """A variable in a few words; never raises, never long.

    >>> describe_value(np.array([1, np.nan, 3], np.float32)), describe_value({"a": 1}), describe_value(7)
    ('ndarray (3,) float32 1 to 3, 1 not finite', 'dict of 1', '7')
    """
    try:
        if isinstance(value, str):
            value = value[: _MOST_LOCAL + 1]
        if value is None or isinstance(value, (bool, int, float, str, os.PathLike)):
            return _shortened(repr(value), _MOST_LOCAL)
        if isinstance(value, (np.ndarray, Tensor)):
            return _describe_array(value)
        if isinstance(value, (list, tuple, set, dict)):
            return f"{type(value).__name__} of {len(value)}"
    except Exception:
        pass  # an odd object must not hide the error that is being told
    return type(value).__name__


def _describe_array(value: np.ndarray[Any, Any] | Tensor) -> str:
    text = f"{type(value).__name__} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.numel() > _MOST_VOXELS:
            return f"{text} on {value.device}"
        value = value.detach().float().numpy()
    if not value.size or value.size > _MOST_VOXELS or value.dtype.kind not in "biuf":
        return text
    finite = value[np.isfinite(value)]
    lost = value.size - finite.size
    spread = f" {finite.min():g} to {finite.max():g}" if finite.size else ""
    return text + spread + (f", {lost} not finite" if lost else "")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _tail(text: str, most: int) -> str:
    return text if len(text) <= most else f"...{text[3 - most :]}"
