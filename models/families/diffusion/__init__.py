"""Diffusion Policy: the model, its noise schedules and samplers, and LeRobot's checkpoints of
it."""

CONFIGS = {"diffusion": "model"}
PARTS = ()
