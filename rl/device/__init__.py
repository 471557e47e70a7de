"""RL with environments and learner in one program on the device."""
