"""Modules of the families that are built in, imported when first needed: each folder of
models/families is one, and its `__init__.py` says in `CONFIGS` which module of it defines which
family, and in `PARTS` which define parts of a preparation. A user's files are run by
`models.files.own_file`."""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

_FOLDERS = {
    found.name: import_module(f"models.families.{found.name}")
    for found in iter_modules([str(Path(__file__).parents[1] / "families")])
    if found.ispkg
}
CONFIGS = {
    family: f"models.families.{name}.{module}"
    for name, folder in _FOLDERS.items()
    for family, module in folder.CONFIGS.items()
}
"""Families, each with the module that defines its config."""
FORMATS = tuple(f"models.families.{name}.format" for name in _FOLDERS)
"""Modules with checkpoints' `FORMATS`; `models.formats` says in which order they are tried."""
PARTS = tuple(
    f"models.families.{name}.{module}"
    for name, folder in _FOLDERS.items()
    for module in folder.PARTS
)
"""Modules that define parts of a preparation."""
PRESETS = tuple(f"models.families.{name}.presets" for name in _FOLDERS)
"""Modules with `PRESETS`, see `models.families.presets`."""
