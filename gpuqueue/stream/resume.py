"""Where a stream was left: what must be resident again, and what comes next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from gpuqueue.stream.commands import Command


@dataclass(frozen=True)
class Position:
    """`commands` go on from there: loads of what was resident, then the rest.

    `consumed` counts the patches that each volume gave before; `turns` its loads and redraws, the loads that are made
    again not included.
    """

    commands: Iterator[Command]
    consumed: Counter[int]
    turns: Counter[int]


def fast_forward(stream: Iterable[Command], patches: int) -> Position:
    """Walks past the first `patches` patches, and the discards right after them, without loading anything.

    >>> from gpuqueue.stream.commands import parse, to_text
    >>> to_text(fast_forward(parse("L0 P0 P0 L1 P1 D0 P1 D1"), 3).commands)
    'L1 P1 D1'
    """
    commands = iter(stream)
    resident: dict[int, None] = {}  # in the order of their loads
    turns: Counter[int] = Counter()
    consumed: Counter[int] = Counter()
    for command in commands:
        if patches == 0 and command.op != "D":
            commands = chain([command], commands)
            break
        if command.op == "P":
            patches -= 1
            consumed[command.volume] += 1
        elif command.op == "D":
            del resident[command.volume]
        else:
            turns[command.volume] += 1
            resident.setdefault(command.volume)
    turns.subtract(list(resident))
    return Position(chain([Command("L", volume) for volume in resident], commands), consumed, turns)
