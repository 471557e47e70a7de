"""Frames of videos and images, decoded and sought exactly."""
