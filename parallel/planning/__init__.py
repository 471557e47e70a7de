"""Planning for machines one does not have: memory, cost, FLOPs, reliability, scaling."""
