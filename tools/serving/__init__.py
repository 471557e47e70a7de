"""The policy server: what its messages mean, who may send them, and how they are answered."""
