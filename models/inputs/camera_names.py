"""Camera names as datasets, suites and clients spell them: `observation/front`,
`observation.images.front`, `image/front` and `front` name one camera.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from models.inputs.embodiment import Embodiment

GROUPS = {"observation", "image", "images"}


def plain_name(key: str) -> str:
    """A key without the parts that say only that it is an observation or an image."""
    parts = key.replace("/", ".").split(".")
    while len(parts) > 1 and parts[0] in GROUPS:
        parts = parts[1:]
    return ".".join(parts)


def find_camera(wanted: str, cameras: Sequence[str]) -> int | None:
    """The index of a camera among others: by its whole name, else by its plain one, else by the
    last parts of the others' plain names; None if none match, or several."""
    if wanted in cameras:
        return cameras.index(wanted)
    name, plain = plain_name(wanted), [plain_name(camera) for camera in cameras]
    for alike in ([p == name for p in plain], [p.endswith(f".{name}") for p in plain]):
        if any(alike):
            return alike.index(True) if sum(alike) == 1 else None
    return None


def with_names(robot: Embodiment, cameras: Mapping[str, str]) -> Embodiment:
    """The robot with its own names for cameras of the model. Other cameras keep the model's names
    and may be absent.

    Args:
      cameras: {the robot's name: the model's}.

    Raises:
      ValueError: one is unknown or has two names.
    """
    unknown = sorted(set(cameras.values()) - set(robot.cameras))
    if unknown or len(set(cameras.values())) < len(cameras):
        raise ValueError(
            f"cameras is {dict(cameras)}; give each of the robot's cameras a different one of the "
            f"model's: {list(robot.cameras)}."
        )
    names = {theirs: ours for ours, theirs in cameras.items()}
    keys = robot.keys and replace(
        robot.keys,
        images=tuple((key, names.get(camera, camera)) for key, camera in robot.keys.images),
    )
    return replace(
        robot,
        cameras=tuple(names.get(camera, camera) for camera in robot.cameras),
        absent=tuple(camera for camera in robot.cameras if camera not in names),
        keys=keys,
    )
