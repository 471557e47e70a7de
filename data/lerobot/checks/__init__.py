"""Checks of what only LeRobot datasets have: their metadata, and the videos of their cameras."""
