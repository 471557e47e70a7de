"""Features of an RLDS dataset's step, from TFDS's features.json, and its values as numpy arrays.

TFDS flattens each nested feature into one key of an Example and stores all steps of an episode
under it, end to end. Features that are neither numbers, images nor text are left out (source:
tensorflow/datasets, core/features and core/example_serializer.py).
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import UInt8

from data.errors import short
from data.files.names import plain_name
from data.video.still_images import decode_picture

STEPS = "steps/"


@dataclass(frozen=True)
class Leaf:
    """One feature: its key in the Example and, for numbers and images, the type and shape of one
    value.

    A `shape` may contain None. `encoding` is that of a tensor: "none", "bytes" or "zlib".
    """

    key: str
    kind: Literal["tensor", "image", "text"]
    dtype: str = "string"
    shape: tuple[int | None, ...] = ()
    encoding: str = "none"

    @property
    def name(self) -> str:
        """Its column's name: the key within the step, parts joined by dots."""
        return self.key.removeprefix(STEPS).replace("/", ".")

    @property
    def size(self) -> int:
        """Numbers per step."""
        return math.prod(n for n in self.shape if n is not None)

    @property
    def is_camera(self) -> bool:
        """True for an ordinary image, encoded or as pixels."""
        if self.dtype != "uint8" or len(self.shape) != 3:
            return False
        return self.kind == "image" or self.shape[2] == 3

    @property
    def is_depth(self) -> bool:
        """True for an image of more than 8 bits a channel."""
        return self.kind == "image" and self.dtype != "uint8"

    @property
    def is_column(self) -> bool:
        """True if it has the same number of values, or one text, at every step."""
        return self.kind == "text" or (
            self.kind == "tensor" and not self.is_camera and None not in self.shape
        )


def read_leaves(features: Any) -> list[Leaf]:
    """All features of features.json that can be read, those of the steps under `STEPS`. Their names
    become file names, so the "/" between the parts becomes a dot.

    Raises:
      ValueError: the JSON does not have TFDS's form, or a name could be a path; says where.
    """
    found = list(_leaves(features, ""))
    if not any(leaf.key.startswith(STEPS) for leaf in found):
        raise ValueError("has no dataset of 'steps', so this is not an RLDS dataset")
    names = [leaf.name for leaf in found if leaf.key.startswith(STEPS)]
    for name in names:
        plain_name(name)
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"has two features that are both called {min(twice)!r} here")
    return found


def decode_column(leaf: Leaf, values: Any, steps: int) -> np.ndarray:
    """The values of a column's feature as [steps, *shape], a scalar's as [steps, 1].

    Raises:
      ValueError: there are more or fewer values than the declared shape needs, or they are of
        another kind.
    """
    shape = tuple(n for n in leaf.shape if n is not None) or (1,)
    if leaf.kind == "text" or leaf.encoding != "none":
        if not isinstance(values, list) or len(values) != steps:
            raise ValueError(f"holds {len(values)} values in {steps} steps")
        if leaf.kind == "text":
            return np.array([text.decode() for text in values], object).reshape(steps, 1)
        size = math.prod(shape) * np.dtype(leaf.dtype).itemsize
        raw = [_unpacked(v, size) if leaf.encoding == "zlib" else v for v in values]
        return np.stack([np.frombuffer(v, leaf.dtype).reshape(shape) for v in raw])
    if (isinstance(values, list) and values) or len(values) != steps * leaf.size:
        raise ValueError(f"holds {len(values)} values in {steps} steps of shape {shape}")
    return np.asarray(values).astype(leaf.dtype).reshape(steps, *shape)


def decode_pictures(leaf: Leaf, values: Any, steps: int) -> UInt8[np.ndarray, "t h w 3"]:
    """The images of a camera's feature.

    Raises:
      ValueError: there are more or fewer images than steps, or one cannot be decoded.
    """
    if leaf.kind == "tensor":
        return decode_column(leaf, values, steps)
    if not isinstance(values, list) or len(values) != steps:
        raise ValueError(f"holds {len(values)} images in {steps} steps")
    return np.stack([_picture(leaf, step, value) for step, value in enumerate(values)])


def _unpacked(packed: bytes, size: int) -> bytes:
    """Unpack data that zlib packed, to little more than the expected `size`."""
    try:
        return zlib.decompressobj().decompress(packed, size + 1)
    except zlib.error as error:
        raise ValueError(f"cannot be unpacked ({error})") from None


def _picture(leaf: Leaf, step: int, encoded: bytes) -> UInt8[np.ndarray, "h w 3"]:
    try:
        found = decode_picture(encoded, ("JPEG", "PNG"))
    except ValueError as error:
        raise ValueError(f"its image of step {step} cannot be decoded ({error})") from None
    if any(want not in (None, n) for want, n in zip(leaf.shape[:2], found.shape, strict=False)):
        raise ValueError(f"its image of step {step} is {found.shape}, not {leaf.shape}")
    return found


def _leaves(node: Any, key: str) -> list[Leaf]:
    if not isinstance(node, Mapping):
        raise ValueError(f"'{key}' is {short(node)}, not a description of a feature")
    try:
        if "featuresDict" in node:
            inner = node["featuresDict"]["features"].items()
            return [leaf for name, n in inner for leaf in _leaves(n, f"{key}/{name}".lstrip("/"))]
        if "sequence" in node and key == STEPS[:-1]:
            return _leaves(node["sequence"]["feature"], key)
        if "text" in node:
            return [Leaf(key, "text")]
        for kind in ("tensor", "image"):
            if kind in node:
                of = node[kind]
                sizes = of["shape"].get("dimensions", ())
                shape = tuple(int(n) if int(n) >= 0 else None for n in sizes)
                dtype, encoding = of["dtype"], of.get("encoding", "none")
                if dtype == "string":
                    return [Leaf(key, "text")] if not shape else []
                dtype = "float32" if dtype == "bfloat16" and encoding == "none" else dtype
                return [Leaf(key, kind, np.dtype(dtype).name, shape, encoding)]
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"'{key}' is not described as TFDS does ({error!r})") from None
    return []
