"""Attention over segments: one function, `attend`, and its implementations."""
