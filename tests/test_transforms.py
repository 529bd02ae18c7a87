"""Parameters of the spatial transforms: the grammar of ranges, refusals, distributions."""

from __future__ import annotations

import numpy as np
import pytest

import gpuqueue as gq
from gpuqueue.patches.ranges import axis_limits
from gpuqueue.rng import Random
from gpuqueue.volumes.grid import Grid

GRID = Grid((20, 22, 24), np.diag([1.0, 2.0, 1.5, 1.0]))


@pytest.mark.parametrize(
    "value, limits",
    [
        (10, [[-10, 10]] * 3),
        ((2, 5), [[2, 5]] * 3),
        ((1, 2, 3), [[-1, 1], [-2, 2], [-3, 3]]),
        ((1, 2, 3, 4, 5, 6), [[1, 2], [3, 4], [5, 6]]),
        (((1, 2), (3, 4), (5, 6)), [[1, 2], [3, 4], [5, 6]]),
    ],
)
def test_ranges_are_torchios(value, limits):
    assert axis_limits(value, "degrees").tolist() == limits


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: gq.RandomAffine(degrees=(1, 2, 3, 4)), "degrees"),
        (lambda: gq.RandomAffine(degrees=(5, 2)), "lower one first"),
        (lambda: gq.RandomAffine(degrees=float("nan")), "finite"),
        (lambda: gq.RandomAffine(degrees="10"), "degrees"),
        (lambda: gq.RandomAffine(scales=1.5), "positive"),
        (lambda: gq.RandomAffine(scales=(0.1, 0.2, 0.3), isotropic=True), "isotropic"),
        (lambda: gq.RandomAffine(center="middle"), "center"),
        (lambda: gq.RandomAffine(p=1.2), "p=1.2"),
        (lambda: gq.RandomAffine(default_pad_value="otsu"), "pad="),
        (lambda: gq.RandomAffine(image_interpolation="bspline"), "role"),
        (lambda: gq.RandomAffine(degree=10), "unknown keyword"),
        (lambda: gq.RandomFlip(axes=3), "0, 1 and 2"),
        (lambda: gq.RandomFlip(axes="up"), "anatomical"),
        (lambda: gq.RandomElasticDeformation(3), "4 or more"),
        (lambda: gq.RandomElasticDeformation(4), "5 or more"),
        (lambda: gq.RandomElasticDeformation(locked_borders=3), "locked_borders"),
        (lambda: gq.RandomElasticDeformation(max_displacement=-1), "0 or more"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_drawn_parameters_fill_their_ranges():
    transform = gq.RandomAffine((0.8, 1.1, 1, 1, 0.5, 2), 0, ((-4, 4), (0, 0), (1, 9)))
    matrices = np.array(transform.draw(Random(list(range(2000))), [GRID] * 2000))
    scales = np.diagonal(matrices[:, :3, :3], axis1=1, axis2=2)
    moved = matrices[:, :3, :3] @ GRID.centre + matrices[:, :3, 3] - GRID.centre
    for values, low, high in ((scales, (0.8, 1, 0.5), (1.1, 1, 2)), (moved, (-4, 0, 1), (4, 0, 9))):
        assert np.allclose(values.min(0), low, atol=0.01) and np.allclose(values.max(0), high, atol=0.01)
    same = gq.RandomAffine(0.3, 0, isotropic=True).draw(Random(list(range(9))), [GRID] * 9)
    assert all(np.allclose(np.diag(m)[:3], m[0, 0]) for m in same)


@pytest.mark.parametrize("transform", [gq.RandomFlip((0, 1, 2), 1.0, p=0.5), gq.RandomAffine(p=0.5)])
def test_p_is_the_probability_of_being_applied(transform):
    drawn = transform.draw(Random(list(range(1000))), [GRID] * 1000)
    assert np.mean([(m == np.eye(4)).all() for m in drawn]) == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(1000))


def test_a_batch_draws_what_each_patch_would_alone():
    for transform in (gq.RandomFlip((0, 1, 2)), gq.RandomAffine(), gq.RandomElasticDeformation()):
        extra = [["a"] * 4] if isinstance(transform, gq.RandomElasticDeformation) else []
        together = transform.draw(Random([1, 2, 3, 4]), [GRID] * 4, *extra)
        alone = [transform.draw(Random([n]), [GRID], *[["a"] for _ in extra])[0] for n in (1, 2, 3, 4)]
        assert all((a == b).all() for a, b in zip(together, alone))


def test_anatomical_names_flip_the_closest_axis():
    psr = Grid((4, 5, 6), np.array([[0, 0, 1, 0], [-1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]], float))
    assert psr.axcodes == "PSR"
    for name, axis in (("left", 2), ("LR", 2), ("Anterior", 0), ("inferior", 1)):
        by_name = gq.RandomFlip(name, 1.0).draw(Random([1]), [psr])[0]
        assert (by_name == gq.RandomFlip(axis, 1.0).draw(Random([1]), [psr])[0]).all()


def test_other_centres_are_explicit():
    for center, point in (("image", GRID.centre), ("origin", (0, 0, 0)), ((3, 4, 5), (3, 4, 5))):
        matrix = gq.RandomAffine((2, 2), (20, 20), center=center).draw(Random([1]), [GRID])[0]
        assert np.allclose(matrix @ [*point, 1], [*point, 1])


def test_locked_borders_do_not_move_and_displacements_stay_within():
    for lock in (0, 1, 2):
        points = gq.RandomElasticDeformation((7, 8, 9), (1, 2, 3), lock, allow_folding=True).draw(
            Random([5]), [GRID], ["a"]
        )[0]
        assert points.shape == (3, 7, 8, 9)
        inner = (slice(None), *[slice(lock, n - lock) for n in (7, 8, 9)])
        assert (points[inner] != 0).all()
        points[inner] = 0
        assert (points == 0).all()
