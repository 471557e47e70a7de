"""Planning for machines that are not available: memory, cost, FLOPs, reliability, scaling."""
