"""Reports of evaluations: pages, charts and tables."""
