"""Checks of a dataset before hours are spent on it."""
