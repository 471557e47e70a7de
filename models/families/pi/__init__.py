"""π0 and π0.5: the model, its targets and adapters, and its checkpoints in openpi's and LeRobot's
formats; in `fast`, π0-FAST."""

CONFIGS = {"pi": "model", "pi0_fast": "fast.model"}
PARTS = ("fast.written",)
