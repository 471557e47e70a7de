"""What is learnt: datasets in and out, statistics, packing plans and loaders. Knows no simulator or
mesh."""
