"""Checks that only LeRobot datasets need: of their metadata, and of the videos of their cameras."""
