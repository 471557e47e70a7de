"""Benchmark suites whose simulators run in their own Python environments."""
