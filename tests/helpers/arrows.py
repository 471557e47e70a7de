"""The arrows between the packages: tests/test_layout.py holds imports to them, and
tests/helpers/rotation.py follows them from what changed."""

ARROWS = {
    "models": set(),
    "data": {"models"},
    "parallel": {"models"},
    "sim": {"models"},
    "rl": {"models", "data", "parallel", "sim"},
    "tools": {"models", "data", "parallel", "sim", "rl"},
    "client": set(),
}
"""Packages that each package may import, besides itself."""
