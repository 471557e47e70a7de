"""What `tools.export` writes: a policy as programs that run without these packages."""
