"""Mixtures of datasets: transforms, robots' shared statistics, held-out episodes."""
