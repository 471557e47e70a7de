"""Layers and stacks: linear layers with FP8, Gemma, Qwen3, SigLIP, DiT, and their pipelining."""
