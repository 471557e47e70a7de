"""SmolVLA: the model, its inputs, and its checkpoints in LeRobot's format."""

CONFIGS = {"smolvla": "model"}
PARTS = ("inputs",)
