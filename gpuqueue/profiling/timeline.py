"""A command stream as a picture: which volume is resident when, and where the patches come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from gpuqueue.stream.commands import Command, parse


@dataclass
class _Rows:
    """Stays (volume, from, to), patches (at, volume) and residents (at, number), counted in patches given so far."""

    stays: list[tuple[int, float, float]] = field(default_factory=list)
    patches: list[tuple[float, int]] = field(default_factory=list)
    residents: list[tuple[float, int]] = field(default_factory=list)


def timeline(stream: Iterable[Command] | str, batch_size: int | None = None, title: str | None = None) -> Any:
    """Draws a stream and returns the matplotlib Figure.

    Above, one row per volume in order of its first load: a bar while it is resident, a tick for each of its patches.
    Below, how many volumes are resident. The horizontal axis counts patches; `batch_size` marks every batch.

    >>> timeline("L0 P0 L1 P1 P0 D0 P1 D1", batch_size=2).axes[0].get_ylabel()
    'volume'
    """
    from matplotlib.figure import Figure

    rows = _rows(parse(stream) if isinstance(stream, str) else stream)
    order = list(dict.fromkeys(volume for volume, _, _ in sorted(rows.stays, key=lambda stay: stay[1])))
    height = {volume: place for place, volume in enumerate(order)}
    figure = Figure(figsize=(9, 1.6 + 0.22 * max(len(order), 4)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[max(len(order), 4), 3])
    for volume, begin, end in rows.stays:
        above.barh(height[volume], end - begin, left=begin, height=0.8, color="#c6dbef", edgecolor="#6baed6")
    if rows.patches:
        xs, ys = zip(*((at, height[volume]) for at, volume in rows.patches))
        above.scatter(xs, ys, s=60, marker="|", linewidths=0.9, color="#08306b")
    above.set(yticks=range(len(order)), yticklabels=[str(v) for v in order], ylabel="volume", title=title or "")
    above.invert_yaxis()
    changes, counts = zip(*rows.residents) if rows.residents else ((0.0,), (0,))
    below.step(changes, counts, where="post", color="#08519c")
    below.fill_between(changes, counts, step="post", color="#deebf7")
    below.set(xlabel="patches given", ylabel="volumes\nresident", ylim=(0, max(counts) + 0.5))
    below.yaxis.get_major_locator().set_params(integer=True)
    if batch_size is not None:
        for axes in (above, below):
            for edge in range(0, len(rows.patches) + 1, batch_size):
                axes.axvline(edge, color="#bbbbbb", linewidth=0.4, zorder=0)
    return figure


def _rows(stream: Iterable[Command]) -> _Rows:
    rows, since, given = _Rows(), dict[int, float](), 0
    for op, volume in stream:
        if op == "P":
            rows.patches.append((given + 0.5, volume))
            given += 1
        elif op == "L":
            since[volume] = given
        elif op == "D":
            rows.stays.append((volume, since.pop(volume), given))
        if op in "LD":
            rows.residents.append((given, len(since)))
    rows.stays += [(volume, begin, given) for volume, begin in since.items()]
    return rows
