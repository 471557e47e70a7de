"""Modules of the families that are built in, imported when first needed. No other file outside a
family's own folder names it; a user's files are run by `models.files.own_file`."""

CONFIGS = {
    "pi": "models.families.pi.model",
    "pi0_fast": "models.families.pi.fast.model",
    "groot": "models.families.groot.model",
}
"""Families, each with the module that defines its config."""
FORMATS = ("models.families.groot.format", "models.families.pi.format")
"""Modules with checkpoints' `FORMATS`, in the order in which they are tried."""
PARTS = ("models.families.pi.fast.written", "models.families.groot.eagle_turn")
"""Modules that define parts of a preparation."""
PRESETS = ("models.families.pi.presets", "models.families.groot.presets")
"""Modules with `PRESETS`, see `models.families.presets`."""
