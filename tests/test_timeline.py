"""The picture of a stream shows what the stream says."""

from __future__ import annotations

import pytest

import gpuqueue as gq
from gpuqueue.profiling.timeline import timeline


@pytest.mark.parametrize("strategy", ["sliding", "reuse_incomplete", "basic"])
def test_bars_are_stays_and_ticks_are_patches(strategy):
    stream = gq.command_stream(11, 4, 6, strategy)
    figure = timeline(stream, batch_size=4, title=strategy)
    above, below = figure.axes
    assert len(above.patches) == sum(command.op == "L" for command in stream)
    assert len(above.collections[0].get_offsets()) == 66
    assert max(below.lines[0].get_ydata()) == gq.check(stream).most_resident
    assert above.get_title() == strategy and "patches" in below.get_xlabel()
    figure.canvas.draw()


def test_an_endless_or_broken_off_stream_is_drawn_as_far_as_it_goes():
    assert len(timeline("L0 P0 L1 P1").axes[0].patches) == 2
    timeline("").canvas.draw()
