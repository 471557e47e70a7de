"""Benchmarks of the policy server."""
