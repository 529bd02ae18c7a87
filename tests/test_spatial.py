"""Geometry through the queue: conventions, units, centres, interpolation and borders, on every CPU backend."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest
import slow
import torch
from nibabel.processing import resample_from_to
from scipy.ndimage import center_of_mass
from scipy.spatial.transform import Rotation

import gpuqueue as gq
from gpuqueue.volumes.grid import Grid, reoriented, respaced

BACKENDS = ["torch", "numba"]
STORED = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def whole(volume, augment=(), **settings):
    """One patch that covers the whole reference grid, with its parameters."""
    grid = volume.grid()
    if settings.get("orientation"):
        grid = reoriented(grid, settings["orientation"])
    if settings.get("spacing"):
        grid = respaced(grid, np.broadcast_to(settings["spacing"], 3))
    settings.setdefault("pad", {"image": 0})
    with gq.GPUQueue(
        [volume], grid.shape, 1, device="cpu", augment=augment, patch_queue_size=0, return_parameters=True, **settings
    ) as queue:
        (batch,) = queue
    return batch


def blob(shape, point, sigma=1.5):
    axes = np.meshgrid(*[np.arange(n) for n in shape], indexing="ij")
    return np.exp(-sum((a - p) ** 2 for a, p in zip(axes, point)) / (2 * sigma**2)).astype(np.float32)


def centroid(tensor):
    return np.array(center_of_mass(tensor[0, 0].double().numpy()))


def fixed(degrees=(0, 0, 0), scales=(1, 1, 1), translation=(0, 0, 0), **other):
    """An affine without randomness."""
    pairs = [[(x, x) for x in values] for values in (scales, degrees, translation)]
    return gq.RandomAffine(*pairs, **other)


class Shift(gq.RandomElasticDeformation):
    """A constant displacement of content in mm, through the elastic path."""

    def __init__(self, mm):
        super().__init__(num_control_points=5, locked_borders=0, allow_folding=True)
        self.mm = np.array(mm, float)

    def draw(self, random, grids, ids):
        return [np.broadcast_to(-self.mm[:, None, None, None], (3, 5, 5, 5)).copy() for _ in grids]


def test_rotations_are_about_the_centre_of_the_volume(backend):
    """H31"""
    affine = np.eye(4)
    affine[:3, 3] = 500, -300, 900
    shape = (33, 41, 49)
    volume = gq.Volume("a", {"image": blob(shape, (16, 20, 24))}, affine)
    for degrees in [(90, 0, 0), (0, 90, 0), (0, 0, 90)]:
        assert np.abs(centroid(whole(volume, [fixed(degrees)], backend=backend)["image"]) - (16, 20, 24)).max() < 0.05


def test_rotations_act_in_millimetres(backend):
    """H32"""
    volume = gq.Volume("a", {"image": blob((9, 31, 11), (4, 21, 5), 1.0)}, np.diag([1.0, 1.0, 3.0, 1.0]))
    there = [centroid(whole(volume, [fixed((sign * 90, 0, 0))], backend=backend)["image"]) for sign in (1, -1)]
    assert np.abs(there[0] - (4, 15, 7)).max() < 0.1 and np.abs(there[1] - (4, 15, 3)).max() < 0.1
    columns = np.eye(4)
    columns[:3, :3] = [[0.625, 0.0003, 0], [0, -0.0163, -0.6248], [-0.0012, 2.399, -0.0627]]
    assert np.allclose(Grid((2, 2, 2), columns).spacing, (0.625, 2.399, 0.628), atol=5e-4)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_rotations_are_right_handed_and_forward(axis, backend):
    """H33: +30 degrees about each axis moves content the right-handed way."""
    first, second = (axis + 1) % 3, (axis + 2) % 3
    point = np.full(3, 20.0)
    point[first] += 8
    degrees = np.zeros(3)
    degrees[axis] = 30
    moved = centroid(
        whole(gq.Volume("a", {"image": blob((41,) * 3, point)}), [fixed(degrees)], backend=backend)["image"]
    )
    expected = np.full(3, 20.0)
    expected[first] += 8 * np.cos(np.radians(30))
    expected[second] += 8 * np.sin(np.radians(30))
    assert np.abs(moved - expected).max() < 0.1


def test_the_returned_matrix_maps_content_forward(backend):
    """H33: composite angles, checked with the matrix in `parameters`."""
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    volume = gq.Volume("a", {"image": blob((41,) * 3, (26, 17, 22))}, affine)
    batch = whole(volume, [fixed((20, 30, 40), (1.1, 0.9, 1.0), (2, -3, 4))], backend=backend)
    forward = batch["parameters"][0]["affine"]
    assert np.allclose((forward @ [*(2.0 * np.array([26, 17, 22])), 1])[:3], 2 * centroid(batch["image"]), atol=0.1)
    rotation = Rotation.from_euler("xyz", (20, 30, 40), degrees=True).as_matrix()  # extrinsic x, then y, then z
    assert np.allclose(forward[:3, :3], rotation @ np.diag([1.1, 0.9, 1.0]))


def test_axes_keep_their_order(backend):
    """H34"""
    for point in [(6, 15, 20), (10, 7, 20), (10, 15, 30)]:
        image = blob((20, 30, 40), point)
        volume = gq.Volume("a", {"image": image})
        same = whole(volume, [fixed((0.0, 0, 0), (1 + 1e-5, 1, 1))], backend=backend)["image"][0, 0].numpy()
        assert np.abs(same - image).max() < 1e-4
        for axis in range(3):
            shift = np.zeros(3)
            shift[axis] = 3
            for augment in (fixed(translation=shift), Shift(shift)):
                moved = centroid(whole(volume, [augment], backend=backend)["image"])
                assert np.abs(moved - point - shift).max() < 0.05


def test_identity_and_whole_voxel_shifts_are_exact(backend):
    """H35: with spacing (2, 3, 4); a shift by one voxel leaves the pad value behind."""
    image = np.arange(210, dtype=np.float32).reshape(5, 6, 7)
    volume = gq.Volume("a", {"image": image, "label": image.astype(np.int16)}, np.diag([2.0, 3.0, 4.0, 1.0]))
    for augment in ([], [Shift((0, 0, 1e-9))]):
        batch = whole(volume, augment, backend=backend)
        assert np.abs(batch["image"][0, 0].numpy() - image).max() <= 1e-3
        assert (batch["label"][0, 0].numpy() == image).all()
    for augment in (fixed(translation=(2, 0, 0)), Shift((2, 0, 0))):
        batch = whole(volume, [augment], backend=backend, pad={"image": -5, "label": 7})
        for key, pad in (("image", -5), ("label", 7)):
            out = batch[key][0, 0].numpy()
            assert np.abs(out[1:] - image[:-1]).max() <= 1e-3 and np.abs(out[0] - pad).max() <= 1e-3


def test_an_elastic_displacement_of_two_voxels_is_two_voxels_on_every_axis(backend):
    """H36"""
    image = np.random.default_rng(0).random((16, 32, 64)).astype(np.float32)
    for axis in range(3):
        shift = np.zeros(3)
        shift[axis] = 2
        out = whole(gq.Volume("a", {"image": image}), [Shift(shift)], backend=backend)["image"][0, 0].numpy()
        inner = [slice(None)] * 3
        inner[axis] = slice(2, None)
        kept = [slice(None)] * 3
        kept[axis] = slice(None, -2)
        assert np.abs(out[tuple(inner)] - image[tuple(kept)]).max() < 1e-3


def test_the_default_elastic_never_folds():
    """H37: the Jacobian of the returned map is positive for 50 seeds."""
    grid = Grid((64, 64, 64), np.eye(4))
    transform = gq.RandomElasticDeformation()
    for points in transform.draw(gq_random(range(50)), [grid] * 50, ["a"] * 50):
        u = slow.displacement(points, grid.shape)
        jacobian = np.stack(
            [np.stack(np.gradient(u[c] + np.arange(64.0).reshape(np.roll([-1, 1, 1], c)))) for c in range(3)]
        )
        assert np.linalg.det(np.moveaxis(jacobian, (0, 1), (-2, -1))).min() > 0
        assert abs(points).max() <= 6.4


def test_a_displacement_that_can_fold_is_refused_when_the_queue_is_built():
    """H37: naming volume, value and bound; also from the bound itself on, and on oblique grids sooner."""
    volume = gq.Volume("case7", {"image": np.zeros((64, 64, 64), np.uint8)})
    with pytest.raises(ValueError, match=r"case7.*16 mm.*6\.4 mm.*allow_folding"):
        gq.GPUQueue([volume], 32, augment=[gq.RandomElasticDeformation(max_displacement=16)], device="cpu")
    tilted = np.eye(4)
    tilted[:3, :3] = Rotation.from_euler("x", 20, degrees=True).as_matrix()
    for affine, bound in ((np.eye(4), 6.4), (tilted, 5.76)):
        grid = Grid((64, 64, 64), affine)
        gq.RandomElasticDeformation(max_displacement=bound - 0.01).limits(grid, "a")
        with pytest.raises(ValueError, match="can fold"):
            gq.RandomElasticDeformation(max_displacement=bound + 0.01).limits(grid, "a")
    gq.RandomElasticDeformation(max_displacement=50, allow_folding=True).limits(grid, "a")


def test_translations_are_millimetres_and_scales_enlarge(backend):
    """H38"""
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    volume = gq.Volume("a", {"image": blob((41,) * 3, (20, 18, 20))}, affine)
    moved = centroid(whole(volume, [fixed(translation=(0, 6, 0))], backend=backend)["image"])
    assert np.abs(moved - (20, 21, 20)).max() < 0.02
    ends = [
        centroid(whole(gq.Volume("a", {"image": blob((41,) * 3, p)}, affine), [fixed(scales=(1.2,) * 3)])["image"])
        for p in ((14, 20, 20), (26, 20, 20))
    ]
    assert np.linalg.norm(ends[1] - ends[0]) == pytest.approx(12 * 1.2, rel=0.01)


def gq_random(keys):
    from gpuqueue.rng import Random

    return Random(list(keys))


def test_elastic_displacements_have_no_preferred_direction(backend):
    """H39: 200 seeds, at the centre voxel and in the centroid of a central blob."""
    grid = Grid((64, 64, 64), np.eye(4))
    fields = gq.RandomElasticDeformation().draw(gq_random(range(1000, 1200)), [grid] * 200, ["a"] * 200)
    centre = np.array([slow.displacement(points, grid.shape)[:, 32, 32, 32] for points in fields])
    assert (np.abs(centre.mean(0)) < 4 * centre.std(0) / np.sqrt(200)).all()
    volume = gq.Volume("a", {"image": blob((40, 40, 40), (20, 20, 20))})
    with gq.GPUQueue(
        [volume],
        40,
        60,
        augment=[gq.RandomElasticDeformation()],
        device="cpu",
        backend=backend,
        batch_size=4,
        pad={"image": 0},
    ) as queue:
        moved = np.array([centroid(batch["image"][row : row + 1]) for batch in queue for row in range(4)]) - 20
    assert (np.abs(moved.mean(0)) < 4 * moved.std(0) / np.sqrt(60)).all()


TRANSFORMS = {
    "flip": [gq.RandomFlip((0, 1, 2), 0.7)],
    "affine": [gq.RandomAffine(0.2, 25, 3)],
    "elastic": [gq.RandomElasticDeformation(7, 2.3)],
    "all": [gq.RandomFlip((0, 1, 2)), gq.RandomAffine(0.2, 25, 3), gq.RandomElasticDeformation(7, 2.3)],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_labels_never_gain_values_and_stay_integers(name, backend):
    """H40: values 1 and 9, 100 draws."""
    label = np.ones((24, 26, 28), np.uint8)
    label[:, 13:] = 9
    volume = gq.Volume("a", {"image": label.astype(np.float32), "label": label})
    with gq.GPUQueue(
        [volume], 20, 100, augment=TRANSFORMS[name], device="cpu", backend=backend, pad={"label": 255}
    ) as queue:
        values = set()
        for batch in queue:
            assert batch["label"].dtype == torch.int64
            values |= set(batch["label"].unique().tolist())
    assert {1, 9} <= values <= {1, 9, 255}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_image_and_mask_move_together(name, backend):
    """H41, H43: a box in image and label keeps its overlap while it moves; the image is really interpolated."""
    mask = np.zeros((40, 40, 40), np.uint8)
    mask[6:30, 8:32, 11:35] = 10
    volume = gq.Volume("a", {"image": mask / np.float32(10), "label": mask})
    moved, between = [], 0
    with gq.GPUQueue(
        [volume], 40, 12, augment=TRANSFORMS[name], device="cpu", backend=backend, return_parameters=True
    ) as queue:
        for batch in queue:
            for image, label in zip(batch["image"][:, 0], batch["label"][:, 0]):
                assert set(label.unique().tolist()) <= {0, 10}
                a, b = (image > 0.5).numpy(), (label > 5).numpy()
                assert (a & b).sum() / (a | b).sum() >= 0.95
                moved.append((b & (mask > 5)).sum() / (b | (mask > 5)).sum())
                between += ((image > 0.01) & (image < 0.99)).sum().item()
    assert min(moved) < 0.95
    assert between > 0 or name == "flip"


def test_labels_are_padded_with_their_own_value(backend):
    """H42: an image's "minimum" is not the label's."""
    image = np.full((3, 3, 1), -1000.0, np.float32) + 1500 * np.eye(3, dtype=np.float32)[:, :, None]
    volume = gq.Volume("a", {"image": image, "label": np.eye(3, dtype=np.uint8)[:, :, None]})
    batch = whole(volume, [fixed(translation=(1, 0, 0))], backend=backend, pad={"image": "minimum"})
    assert (batch["label"][0, 0, 0] == 0).all() and (batch["image"][0, 0, 0] == -1000).all()
    assert (batch["label"][0, 0, 1:, :, 0] == torch.eye(3)[:2]).all()


def test_a_role_is_explicit_and_the_same_in_every_transform():
    """H43: an undeclared key is refused; declared, it is interpolated by the elastic transform too."""
    box = np.zeros((24, 24, 24), np.float32)
    box[6:18, 6:18, 6:18] = 1
    with pytest.raises(gq.VolumeError, match="'scan' has no role"):
        gq.Volume("a", {"scan": box})
    out = whole(gq.Volume("a", {"scan": box}, roles={"scan": "image"}), [gq.RandomElasticDeformation(7, 2.0)])["scan"]
    assert ((out > 0.05) & (out < 0.95)).any()


def test_keys_on_different_grids_stay_aligned(backend):
    """H44: one world-space map for all keys; same_grid=True refuses them and names both."""
    world = (19.0, 16.0, 20.0)
    label_affine = np.eye(4)
    label_affine[:3, 3] = 10, 5, 12
    arrays = {"image": blob((40,) * 3, world, 2.0), "image_small": blob((20,) * 3, (9, 11, 8), 2.0)}
    affines = {"image": np.eye(4), "image_small": label_affine}
    with pytest.raises(gq.VolumeError, match=r"image.*image_small.*\(20, 20, 20\).*same_grid=False"):
        gq.Volume("a", arrays, affines)
    volume = gq.Volume("a", arrays, affines, same_grid=False)
    augment = [fixed((25, 10, -25)), gq.RandomElasticDeformation(7, 2.0)]
    for seed in range(3):
        batch = whole(volume, augment, backend=backend, seed=seed)
        assert np.abs(centroid(batch["image"]) - centroid(batch["image_small"])).max() < 0.7
        assert np.abs(centroid(batch["image"]) - world).max() > 1


def test_flips_hit_image_and_label_alike(backend):
    """H45: 64 samples, all eight combinations."""
    i, j, k = np.meshgrid(*[np.arange(6)] * 3, indexing="ij")
    ramp = 10000 * i + 100 * j + k
    volume = gq.Volume("a", {"image": ramp.astype(np.float32), "label": ramp.astype(np.int32)})
    seen = set()
    with gq.GPUQueue([volume], 6, 64, augment=[gq.RandomFlip((0, 1, 2))], device="cpu", backend=backend) as queue:
        for batch in queue:
            assert torch.equal(batch["image"], batch["label"].float())
            seen |= {int(row[0, 0, 0, 0]) for row in batch["label"]}
    assert len(seen) == 8


def test_coordinates_stay_in_float32_under_autocast(backend):
    """H46, on the CPU: half-precision data along 700 voxels, through the warp."""
    image = np.tile(np.array([0, 1], np.float16), 350).reshape(700, 1, 1) * np.ones((1, 4, 4), np.float16)
    volume = gq.Volume("a", {"image": image})
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            out = whole(volume, [Shift((0, 1e-6, 0))], backend=backend)["image"][0, 0]
        assert out.dtype == torch.float32 and (out - torch.from_numpy(image.astype(np.float32))).abs().max() <= 2e-3


def test_non_finite_parameters_are_refused_and_voxels_follow_the_policy(backend):
    """H47"""
    volume = gq.Volume("a", {"image": np.ones((8, 8, 8), np.float32)})
    for size in (np.inf, np.nan):
        with pytest.raises(gq.StageError, match="not finite"):
            whole(volume, [Shift((size, 0, 0))], backend=backend)
    far = whole(volume, [Shift((1e30, 0, 0))], backend=backend, pad={"image": -3})["image"]
    assert (far == -3).all()
    image = np.ones((8, 8, 8), np.float32)
    image[3, 4, 5] = np.nan
    spotted = gq.Volume("case9", {"image": image})
    assert whole(spotted, backend=backend, on_nonfinite="keep")["image"].isnan().sum() == 1
    assert whole(spotted, backend=backend, on_nonfinite="replace")["image"][0, 0, 3, 4, 5] == 0
    with pytest.raises(gq.StageError, match="case9"):
        whole(spotted, backend=backend)


def test_values_are_cast_with_rounding_and_saturation():
    """H48"""
    volume = gq.Volume("a", {"image": np.full((4, 4, 4), 32767, np.int16)})

    def double(batch):
        return batch | {"image": batch["image"] * 2}

    assert (whole(volume, [double])["image"] == 65534).all()
    assert (whole(volume, [double], dtypes={"image": torch.int16})["image"] == 32767).all()
    uint8 = gq.Volume("a", {"image": np.array([254.6, 300, -3, 7.4], np.float32).reshape(4, 1, 1)})
    out = whole(uint8, dtypes={"image": torch.uint8})["image"]
    assert out.dtype == torch.uint8 and out.flatten().tolist() == [255, 255, 0, 7]


@pytest.mark.parametrize(
    "array",
    [
        np.full((4, 5, 6), 40000, np.uint16),
        np.arange(120, dtype=np.float32).reshape(4, 5, 6)[::-1, :, ::-1],
        np.arange(-60, 60, dtype=">i2").reshape(4, 5, 6),
        np.arange(120, dtype=">f4").reshape(4, 5, 6),
        np.asfortranarray(np.arange(120, dtype=np.int64).reshape(4, 5, 6)),
        np.arange(120, dtype=np.float64).reshape(6, 5, 4).T,
    ],
    ids=["uint16", "negative strides", "big-endian int16", "big-endian float32", "Fortran int64", "transposed float64"],
)
def test_any_numeric_array_keeps_its_values(array, backend):
    """H49"""
    assert (whole(gq.Volume("a", {"image": array}), backend=backend)["image"][0, 0].numpy() == array).all()


def test_the_field_of_view_ends_half_a_voxel_beyond_the_outer_centres(backend):
    """H50: a row of ten ones, sampled at 9 + s."""
    row = np.ones((10, 1, 1))
    for s, near, lin in [(0.3, 1, 0.7), (0.49, 1, 0.51), (0.51, 0, 0.49)]:
        volume = gq.Volume("a", {"image": row.astype(np.float32), "label": row.astype(np.uint8)})
        batch = whole(volume, [fixed(translation=(-s, 0, 0))], backend=backend)
        assert batch["label"][0, 0, 9, 0, 0] == near
        assert batch["image"][0, 0, 9, 0, 0].item() == pytest.approx(lin, abs=1e-5)


def test_a_patch_carries_the_affine_of_its_own_first_voxel():
    """H51: also where padding moves the start below 0; a centred patch larger than the volume is pad then crop."""
    affine = np.diag([0.5, 1.0, 2.0, 1.0])
    affine[:3, 3] = 10, 20, 30
    volume = gq.Volume("a", {"image": np.random.default_rng(0).random((6, 7, 8)).astype(np.float32)}, affine)
    for size in (3, 20):
        with gq.GPUQueue([volume], size, 9, device="cpu") as queue:
            for batch in queue:
                origin = batch["affine"][:, :3, 3].numpy()
                assert np.allclose(origin, affine[:3, 3] + batch["start"].numpy() * (0.5, 1, 2))
    assert batch["start"][0].tolist() == [-7, -6, -6]
    inside = batch["image"][0, 0, 7:13, 6:13, 6:14]
    assert torch.equal(inside, volume["image"][0])


@pytest.mark.parametrize("orientation", ["RAS", "LPS", "PSR", "ILA", None])
@pytest.mark.parametrize("stored", STORED, ids=str)
def test_crops_flips_and_reorientations_are_bit_exact(stored, orientation, backend):
    """The delivered dtype of the stored value, slope and intercept applied in float32."""
    rng = np.random.default_rng(1)
    values = torch.from_numpy(rng.integers(0, 120, (2, 9, 10, 11))).to(stored)
    affine = np.eye(4)
    affine[:3, :3] = np.array([[0, -1.5, 0], [0, 0, 2.0], [1.0, 0, 0]])
    scale = np.array([[0.37, -5.5], [1.0, 0.0]])
    volume = gq.Volume("a", {"image": values}, affine, scale={"image": scale})
    assert volume.arrays["image"].dtype == stored
    reference = reoriented(volume.grid(), orientation) if orientation else volume.grid()
    truth = volume["image"].numpy()
    with gq.GPUQueue(
        [volume],
        (4, 5, 6),
        16,
        augment=[gq.RandomFlip((0, 1, 2))],
        device="cpu",
        orientation=orientation,
        backend=backend,
        return_parameters=True,
    ) as queue:
        for batch in queue:
            for row, parameters in enumerate(batch["parameters"]):
                points = slow.source_points(reference.affine, reference.shape, affine, parameters["affine"], None)
                whole_grid = truth[(slice(None), *np.round(points).astype(int))]
                start = batch["start"][row].numpy()
                assert (batch["image"][row].numpy() == slow.crop(whole_grid, start, (4, 5, 6), 0)).all()


@pytest.mark.parametrize("millimetres", [2, 3])
def test_a_centred_oblique_change_of_spacing_breaks_every_tie_the_same_way(millimetres, backend):
    """All samples lie half-way between voxels: labels agree with the rule on every voxel."""
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", (17, 23, -31), degrees=True).as_matrix()
    affine[:3, 3] = 312.7, -45.1, 77.7
    label = np.random.default_rng(0).integers(0, 9, (24, 36, 48)).astype(np.uint8)
    volume = gq.Volume("a", {"label": label}, affine)
    out = whole(volume, spacing=millimetres, backend=backend)["label"][0].numpy()
    reference = respaced(volume.grid(), (millimetres,) * 3)
    points = slow.source_points(reference.affine, reference.shape, affine, np.eye(4), None)
    assert (out == slow.nearest(label[None], points, [0])).all()


@pytest.mark.parametrize("orientation", [None, "RAS", "PIR"])
def test_a_pure_change_of_grid_equals_nibabels(orientation, backend):
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", (7, -13, 21), degrees=True).as_matrix() * (0.9, 1.4, 2.1)
    rng = np.random.default_rng(0)
    image = rng.random((21, 24, 19)).astype(np.float32)
    label = rng.integers(0, 5, image.shape).astype(np.uint8)
    volume = gq.Volume("a", {"image": image, "label": label}, affine)
    batch = whole(volume, spacing=(1.3, 1.1, 1.7), orientation=orientation, backend=backend, pad={"image": 0.25})
    shape = tuple(batch["image"].shape[2:])
    target = (shape, batch["affine"][0].numpy())
    expected = resample_from_to(nib.Nifti1Image(image, affine), target, order=1, mode="grid-constant", cval=0.25)
    assert np.abs(batch["image"][0, 0].numpy() - expected.get_fdata()).max() < 1e-5
    expected = resample_from_to(nib.Nifti1Image(label, affine), target, order=0, mode="grid-constant")
    points = slow.source_points(target[1], shape, affine, np.eye(4), None)
    clear = (np.abs(points + 0.5 - np.round(points + 0.5)) > 5e-3).all(axis=0)
    assert clear.mean() > 0.9
    assert (batch["label"][0, 0].numpy() == expected.get_fdata())[clear].all()


@pytest.mark.parametrize("shape", [(20, 24, 1), (1, 24, 20), (20, 1, 24)])
def test_an_axis_of_one_voxel_takes_no_part(shape, backend):
    """Rotations stay in the plane, nothing is scaled or displaced along the axis: no voxel of a slice is lost."""
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", (11, 8, 5), degrees=True).as_matrix() * (1, 1, 5)
    axis = shape.index(1)
    rng = np.random.default_rng(0)
    volume = gq.Volume("a", {"image": rng.random(shape).astype(np.float32) + 1}, affine)
    augment = [gq.RandomAffine((0.8, 0.9), 25, 8), gq.RandomElasticDeformation(6, 1.0)]
    with gq.GPUQueue(
        [volume], shape, 6, augment=augment, device="cpu", backend=backend, return_parameters=True, pad={"image": 0}
    ) as queue:
        (batch,) = queue
    for row, parameters in enumerate(batch["parameters"]):
        forward = parameters["affine"]
        points = slow.source_points(affine, shape, affine, forward, parameters["control_points"])
        assert np.abs(points[axis]).max() < 1e-9
        assert np.abs(np.linalg.det(forward[:3, :3])) < 0.85
        expected = slow.linear(volume["image"].numpy(), points, [0])
        assert np.abs(batch["image"][row].numpy() - expected).max() < 1e-4


def test_voting_labels_follow_the_summed_weights_of_their_neighbours(backend):
    """`label_interpolation="vote"` against a one-hot linear read in float64, ties and thresholds apart; never a new
    value, and still a copy where whole voxels move."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 4, (5, 6, 5)).repeat(4, 0).repeat(4, 1).repeat(4, 2).astype(np.uint8)
    volume = gq.Volume("a", {"image": coarse.astype(np.float32), "label": coarse})
    augment = [fixed((11, -17, 23), (1.1, 0.9, 1.0)), gq.RandomElasticDeformation(7, 1.2)]
    batch = whole(volume, augment, backend=backend, label_interpolation="vote", pad={"label": 0})
    drawn = batch["parameters"][0]["affine"], batch["parameters"][0]["control_points"]
    points = slow.source_points(np.eye(4), coarse.shape, np.eye(4), *drawn)
    weights = slow.linear(np.stack([coarse == c for c in range(4)]), points, [1, 0, 0, 0])
    best = np.sort(weights, axis=0)
    clear = best[-1] - best[-2] > 0.06  # fractions are rounded to 1/128 on three axes
    assert clear.mean() > 0.8
    assert (batch["label"][0, 0].numpy() == weights.argmax(0))[clear].all()
    assert torch.equal(
        whole(volume, backend=backend, label_interpolation="vote")["label"][0, 0], torch.from_numpy(coarse).long()
    )


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_transform_that_is_not_applied_leaves_every_bit(name, batch_size, backend):
    """H58 as far as a CPU goes: p of 0, 0.5 and 1, with one and several patches; p of 0 leaves every bit."""
    rng = np.random.default_rng(0)
    volume = gq.Volume("a", {"image": rng.random((24, 24, 24)).astype(np.float32)})
    changed = {}
    for p in (0, 0.5, 1):
        augment = [type(t).__new__(type(t)) for t in TRANSFORMS[name]]
        for new, old in zip(augment, TRANSFORMS[name]):
            new.__dict__.update(old.__dict__ | {"p": p} | ({"flip_probability": 1.0} if name == "flip" else {}))
        with gq.GPUQueue(
            [volume], 24, 24, batch_size=batch_size, augment=augment, device="cpu", backend=backend
        ) as queue:
            same = [torch.equal(image, volume["image"]) for batch in queue for image in batch["image"]]
        changed[p] = 1 - np.mean(same)
    assert changed[0] == 0 and changed[1] == 1 and 0.1 < changed[0.5] <= 1
