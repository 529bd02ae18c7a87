"""Every error that gpuqueue raises on purpose.

    GPUQueueError
    ├── StreamError(ValueError)      a command stream breaks a rule
    ├── VolumeError(ValueError)      a volume cannot be used: its file, shape, affine or values
    ├── StageError(RuntimeError)     reading, sampling, gathering or augmenting failed for one volume or patch
    │   └── WorkerError              a loader process died or hung
    └── QueueClosed(RuntimeError)    the queue was closed before this call

Wrong arguments raise a plain ValueError that says what to write instead.
"""

from __future__ import annotations


class GPUQueueError(Exception):
    """Base of all errors below."""


class StreamError(GPUQueueError, ValueError):
    """A command stream breaks a rule; the message gives position, command and rule."""


class VolumeError(GPUQueueError, ValueError):
    """A volume cannot be used; the message names it, what is wrong, and the remedy."""


class StageError(GPUQueueError, RuntimeError):
    """One stage failed for one volume or patch.

    `stage` is its name ("reading", "sampling", "gather", or the transform's), `volume` the volume's id, `epoch` and
    `index` (the patch's k, or None) the patch. The original exception is the `__cause__`, or, where it was raised in
    another process, its traceback is part of the text.
    """

    def __init__(
        self, message: str, *, stage: str = "", volume: str = "", epoch: int | None = None, index: int | None = None
    ) -> None:
        super().__init__(message)
        self.stage, self.volume, self.epoch, self.index = stage, volume, epoch, index


class WorkerError(StageError):
    """A loader process died or hung; reading cannot go on."""


class QueueClosed(GPUQueueError, RuntimeError):
    """The queue was closed, by `close()` or after an error that it cannot recover from."""
