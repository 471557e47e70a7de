"""Benchmarks of the planner's predictions."""
