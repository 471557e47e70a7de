"""Simulators as child processes run them: the standard library, numpy and the suite, nothing of
ours besides what lies in this folder."""
