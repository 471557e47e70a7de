"""A run's metrics sent to Weights & Biases, MLflow, trackio, or a tracker of one's own."""
