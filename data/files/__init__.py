"""Folders, local or remote: names that stay inside, checksums, limits and cached results, and jobs
that work on folders in units."""
