"""Simulation: environments, experts, evaluation and reports. Knows policies as functions."""
