"""π0 and π0.5: the model, its targets and adapters, and openpi's and LeRobot's checkpoints of
it."""
