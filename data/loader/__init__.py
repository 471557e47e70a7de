"""Loaders: rows of the plan as batches in memory."""
