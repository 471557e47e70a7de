"""Asynchronous reinforcement learning that improves a policy, over sim, models and parallel."""
