"""Metrics of a run: progress, goodput, spikes, stragglers, waits for data."""
