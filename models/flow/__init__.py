"""Flow matching: its time and noise, the Euler sampler, and chunks that continue the last."""
