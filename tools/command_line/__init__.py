"""Shared by the commands: how they end, ask for consent, and say versions."""
