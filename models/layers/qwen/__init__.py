"""Qwen's language model, its vision tower, and the places of pictures' tokens among its words."""
