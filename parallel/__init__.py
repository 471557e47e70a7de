"""Parallel training: mesh, sharded train step, checkpoints, trainer. Knows no model by name."""
