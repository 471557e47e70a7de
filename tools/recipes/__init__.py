"""Recipes: what assembles a run from the folders below, for commands, notebooks and scripts."""
