"""The frame store, converted from a dataset, and data that is read as if it had been converted."""
