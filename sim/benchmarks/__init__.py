"""Benchmark suites whose simulators run in an environment of their own."""
