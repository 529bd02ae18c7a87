"""What a command stream is: four commands, their text form, and the rules that make a stream valid.

A stream is any iterable of commands: `L v` loads volume v, `P v` takes one patch from it, `D v` drops it, `A v` draws
its augmentation anew. A volume is a whole number here, its position in the dataset. The rules, kept in this file alone:

1. `L v` only while v is not resident.
2. `P v`, `A v` and `D v` only while v is resident.
3. Nothing is resident at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuqueue.errors import StreamError

_OPS = "LPDA"


class Command(NamedTuple):
    """One step of a stream: `op` is "L" (load), "P" (patch), "D" (drop) or "A" (redraw), `volume` a position.

    >>> str(Command("L", 0))
    'L0'
    """

    op: str
    volume: int

    def __str__(self) -> str:
        return f"{self.op}{self.volume}"


@dataclass(frozen=True)
class StreamSummary:
    """What a valid stream amounts to: numbers of loads and patches, the most volumes resident at once, the patches of
    each volume, and the mean number of distinct volumes per batch (0 when there is no patch)."""

    loads: int
    patches: int
    most_resident: int
    patches_per_volume: dict[int, int]
    mean_distinct: float


def to_text(stream: Iterable[Command]) -> str:
    """The stream as text.

    >>> to_text([Command("L", 0), Command("P", 0), Command("D", 0)])
    'L0 P0 D0'
    """
    return " ".join(map(str, stream))


def parse(text: str) -> list[Command]:
    """The stream that a text says, the inverse of `to_text`; any white space separates. Not checked beyond its form.

    Raises StreamError with the position and the word that is no command.

    >>> parse("L0 P0 D0")[1]
    Command(op='P', volume=0)
    """
    known: dict[str, Command] = {}  # equal commands share one object: a stream has few distinct ones
    stream = []
    for position, word in enumerate(text.split()):
        if word not in known:
            known[word] = _parse_word(position, word)
        stream.append(known[word])
    return stream


def _parse_word(position: int, word: str) -> Command:
    number = word[1:]
    if word[0] not in _OPS or not (number.isascii() and number.isdigit()):
        raise StreamError(
            f"position {position}: {word!r} is no command; write one of L, P, D, A and a number, as in L0"
        )
    return Command(word[0], int(number))


def checked(stream: Iterable[Command], num_volumes: int | None = None) -> Iterator[Command]:
    """Yields the stream while it keeps the rules; it may be endless.

    `num_volumes`, where known, is one more than the largest volume allowed. Raises StreamError with position, command
    and rule at the first command that breaks one, or after the last when something stays resident.

    >>> list(checked(parse("L0 P0 D0"))) == parse("L0 P0 D0")
    True
    """
    resident: set[int] = set()
    for position, command in enumerate(stream):
        if type(command) is not Command:
            raise StreamError(f"position {position}: {command!r} is no Command; write Command('L', 0) and so on")
        op, volume = command
        if op == "L":
            if volume in resident:
                raise _broken(position, command, f"volume {volume} is resident already; D{volume} must come first")
            _check_volume(position, command, num_volumes)
            resident.add(volume)
        elif volume not in resident or op not in _OPS:
            raise _broken(position, command, _rule_for_others(command))
        elif op == "D":
            resident.discard(volume)
        yield command
    if resident:
        left = ", ".join(f"D{volume}" for volume in sorted(resident))
        raise StreamError(f"at the end of the stream volumes are still resident; missing: {left}")


def _broken(position: int, command: Command, rule: str) -> StreamError:
    return StreamError(f"position {position}, {command}: {rule}")


def _rule_for_others(command: Command) -> str:
    if command.op not in _OPS:
        return f"{command.op!r} is none of L, P, D, A"
    return f"volume {command.volume} is not resident; L{command.volume} must come before"


def _check_volume(position: int, command: Command, num_volumes: int | None) -> None:
    if command.volume < 0 or (num_volumes is not None and command.volume >= num_volumes):
        upper = "" if num_volumes is None else f" to {num_volumes - 1}"
        raise _broken(position, command, f"there is no volume {command.volume}; volumes are numbered from 0{upper}")


def check(stream: Iterable[Command], batch_size: int = 8) -> StreamSummary:
    """Checks a finite stream and sums it up; the mean of distinct volumes is over batches of `batch_size` patches.

    Raises StreamError as `checked` does, ValueError for a batch size below 1.

    >>> check(parse("L0 P0 L1 P1 D1 P0 D0"), batch_size=2)
    StreamSummary(loads=2, patches=3, most_resident=2, patches_per_volume={0: 2, 1: 1}, mean_distinct=1.5)
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    tally = _Tally(batch_size)
    for command in checked(stream):
        tally.add(command)
    return tally.summary()


@dataclass
class _Tally:
    """Running sums of one stream, in memory that grows with its volumes only."""

    batch_size: int
    loads: int = 0
    patches: int = 0
    resident: int = 0
    most_resident: int = 0
    per_volume: Counter[int] = field(default_factory=Counter)
    batch: set[int] = field(default_factory=set)
    distinct: int = 0

    def add(self, command: Command) -> None:
        op, volume = command
        if op == "P":
            self.patches += 1
            self.per_volume[volume] += 1
            self.batch.add(volume)
            if self.patches % self.batch_size == 0:
                self._end_batch()
        elif op == "L":
            self.loads += 1
            self.resident += 1
            self.most_resident = max(self.most_resident, self.resident)
        elif op == "D":
            self.resident -= 1

    def _end_batch(self) -> None:
        self.distinct += len(self.batch)
        self.batch.clear()

    def summary(self) -> StreamSummary:
        self._end_batch()
        num_batches = -(-self.patches // self.batch_size)
        mean = self.distinct / num_batches if num_batches else 0.0
        return StreamSummary(self.loads, self.patches, self.most_resident, dict(self.per_volume), mean)
