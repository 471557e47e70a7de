"""RL's schedule simulated: latencies, events and environments that only wait."""
