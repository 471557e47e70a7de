"""Datasets edited: episodes chosen, cut, renamed, joined and encoded otherwise."""
