"""Benchmarks of datasets, loaders and plans."""
