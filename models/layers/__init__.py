"""Layers and stacks: linear layers with FP8, Gemma, Qwen3, SigLIP, DiT, and how they are
pipelined."""
