"""What is acted on: simulated environments, experts, evaluation and reports. Knows policies as
functions."""
