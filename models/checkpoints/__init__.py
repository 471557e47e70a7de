"""Checkpoints of other codes, in and out: openpi, LeRobot's ports of it, and GR00T-N1.5."""
