r"""LeRobot's half of the families benchmark: training steps of its ACT and its Diffusion Policy.

Run by the Python (3.12) of an environment that has LeRobot 0.6.1, never imported by ours:

    pip install 'lerobot[diffusion]==0.6.1' torch==2.11.0 torchvision==0.26.0

It reads one JSON object a line on stdin and answers each with one on stdout:

    {"run": "make", "policy": "act", "samples": 8, "threads": 2}
          -> {"parameters": n, "versions": {...}}: a policy and a batch
    {"run": "step"}  -> {"seconds": s}: normalisation, forward, backward, clipping and the update by
          the optimizer that the policy's config sets, as lerobot-train takes a step, of one batch
          that is in memory: two cameras of 96 x 96, a state and actions of 6

The script ends when stdin ends.
"""

# ruff: noqa: E402

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

answers, sys.stdout = sys.stdout, sys.stderr
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
HERE = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != HERE]  # holds a lerobot.py

import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

SIDE, DIMS, CAMERAS = 96, 6, ("observation.images.front", "observation.images.wrist")
POLICIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "act": (
        ACTConfig,
        {
            "chunk_size": 20,
            "n_action_steps": 20,
            "dim_model": 128,
            "n_heads": 4,
            "dim_feedforward": 512,
            "n_encoder_layers": 2,
            "n_vae_encoder_layers": 2,
        },
    ),
    "diffusion": (
        DiffusionConfig,
        {
            "horizon": 16,
            "n_action_steps": 8,
            "down_dims": (64, 128, 256),
            "use_group_norm": True,
            "use_separate_rgb_encoder_per_camera": False,
        },
    ),
}


class Trained:
    """A policy with its optimizer and one batch."""

    def __init__(self, name: str, samples: int):
        kind, sizes = POLICIES[name]
        picture = PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE))
        state = PolicyFeature(FeatureType.STATE, (DIMS,))
        inputs = {"observation.state": state, **dict.fromkeys(CAMERAS, picture)}
        outputs = {"action": PolicyFeature(FeatureType.ACTION, (DIMS,))}
        config = kind(
            input_features=inputs,
            output_features=outputs,
            device="cpu",
            pretrained_backbone_weights=None,
            push_to_hub=False,
            **sizes,
        )
        torch.manual_seed(0)
        features = inputs | outputs
        statistics = {
            key: {
                "mean": torch.zeros(shape := _scale_shape(feature)),
                "std": torch.ones(shape),
                "min": -torch.ones(shape),
                "max": torch.ones(shape),
            }
            for key, feature in features.items()
        }
        self.policy = get_policy_class(name)(config)
        self.prepare, _ = make_pre_post_processors(config, dataset_stats=statistics)
        preset = config.get_optimizer_preset()
        self.clip = preset.grad_clip_norm
        self.optimizer = preset.build(self.policy.get_optim_params())
        lead = (samples, config.n_obs_steps) if name == "diffusion" else (samples,)
        steps = sizes.get("horizon", sizes.get("chunk_size"))
        self.batch = {key: torch.rand(*lead, *feature.shape) for key, feature in inputs.items()}
        self.batch["action"] = torch.rand(samples, steps, DIMS)
        self.batch["action_is_pad"] = torch.zeros(samples, steps, dtype=torch.bool)
        self.policy.train()

    def step(self) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        loss, _ = self.policy.forward(self.prepare(dict(self.batch)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def _scale_shape(feature: PolicyFeature) -> tuple[int, ...]:
    return (3, 1, 1) if feature.type is FeatureType.VISUAL else feature.shape


def serve() -> None:
    """Answers each line of stdin."""
    trained = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any]
        if asked["run"] == "make":
            torch.set_num_threads(asked["threads"])
            trained = Trained(asked["policy"], asked["samples"])
            size = sum(p.numel() for p in trained.policy.parameters())
            versions = {package: version(package) for package in ("lerobot", "torch")}
            answer = {"parameters": size, "versions": versions}
        elif asked["run"] == "step" and trained is not None:
            answer = {"seconds": trained.step()}
        else:
            raise ValueError(f"{line.strip()}: run must be make, then step")
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
