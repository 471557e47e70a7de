"""Recordings of other formats, imported as LeRobot v3.0 datasets."""
