"""Benchmarks of kernels and models."""
