"""Products in float8, with scales of a whole tensor or of each block."""
