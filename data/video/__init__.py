"""Frames of videos and pictures, decoded and sought exactly."""
