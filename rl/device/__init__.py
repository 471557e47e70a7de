"""Placement "colocated": envs, policy and learner on the same devices."""
