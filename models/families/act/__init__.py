"""ACT: the model, and LeRobot's files of it."""

CONFIGS = {"act": "model"}
PARTS = ()
