"""Viewing a dataset as a page or in Rerun."""
