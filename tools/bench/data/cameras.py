"""Batches of 480 x 640 pictures compared with LeRobot's DataLoader, with two and with three
cameras.

The rounds are those of `tools.bench data`: straight from AV1, with pictures downscaled to within
one grey level of a store's or equal to the last bit, and from a JPEG store whose pictures have the
model's size.
"""

from functools import partial

from tools.bench.data.data import BenchedRow, compare

WORKS = (
    BenchedRow("two cameras, straight from AV1", "av1_480", "straight", 12, 4),
    BenchedRow("two cameras, straight, to the last bit", "av1_480", "straight, exact", 8),
    BenchedRow("two cameras, JPEG store of 224 x 224", "av1_480", "jpeg", 60),
    BenchedRow("three cameras, straight from AV1", "av1_480_3", "straight", 12, 4),
    BenchedRow("three cameras, straight, to the last bit", "av1_480_3", "straight, exact", 8),
    BenchedRow("three cameras, JPEG store of 224 x 224", "av1_480_3", "jpeg", 60),
)

run = partial(compare, WORKS, "cameras")
