"""Parts of `python -m tools.data`: its larger commands, tables and progress bars."""
