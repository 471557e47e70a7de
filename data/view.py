"""An episode to look at: as one page for a browser, and as a recording for rerun's viewer."""


def dimension_names(names: object, size: int) -> list[str]:
    """Names of a feature's dimensions, which datasets give as a list, a dict of lists or not at
    all."""
    if isinstance(names, dict):
        names = next(iter(names.values()), None)
    if isinstance(names, list) and len(names) == size:
        return [str(name) for name in names]
    return [str(dim) for dim in range(size)]
