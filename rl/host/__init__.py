"""RL with environments and learner joined on the host, asynchronously."""
