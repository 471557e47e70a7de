"""Parts of `python -m tools.data`: commands with much to say, tables and bars."""
