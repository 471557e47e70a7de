"""The packing plan: which samples go into which row, a pure function of metadata and seed."""
