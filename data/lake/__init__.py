"""Work on large datasets: lists of independent units, here or on a cluster, and a table of which
dataset was made from which."""
