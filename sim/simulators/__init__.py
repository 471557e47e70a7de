"""Simulators that run in child processes. They import the standard library, numpy and the suite,
and nothing of ours except files in this folder."""
