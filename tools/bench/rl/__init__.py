"""Benchmarks of RL's modes."""
