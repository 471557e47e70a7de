"""Files of checkpoints, ours and other codes': found, read, renamed, verified and written."""
