"""The frame store: converted from a dataset, and what is read as if it had been."""
