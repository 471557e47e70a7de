"""Simulators in processes of their own."""
