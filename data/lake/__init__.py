"""Datasets in the large: work as lists of independent units, here or on a cluster, and a table of
what was made of what."""
