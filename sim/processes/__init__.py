"""Simulators in separate processes."""
