"""Environments in MJX: a tabletop and an arm, their tasks and experts."""
