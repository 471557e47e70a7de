"""A run's folder: atomic writes, locking, mirroring, and reading."""
