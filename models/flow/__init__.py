"""Flow matching: its time and noise, the sampler, and chunks that continue the previous one."""
