"""Export of a policy as a program that runs without these packages."""
