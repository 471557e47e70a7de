"""GR00T-N1.7: the model, its inputs, and its released checkpoints."""
