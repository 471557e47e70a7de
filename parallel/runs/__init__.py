"""A run's folder: its files written whole, locked, mirrored, and read again."""
