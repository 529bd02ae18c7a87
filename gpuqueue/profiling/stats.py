"""What a run did so far, in numbers that carry their units."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stats:
    """Counts and times since the queue was made (or `reset`).

    >>> print(Stats(batches=10, patches=80, wait_seconds=1.0, consumer_seconds=3.0))
    80 patches in 10 batches, 20.0 patches/s; waited 25.0 % of 4.0 s for data
    """

    batches: int = 0
    """Batches delivered."""
    patches: int = 0
    """Patches delivered."""
    loads: int = 0
    """Volumes read and copied to the gathering device, those read ahead included."""
    wait_seconds: float = 0.0
    """Time the consumer waited for a batch; close to the whole time means that it is starving."""
    consumer_seconds: float = 0.0
    """Time between a batch's delivery and the request for the next."""
    first_batch_seconds: float = 0.0
    """From the last `iter(queue)` to its first batch."""
    most_resident_volumes: int = 0
    """Most volumes that were resident at once."""
    most_resident_bytes: int = 0
    """Most bytes of volumes that were resident at once."""
    drawn_labels: dict[int, int] = field(default_factory=dict)
    """Patches placed by a voxel of each class, those drawn ahead included."""
    missing_labels: dict[int | None, float] = field(default_factory=dict)
    """Patches that volumes without the class could not give, by class (None: any foreground)."""
    redraws: int = 0
    """Drawn voxels that augmentation moved out of the volume, and others were drawn for."""
    outside: int = 0
    """Patches placed at the border, because nine such voxels in a row landed outside."""
    moved_starts: int = 0
    """Patches moved inside the volume: their drawn voxel is not where the sampler wanted it, but in the patch."""

    @property
    def wall_seconds(self) -> float:
        """Waiting and consuming together."""
        return self.wait_seconds + self.consumer_seconds

    @property
    def wait_share(self) -> float:
        """Share of the time that the consumer waited, 0 to 1."""
        return self.wait_seconds / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def label_shares(self) -> dict[int, float]:
        """Share of each class among the patches that were placed by a class."""
        total = sum(self.drawn_labels.values())
        return {label: number / total for label, number in sorted(self.drawn_labels.items())}

    @property
    def patches_per_second(self) -> float:
        """Patches delivered per second of wall time."""
        return self.patches / self.wall_seconds if self.wall_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and shares, for a logger."""
        derived = {name: getattr(self, name) for name in ("wall_seconds", "wait_share", "patches_per_second")}
        return dataclasses.asdict(self) | derived

    def __str__(self) -> str:
        return (
            f"{self.patches} patches in {self.batches} batches, {self.patches_per_second:.1f} patches/s; "
            f"waited {100 * self.wait_share:.1f} % of {self.wall_seconds:.1f} s for data"
        )
