"""Folders, local or remote: names that stay inside, checksums, limits, cached results; and work on
them in units."""
