"""Parts of vision towers: ResNet, and FiLM by the prompt."""
