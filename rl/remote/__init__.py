"""RL with environments and actors on other machines, by Ray."""
