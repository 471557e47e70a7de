"""A run's metrics sent to Weights & Biases, MLflow, trackio, or a user's own tracker."""
