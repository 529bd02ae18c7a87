"""In which order volumes are loaded, sampled and dropped: one generator per policy.

A strategy is `(visits, capacity, rng) -> commands`: `visits` are pairs (volume, number of patches) in epoch order,
`capacity` is how many volumes may be resident, `rng` shuffles. What all have in common: a visit of no patches is never
loaded; a volume that comes again while it is resident stays on, without a second load; each D follows its volume's last
P at once. All but `sliding` play blocks of visits one after the other and differ only in how they cut the blocks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from gpuqueue.rng import make_key
from gpuqueue.stream.commands import Command, check, parse
from gpuqueue.stream.sliding import Visit, check_capacity, worth_loading
from gpuqueue.stream.sliding import sliding as sliding

Block = dict[int, int]  # volume: patches, in the order of loading
Strategy = Callable[[Iterable[Visit], int, np.random.Generator], Iterable[Command]]


def sequential(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterator[Command]:
    """One volume at a time, whatever the capacity; lazy.

    >>> " ".join(map(str, sequential([(0, 2), (1, 1)], 4, np.random.default_rng(0))))
    'L0 P0 P0 D0 L1 P1 D1'
    """
    check_capacity(capacity)
    return _play(_blocks(visits, 1), rng)


def basic(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterator[Command]:
    """Blocks of `capacity` visits, patches shuffled inside; the last block is short; lazy.

    >>> " ".join(map(str, basic([(0, 1), (1, 1), (2, 1)], 2, np.random.default_rng(0))))
    'L0 L1 P0 D0 P1 D1 L2 P2 D2'
    """
    check_capacity(capacity)
    return _play(_blocks(visits, capacity), rng)


def merge_incomplete(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterator[Command]:
    """Like `basic`, the remainder of r visits joins the last block: up to capacity + r resident.

    >>> stream = list(merge_incomplete([(volume, 5) for volume in range(7)], 4, np.random.default_rng(0)))
    >>> check(stream).most_resident
    7
    """
    check_capacity(capacity)
    blocks = list(_blocks(visits, capacity))
    if _has_remainder(blocks, capacity):
        blocks[-2:] = [_merged((*blocks[-2].items(), *blocks[-1].items()))]
    return _play(blocks, rng)


def split_incomplete(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterator[Command]:
    """Like `basic`, the last block and the remainder together are halved into two blocks.

    >>> stream = list(split_incomplete([(volume, 5) for volume in range(5)], 4, np.random.default_rng(0)))
    >>> check(stream).most_resident
    3
    """
    check_capacity(capacity)
    blocks = list(_blocks(visits, capacity))
    if _has_remainder(blocks, capacity):
        both = [*blocks[-2].items(), *blocks[-1].items()]
        half = -(-len(both) // 2)
        blocks[-2:] = [_merged(both[:half]), _merged(both[half:])]
    return _play(blocks, rng)


def keep_incomplete(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterator[Command]:
    """Like `basic`, the last block keeps volumes of the block before to be full; their patches are split over both.

    Costs no extra load. A volume of one patch cannot be split and is not kept.

    >>> stream = list(keep_incomplete([(volume, 5) for volume in range(5)], 4, np.random.default_rng(0)))
    >>> sorted({command.volume for command in stream[stream.index(Command("L", 4)) :]}), check(stream).loads
    ([1, 2, 3, 4], 5)
    """
    check_capacity(capacity)
    blocks = list(_blocks(visits, capacity))
    if _has_remainder(blocks, capacity):
        _share(reversed(list(blocks[-2])), blocks[-2], blocks[-1], capacity)
    return _play(blocks, rng)


def reuse_incomplete(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterator[Command]:
    """Like `basic`, the last block is filled up with the epoch's first volumes; their patches are split over both.

    They are loaded again, unless the first block is the one before the last: then they are resident and stay on.

    >>> check(reuse_incomplete([(volume, 5) for volume in range(9)], 4, np.random.default_rng(0))).loads
    12
    """
    check_capacity(capacity)
    blocks = list(_blocks(visits, capacity))
    if _has_remainder(blocks, capacity):
        _share(list(blocks[0]), blocks[0], blocks[-1], capacity)
    return _play(blocks, rng)


def classic(max_length: int, samples_per_volume: int, shuffle_patches: bool = True) -> Strategy:
    """The strategy that does what TorchIO 1.x's `Queue` does inside one epoch: fill, drain, refill.

    Each fill loads volumes until `max_length` patches are planned; a volume that does not fit gives the rest in the
    next fill. With `shuffle_patches` each fill is shuffled by itself. A visit's own count takes the place of
    `samples_per_volume`, as a subject's `num_samples` does there. The capacity is not looked at.

    Raises ValueError where `samples_per_volume` does not fit into `max_length`, which TorchIO cannot do.

    >>> strategy = classic(max_length=3, samples_per_volume=2, shuffle_patches=False)
    >>> " ".join(map(str, strategy([(0, 2), (1, 2)], 1, np.random.default_rng(0))))
    'L0 L1 P0 P0 D0 P1 P1 D1'
    """
    for name, value in (("max_length", max_length), ("samples_per_volume", samples_per_volume)):
        if value < 1:
            raise ValueError(f"classic: {name} must be at least 1, not {value}")
    if samples_per_volume > max_length:
        raise ValueError(f"classic: samples_per_volume {samples_per_volume} must not exceed max_length {max_length}")

    def fill_and_drain(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterator[Command]:
        return _play(_fills(visits, max_length), rng, shuffle=shuffle_patches)

    return fill_and_drain


STRATEGIES: dict[str, Strategy] = {
    "sequential": sequential,
    "basic": basic,
    "merge_incomplete": merge_incomplete,
    "split_incomplete": split_incomplete,
    "keep_incomplete": keep_incomplete,
    "reuse_incomplete": reuse_incomplete,
    "sliding": sliding,
}


def find_strategy(strategy: str | Strategy | Iterable[Command]) -> Strategy:
    """The strategy that is meant by a name, a callable, or a ready stream: a list, an iterator (runs once) or a text.

    Raises ValueError for anything else, with the known names.

    >>> find_strategy("sliding") is sliding, list(find_strategy("L0 P0 D0")([], 1, np.random.default_rng(0)))[0]
    (True, Command(op='L', volume=0))
    """
    if isinstance(strategy, str):
        if strategy in STRATEGIES:
            return STRATEGIES[strategy]
        if re.match(r"\s*[LPDA]\d", strategy):
            return _ready(parse(strategy))
        names = ", ".join(STRATEGIES)
        raise ValueError(
            f"strategy {strategy!r} is not known; write one of {names}, classic(max_length, samples_per_volume), "
            "a callable, or a stream of commands"
        )
    if callable(strategy):
        return strategy
    if isinstance(strategy, Iterable):
        return _once(strategy) if isinstance(strategy, Iterator) else _ready(strategy)
    raise ValueError(f"strategy must be a name, a callable or a stream of commands, not {strategy!r}")


def command_stream(
    num_volumes: int,
    volumes_in_memory: int,
    patches_per_volume: int | Sequence[int],
    strategy: str | Strategy | Iterable[Command] = "sliding",
    seed: int = 0,
) -> list[Command]:
    """The checked stream of one epoch over volumes 0 .. num_volumes - 1, in that order, without a queue.

    `patches_per_volume` is one number, or one for each volume. Raises ValueError for values that make no sense and
    StreamError where a strategy breaks a rule.

    >>> " ".join(map(str, command_stream(2, 1, 2)))
    'L0 P0 P0 D0 L1 P1 P1 D1'
    """
    check_capacity(volumes_in_memory)
    if num_volumes < 0:
        raise ValueError(f"num_volumes must not be negative, but is {num_volumes}")
    single = np.ndim(patches_per_volume) == 0
    counts = np.atleast_1d(patches_per_volume).tolist() * (num_volumes if single else 1)
    if len(counts) != num_volumes:
        raise ValueError(f"patches_per_volume has {len(counts)} numbers for {num_volumes} volumes")
    rng = np.random.Generator(np.random.Philox(key=make_key(seed, 0, 0, "", "strategy")))
    stream = list(find_strategy(strategy)(list(enumerate(counts)), volumes_in_memory, rng))
    check(stream)
    return stream


def _merged(visits: Iterable[Visit]) -> Block:
    block: Block = {}
    for volume, patches in visits:
        block[volume] = block.get(volume, 0) + patches
    return block


def _blocks(visits: Iterable[Visit], capacity: int) -> Iterator[Block]:
    """Blocks of `capacity` visits each, the last one perhaps shorter."""
    worth = worth_loading(visits)
    while block := list(islice(worth, capacity)):
        yield _merged(block)


def _has_remainder(blocks: list[Block], capacity: int) -> bool:
    return len(blocks) > 1 and len(blocks[-1]) < capacity


def _share(candidates: Iterable[int], earlier: Block, last: Block, capacity: int) -> None:
    """Fills `last` up to `capacity` with half of the patches of `candidates`, taken from `earlier`."""
    for volume in candidates:
        if len(last) == capacity:
            break
        half = earlier[volume] // 2
        if volume not in last and half > 0:
            earlier[volume] -= half
            last[volume] = half


def _fills(visits: Iterable[Visit], max_length: int) -> Iterator[Block]:
    """The fills of a patch list of `max_length`: a visit that does not fit goes on in the next one."""
    fill: Block = {}
    free = max_length
    for volume, patches in worth_loading(visits):
        while patches > 0:
            taken = min(patches, free)
            fill[volume] = fill.get(volume, 0) + taken
            patches, free = patches - taken, free - taken
            if free == 0:
                yield fill
                fill, free = {}, max_length
    if fill:
        yield fill


def _play(blocks: Iterable[Block], rng: np.random.Generator, shuffle: bool = True) -> Iterator[Command]:
    """Loads a block, gives its patches shuffled, goes on to the next; what the next block needs too stays resident."""
    blocks = iter(blocks)
    block: Block = next(blocks, {})
    resident: set[int] = set()
    while block:
        following: Block = next(blocks, {})
        yield from (Command("L", volume) for volume in block if volume not in resident)
        resident = set(block)
        left = Counter(block)
        patch = {volume: Command("P", volume) for volume in block}
        order = np.repeat(list(block), list(block.values()))
        for volume in (rng.permutation(order) if shuffle else order).tolist():
            yield patch[volume]
            left[volume] -= 1
            if left[volume] == 0 and volume not in following:
                resident.discard(volume)
                yield Command("D", volume)
        block = following


def _ready(stream: Iterable[Command]) -> Strategy:
    def ready_stream(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterable[Command]:
        return stream

    return ready_stream


def _once(stream: Iterator[Command]) -> Strategy:
    pending = [stream]

    def single_stream(visits: Iterable[Visit], capacity: int, rng: np.random.Generator) -> Iterable[Command]:
        if not pending:
            raise ValueError(
                "strategy= was given an iterator, which runs once; give a callable that makes one an epoch"
            )
        return pending.pop()

    return single_stream
