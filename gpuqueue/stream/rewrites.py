"""Streams to streams: the same patches, loaded at other moments, under other numbers, or in another order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from gpuqueue.stream.commands import Command, check, checked


def optimize(stream: Iterable[Command], capacity: int | None = None) -> list[Command]:
    """Puts each D right after its volume's last P or A, and each L as early as `capacity` resident volumes allow.

    `capacity` is the stream's own peak unless given. The order of loads, and of patches and redraws, stays; no load
    comes later among the patches than before; a second `optimize` changes nothing. Loads that nothing uses are kept.
    Raises StreamError for an invalid stream, ValueError where the capacity would delay a load.

    >>> from gpuqueue.stream.commands import parse, to_text
    >>> to_text(optimize(parse("L0 P0 P0 L1 P1 D0 P1 D1")))
    'L0 L1 P0 P0 D0 P1 P1 D1'
    """
    commands = list(stream)
    peak = check(commands).most_resident
    room = peak if capacity is None else capacity
    drops = _drops(commands)
    loads = deque(position for position, command in enumerate(commands) if command.op == "L")
    result: list[Command] = []
    resident: set[int] = set()

    def load_what_fits() -> None:
        while loads and len(resident) < room and commands[loads[0]].volume not in resident:
            position = loads.popleft()
            result.append(commands[position])
            if position in drops:  # nothing uses this load
                result.append(drops[position])
            else:
                resident.add(commands[position].volume)

    load_what_fits()
    for position, command in enumerate(commands):
        if loads and loads[0] == position:
            raise ValueError(f"a capacity of {room} would delay {command} at position {position}; {peak} delays none")
        if command.op in "PA":
            result.append(command)
            if position in drops:
                result.append(drops[position])
                resident.discard(command.volume)
                load_what_fits()
    return result


def _drops(commands: list[Command]) -> dict[int, Command]:
    """The D of each stay, by the position of the stay's last P or A, or of its L where nothing uses it."""
    latest: dict[int, int] = {}
    drops: dict[int, Command] = {}
    for position, command in enumerate(commands):
        if command.op == "D":
            drops[latest[command.volume]] = command
        else:
            latest[command.volume] = position
    return drops


def shift(stream: Iterable[Command], offset: int) -> Iterator[Command]:
    """Adds `offset` to every volume's number, so that streams of other volumes can follow each other; lazy.

    Raises ValueError at the first number that would be negative.

    >>> from gpuqueue.stream.commands import parse, to_text
    >>> to_text(shift(parse("L0 P0 D0"), 5))
    'L5 P5 D5'
    """
    shifted: dict[Command, Command] = {}  # equal commands share one object
    for command in stream:
        if command not in shifted:
            if command.volume + offset < 0:
                raise ValueError(f"an offset of {offset} makes the volume of {command} negative")
            shifted[command] = Command(command.op, command.volume + offset)
        yield shifted[command]


def randomize(stream: Iterable[Command], rng: np.random.Generator) -> list[Command]:
    """Permutes the patches within their volumes' stays, none across an A; all other commands keep their places.

    Where all volumes of a stream are resident throughout, every order is equally likely. A D that no longer follows its
    volume's last P can be moved there by `optimize`. Raises StreamError for an invalid stream.

    >>> from gpuqueue.stream.commands import parse, to_text
    >>> to_text(randomize(parse("L0 L1 P0 P0 P0 P1 P1 P1 D0 D1"), np.random.default_rng(0)))
    'L0 L1 P1 P0 P0 P0 P1 P1 D0 D1'
    """
    commands = list(checked(stream))
    slots = [position for position, command in enumerate(commands) if command.op == "P"]
    bounded = list(zip((commands[position] for position in slots), *_bounds(commands)))
    for slot, unit in enumerate(rng.random(len(slots)).tolist()):  # Fisher and Yates, but for swaps out of bounds
        _, _, beyond = bounded[slot]
        other = slot + int(unit * (beyond - slot))
        _, first, _ = bounded[other]
        if first <= slot:
            bounded[slot], bounded[other] = bounded[other], bounded[slot]
    for position, (command, _, _) in zip(slots, bounded):
        commands[position] = command
    return commands


def _bounds(commands: list[Command]) -> tuple[list[int], list[int]]:
    """For each P, counted among the P's, the first slot that it may take and the one after the last."""
    first: list[int] = []
    beyond: list[int] = []
    since: dict[int, int] = {}  # resident volume: the first slot of its stay, or after the latest A
    inside: dict[int, list[int]] = {}  # resident volume: its patches from there on
    for op, volume in commands:
        if op == "P":
            inside[volume].append(len(first))
            first.append(since[volume])
            beyond.append(0)
        elif op == "L":
            since[volume], inside[volume] = len(first), []
        elif op == "D":
            for slot in inside.pop(volume):
                beyond[slot] = len(first)
        else:
            for resident, slots in inside.items():
                for slot in slots:
                    beyond[slot] = len(first)
                since[resident], inside[resident] = len(first), []
    return first, beyond
