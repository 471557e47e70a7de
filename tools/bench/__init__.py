"""Benchmarks for every speed the project claims: `python -m tools.bench NAME [--json]`."""
