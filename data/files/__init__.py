"""Folders, local or remote: names that stay inside, checksums, limits, cached results."""
