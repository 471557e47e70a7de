"""How a policy improves: asynchronous reinforcement learning over sim, models and parallel."""
