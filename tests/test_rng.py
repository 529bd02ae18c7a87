"""The counter-based generator."""

from __future__ import annotations

import numpy as np
import pytest

from gpuqueue.rng import Random, hash_id, make_key, philox


@pytest.mark.parametrize(
    "key, counter, words",
    [
        (0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_its_published_words(key, counter, words, monkeypatch):
    """Known-answer vectors of Random123. The second has all counter words set, which the stream never does."""
    if counter:
        ones = np.full(1, 0xFFFFFFFF, np.uint64)
        monkeypatch.setattr(np, "zeros", lambda shape, dtype=None: np.broadcast_to(ones, shape))
        monkeypatch.setattr(np, "arange", lambda *_, **__: np.zeros(1, np.uint64) * np.uint64(0))
        assert tuple(philox(np.array(key, np.uint64), 0, 1).flatten()) == words
    else:
        assert tuple(philox(np.array(key, np.uint64), counter, 1)[0]) == words


def test_streams_are_uniform_independent_and_pure():
    draws = Random(list(range(200))).uniform(500)
    assert draws.shape == (200, 500) and draws.min() >= 0 and draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=4 * np.sqrt(1 / 12 / draws.size))
    assert np.abs(np.corrcoef(draws)[np.triu_indices(200, 1)]).max() < 6 / np.sqrt(500)
    stream = Random(7)
    parts = np.concatenate([stream.uniform(2), stream.uniform(2)])
    assert (parts == Random(7).uniform(4)).all()
    assert Random(7).uniform().shape == () and Random([7, 8]).uniform((2, 3)).shape == (2, 2, 3)


def test_normal_numbers_are_normal():
    x = Random(3).normal(20000)
    assert abs(x.mean()) < 4 / np.sqrt(20000) and x.std() == pytest.approx(1, abs=0.03)


def test_whole_numbers_reach_both_ends_and_no_further(monkeypatch):
    """H03's kind: the extreme draws, 0 and the largest below 1, stay inside."""
    x = Random(5).integers(np.array([0, -3, 10]), np.array([1, 3, 12]))
    assert x.shape == (3,)
    many = np.array([Random(n).integers(0, 3) for n in range(300)])
    assert set(many.tolist()) == {0, 1, 2}
    for unit in (0.0, 1 - 2.0**-24, 1 - 2.0**-53):
        monkeypatch.setattr(Random, "uniform", lambda self, shape=(), u=unit: np.full(shape, u))
        assert 0 <= Random(1).integers(0, 2**40) < 2**40


def test_keys_differ_in_every_field():
    base = dict(seed=1, epoch=2, id_hash=hash_id("a"), turn="k3", stage="s")
    others = [
        base | change
        for change in (
            {"seed": 2},
            {"epoch": 1},
            {"id_hash": hash_id("b")},
            {"turn": "k4"},
            {"turn": "visit3"},
            {"stage": "t"},
            {"seed": 12, "epoch": 2},
            {"seed": 1, "epoch": 22},
        )
    ]
    assert len({make_key(**fields) for fields in [base, *others]}) == 1 + len(others)
