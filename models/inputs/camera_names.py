"""Camera names as datasets, suites and clients spell them: `observation/front`,
`observation.images.front`, `image/front` and `front` name one camera.
"""

from collections.abc import Sequence

_GROUPS = {"observation", "image", "images"}


def plain_name(key: str) -> str:
    """A key without the parts that say only that it is an observation or an image."""
    parts = key.replace("/", ".").split(".")
    while len(parts) > 1 and parts[0] in _GROUPS:
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
