"""RLDS datasets, read without TensorFlow."""
