"""Pictures vary by sample and camera alone, and only in training."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.families.pi.model import Pi
from models.inputs.augment import AugmentConfig, augment, augment_image
from models.inputs.packed_batch import Sample, pack
from models.model import Augmented
from tests.helpers.models.pi_samples import CONFIG, KEY
from tests.helpers.models.pi_samples import samples as of_pi

FULL = AugmentConfig(
    crop=0.8, rotation=20, shift=0.2, brightness=0.3, contrast=0.4, saturation=0.5, hue=0.1
)
CAMERAS = (("front", "left wrist", "side"),)
TOKENS = CONFIG.vision.tokens(8)
MODEL = Pi(CONFIG)
AUGMENT = jax.jit(augment, static_argnums=(2, 3, 4))
PARAMS = jax.tree.map(
    lambda x: 0.2 * np.random.default_rng(x.size).normal(size=x.shape).astype(np.float32),
    jax.eval_shape(MODEL.init, KEY),
)
"""Random everywhere: π0.5 begins with closed gates, behind which no picture is seen."""


def samples(count: int = 4) -> list[Sample]:
    """Samples of one to three cameras; the last sees its embodiment's second and third."""
    rng = np.random.default_rng(3)
    made = [
        replace(sample, images=tuple(rng.integers(0, 256, (1 + i % 3, 8, 8, 3), dtype=np.uint8)))
        for i, sample in enumerate(of_pi(5, count))
    ]
    pair = tuple(rng.integers(0, 256, (2, 8, 8, 3), dtype=np.uint8))
    return [*made[:-1], replace(made[-1], images=pair, cameras=(1, 2))]


def pictures(rows: list[list[Sample]], config: AugmentConfig) -> dict[tuple[int, int], np.ndarray]:
    """Augmented pictures by sample id and camera."""
    layout = CONFIG.layout(prefix=80, samples=4, images=9)
    batch = AUGMENT(pack(rows, layout), KEY, config, CAMERAS, (TOKENS,))
    made = {}
    for row, images in zip(rows, np.asarray(batch.images), strict=True):
        slots = iter(images)
        for sample in row:
            for camera in sample.cameras or range(len(sample.images)):
                made[sample.id, camera] = next(slots)
        assert not any(image.any() for image in slots)
    return made


def test_a_sample_looks_the_same_whatever_it_is_packed_with():
    every = samples()
    together = pictures([every], FULL)
    apart = pictures([[sample] for sample in reversed(every)], FULL)
    assert together.keys() == apart.keys()
    for name, image in together.items():
        np.testing.assert_array_equal(image, apart[name])


def test_cameras_samples_and_steps_vary_each_by_itself():
    sample, other = samples()[1], replace(samples()[1], id=1)
    sample = replace(sample, images=(sample.images[0],) * 3, id=0)
    other = replace(other, images=sample.images)
    made = list(pictures([[sample, other]], replace(FULL, fixed=())).values())
    assert len(made) == 6
    assert len({image.tobytes() for image in made}) == 6
    picture = jnp.asarray(sample.images[0])
    vary = jax.jit(lambda picture, i: augment_image(picture, jax.random.fold_in(KEY, i), FULL))
    steps = [vary(picture, i) for i in range(2)]
    assert (np.asarray(steps[0]) != np.asarray(steps[1])).any()


def test_wrist_cameras_keep_their_geometry_and_are_known_by_name_where_others_are_absent():
    every = samples()
    plain = {
        (sample.id, camera): image
        for sample in every
        for camera, image in zip(sample.cameras or range(3), sample.images, strict=False)
    }
    made = pictures([every], AugmentConfig(crop=0.6, rotation=20))
    changed = {name: (image != plain[name]).any() for name, image in made.items()}
    assert {camera for _, camera in changed} == {0, 1, 2}
    assert all(moved == (camera != 1) for (_, camera), moved in changed.items())


def test_without_augmentation_batch_and_loss_are_untouched_to_the_bit():
    batch = pack([samples()], CONFIG.layout(prefix=80, samples=4, images=9))
    off = AugmentConfig()
    assert augment(batch, KEY, off, CAMERAS, (TOKENS,)) is batch
    plain, same = (
        jax.jit(model.loss)(PARAMS, batch, KEY) for model in (MODEL, Augmented(MODEL, off, CAMERAS))
    )
    assert [float(x) for x in plain] == [float(x) for x in same]


@pytest.mark.slow
def test_the_loss_sees_other_pictures_and_its_gradient_has_the_parameters_shapes():
    batch = pack([samples()], CONFIG.layout(prefix=80, samples=4, images=9))
    model = Augmented(MODEL, FULL, CAMERAS)
    gradient = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    keys = [jax.random.fold_in(KEY, i) for i in range(3)]
    losses = []
    for key in keys:
        (loss, count), gradients = gradient(PARAMS, batch, key)
        losses.append(float(loss / count))
    assert gradient._cache_size() == 1
    assert jax.tree.map(jnp.shape, gradients) == jax.tree.map(jnp.shape, PARAMS)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradients))
    plain, count = jax.jit(MODEL.loss)(PARAMS, batch, keys[0])
    assert abs(losses[0] - float(plain / count)) > 1e-4


def test_a_turn_and_a_crop_read_the_right_pixels():
    """A quarter turn and a half-size cut at known places, drawn with the widest ranges."""
    ramp = np.arange(8, dtype=np.float32) * 20
    picture = np.zeros((8, 8, 3), np.uint8)
    picture[..., 0], picture[..., 1] = ramp[:, None], ramp[None]
    quarter = AugmentConfig(rotation=90)
    for i in range(5):
        key = jax.random.fold_in(KEY, i)
        turn = float(jax.random.uniform(jax.random.split(key)[0], (3,), minval=-1, maxval=1)[2])
        angle, middle = turn * np.pi / 2, 3.5
        made = np.asarray(augment_image(jnp.asarray(picture), key, quarter))
        for y, x in ((2, 5), (4, 3), (5, 2)):
            down, across = y - middle, x - middle
            from_y = np.cos(angle) * down + np.sin(angle) * across + middle
            from_x = np.cos(angle) * across - np.sin(angle) * down + middle
            np.testing.assert_allclose(made[y, x, :2], [20 * from_y, 20 * from_x], atol=0.51)
    cut = np.asarray(augment_image(jnp.asarray(picture), KEY, AugmentConfig(crop=0.5)), int)
    steps = np.diff(cut[..., 0], axis=0)
    assert np.abs(steps - 10).max() <= 1
    assert 0 <= cut[0, 0, 0] <= 80


def test_a_shift_moves_whole_pixels_by_every_amount_up_to_its_share_and_repeats_the_edge():
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    keys = jax.random.split(KEY, 200)
    vary = jax.vmap(lambda k: augment_image(jnp.asarray(picture), k, AugmentConfig(shift=0.25)))
    padded = np.pad(picture, ((2, 2), (2, 2), (0, 0)), "edge")
    moved = {padded[y : y + 8, x : x + 8].tobytes() for y in range(5) for x in range(5)}
    assert {image.tobytes() for image in np.asarray(vary(keys))} == moved


def test_colours_move_as_their_names_say():
    grey = np.full((4, 4, 3), 100, np.uint8)
    red = np.full((4, 4, 3), 80, np.uint8)
    red[..., 0] = 180

    def made(picture: np.ndarray, **strength: float) -> np.ndarray:
        config = AugmentConfig(**strength)
        keys = jax.random.split(KEY, 64)
        return np.asarray(jax.vmap(lambda k: augment_image(jnp.asarray(picture), k, config))(keys))

    levels = made(grey, brightness=0.5)[:, 0, 0]
    assert (levels == levels[:, :1]).all()
    assert 49 <= levels.min() < 60
    assert 140 < levels.max() <= 151
    for strength in ({"contrast": 0.9}, {"saturation": 0.9}, {"hue": 0.5}):
        assert (made(grey, **strength) == 100).all()
    luminance = made(red, saturation=0.9).astype(float) @ [0.299, 0.587, 0.114]
    assert np.abs(luminance - (80 + 0.299 * 100)).max() < 1
    turned = made(red, hue=0.5)[:, 0, 0]
    assert (turned[:, 1] > turned[:, 0]).any()


@pytest.mark.parametrize(
    ("field", "value"), [("crop", 0.0), ("crop", 1.2), ("hue", 0.7), ("rotation", -5)]
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(field, value):
    with pytest.raises(ValueError, match=rf"augment\.{field} is {value}"):
        AugmentConfig(**{field: value})
