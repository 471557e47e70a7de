"""`torch.randn` of a seeded generator on a CPU, in NumPy, so that a fixture of a peer's can say how
its weights were drawn instead of holding them: they agree to the last bits."""

import math

import numpy as np


class TorchNormal:
    """Draws of a generator with a seed, one array after the other."""

    def __init__(self, seed: int):
        self._raw = np.random.MT19937()
        self._raw._legacy_seeding(seed)
        self._spare: float | None = None

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        count = math.prod(shape)
        if count < 16:
            return np.array([self._one() for _ in range(count)], np.float32).reshape(shape)
        uniform = self._uniform(count)
        out = np.empty(count, np.float32)
        whole = count // 16 * 16
        out[:whole] = _normal(uniform[:whole])
        if count % 16:
            out[count - 16 :] = _normal(self._uniform(16))
        return out.reshape(shape)

    def _words(self, count: int) -> np.ndarray:
        return self._raw.random_raw(count).astype(np.uint64) & 0xFFFFFFFF

    def _uniform(self, count: int) -> np.ndarray:
        return (self._words(count) & 0xFFFFFF) * 2.0**-24

    def _one(self) -> float:
        if self._spare is not None:
            value, self._spare = self._spare, None
            return value
        high = self._words(4).tolist()
        first, second = (
            ((a << 32 | b) & ((1 << 53) - 1)) * 2.0**-53
            for a, b in zip(high[::2], high[1::2], strict=True)
        )
        radius, angle = math.sqrt(-2 * math.log1p(-second)), 2 * math.pi * first
        self._spare = radius * math.sin(angle)
        return radius * math.cos(angle)


def _normal(uniform: np.ndarray) -> np.ndarray:
    """Box-Muller in blocks of sixteen: eight radii, then eight angles."""
    blocks = uniform.reshape(-1, 2, 8)
    radius, angle = np.sqrt(-2 * np.log(1 - blocks[:, 0])), 2 * np.pi * blocks[:, 1]
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return both.astype(np.float32).reshape(-1)


def qwen_weights(
    shapes: dict[str, tuple[int, ...]], seed: int, factors: dict[str, float]
) -> dict[str, np.ndarray]:
    """Weights as the cases of Qwen3-VL and GR00T-N1.7 draw them, names in order, at a scale at
    which every part matters; `factors`: of names that end so."""
    draw, made = TorchNormal(seed), {}
    tables = "embed_tokens.weight", "pos_embed.weight", "position_embedding.weight"
    for name, shape in sorted(shapes.items()):
        noise = draw(shape)
        if "norm" in name or "vlln" in name:
            made[name] = name.endswith("weight") + np.float32(0.1) * noise
        elif len(shape) == 1:
            made[name] = np.float32(0.1) * noise
        elif name.endswith(tables):
            made[name] = np.float32(0.5) * noise
        else:
            fan = shape[1] if len(shape) == 3 else math.prod(shape[1:])
            made[name] = noise / np.float32(fan**0.5)
        factor = next((x for end, x in factors.items() if name.endswith(end)), 1)
        made[name] = (made[name] * np.float32(factor)).astype(np.float32)
    return made


def smooth_pictures(sizes: list[tuple[int, int]], seed: int) -> list[np.ndarray]:
    """The cases' pictures, uint8 [h, w, 3]: waves with a plain block."""
    rng, made = np.random.default_rng(seed), []
    for high, wide in sizes:
        y, x = np.mgrid[0:high, 0:wide].astype(np.float64)
        planes = []
        for _ in range(3):
            (fy, fx), (p, q) = rng.uniform(0.01, 0.12, 2), rng.uniform(0, 6.28, 2)
            planes.append(0.5 + 0.25 * np.sin(fy * y + p) + 0.25 * np.cos(fx * x + q))
        image = np.stack(planes, -1)
        image[high // 4 : high // 2, wide // 3 : wide // 2] = rng.uniform(0, 1, 3)
        made.append((image * 255).round().astype(np.uint8))
    return made
