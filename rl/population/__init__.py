"""Populations of RL runs, bred by their success."""
