"""Reading, writing and upgrading of LeRobot datasets, v2.0 to v3.0."""
