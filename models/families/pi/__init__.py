"""π0 and π0.5: the model, its targets and adapters, and its checkpoints in openpi's and LeRobot's
formats."""
