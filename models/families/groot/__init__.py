"""GR00T-N1.5 and N1.7: the models, their inputs, and their released checkpoints. What both share
stands beside N1.5's; what is N1.7's alone is in `n17`."""

CONFIGS = {"groot": "model", "groot17": "n17.model"}
PARTS = ("eagle_turn", "n17.qwen_turn", "n17.pictures", "n17.units")
