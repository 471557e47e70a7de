"""The packing plan: which samples stand in which row, a pure function of metadata and seed."""
