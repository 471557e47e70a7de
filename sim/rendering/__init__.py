"""Ray-cast pictures of simulated scenes."""
