"""Data: reading and writing datasets, statistics, packing plans and loaders. Does not depend on
simulators or meshes."""

from data.dataset import Dataset, Format, open_dataset

__all__ = ["Dataset", "Format", "open_dataset"]
