"""Data: datasets in and out, statistics, packing plans and loaders. Knows no simulator or mesh."""

from data.dataset import Dataset, Format, open_dataset

__all__ = ["Dataset", "Format", "open_dataset"]
