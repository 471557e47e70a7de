"""GR00T-N1.5: the model, its inputs, and its released checkpoints."""

CONFIGS = {"groot": "model"}
PARTS = ("eagle_turn",)
