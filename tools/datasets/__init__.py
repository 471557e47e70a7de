"""Parts of `python -m tools.data`: its larger commands and tables."""
