"""What is learnt: datasets in and out, statistics, packing plans and loaders. Knows no simulator or
mesh."""

from data.lerobot.dataset import Dataset, open_dataset

__all__ = ["Dataset", "open_dataset"]
