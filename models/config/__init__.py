"""Configs as JSON, and bounds on what a file may declare."""
