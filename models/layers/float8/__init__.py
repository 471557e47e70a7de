"""Numbers in float8 with a scale for each block, and their products."""
