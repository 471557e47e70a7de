"""Layouts that many recordings share, as their authors' scripts write them."""

from collections.abc import Mapping
from typing import Any

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "aloha": {
        "fps": 50,
        "robot": "aloha",
        "columns": {"observation.state": "observations/qpos", "action": "action"},
        "cameras": {"observation.images.*": "observations/images/*"},
    },
    "robomimic": {
        "fps": 20,
        "robot": "panda",
        "task": {"from": "/data@env_args.env_name"},
        "episodes": "data/demo_*",
        "columns": {
            "observation.state": [
                "obs/robot#_eef_pos",
                "obs/robot#_eef_quat",
                "obs/robot#_gripper_qpos",
            ],
            "action": "actions",
        },
        "cameras": {"observation.images.*": "obs/*_image"},
    },
    "libero": {
        "fps": 20,
        "robot": "libero",
        "task": {"file": r"(?:[A-Z_]+SCENE\d+_)?(.+?)(?:_demo)?"},
        "episodes": "data/demo_*",
        "columns": {
            "observation.state": ["obs/ee_states", "obs/gripper_states"],
            "action": "actions",
        },
        "cameras": {
            "observation.images.image": {"from": "obs/agentview_rgb", "turned": True},
            "observation.images.image2": {"from": "obs/eye_in_hand_rgb", "turned": True},
        },
    },
    "diffusion_policy": {
        "fps": 10,
        "columns": {
            "observation.state": {"from": "state", "dims": [0, 1]},
            "action": "action",
        },
        "cameras": {"observation.image": "img"},
    },
    "umi": {
        "fps": 60,
        "robot": "umi",
        "columns": {
            name: [
                "robot#_eef_pos",
                "robot#_eef_rot_axis_angle",
                "robot#_gripper_width",
            ]
            for name in ("observation.state", "action")
        },
        "cameras": {"observation.images.*": "*_rgb"},
    },
    "rlds": {
        "task": {"from": "language_instruction"},
        "columns": {"*": "*"},
        "cameras": {"observation.images.*": "observation.*"},
    },
}
"""ALOHA's `record_sim_episodes.py` and `record_episodes.py`; robomimic's and LIBERO's
`create_dataset.py`; diffusion policy's PushT in its `ReplayBuffer`; UMI's replay buffer, where an
action is the pose itself, as in its loader; all numbers and images of RLDS, under its names. A
layout of your own adds other data of theirs by `"like"`."""
