"""Exact statistics of a dataset's features and pixels."""
