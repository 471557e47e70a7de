"""Inputs of a model: packed batches, and how observations and prompts become samples."""
