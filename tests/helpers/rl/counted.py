"""A run of the RL loop that counts what it does."""

from contextlib import nullcontext
from typing import ClassVar

import jax.numpy as jnp
from rich.console import Console

from parallel.monitor.metrics import read_metrics
from rl.config import RlConfig
from tests.helpers.parallel.opened import Run
from tests.helpers.rl.opened import improve

QUIET = Console(quiet=True)
CONFIG = RlConfig(learner_steps=7, eval_every=3, save_every=2)


class Counting:
    """A placement whose steps multiply and add, so that order and number of them show. It gives up
    a step where `at(step, told)` says so."""

    environment: ClassVar = {"name": "counting", "source": "sha256:1", "max_steps": 7}

    def __init__(self, at=lambda step, should_stop: False):
        self.ema, self.moment, self.number, self.at = jnp.float32(1), jnp.float32(0), 0, at

    def run(self, on_step, should_stop, until):
        while self.number < until and not should_stop():
            if self.at(self.number, should_stop):
                return
            self.number += 1
            self.moment = 0.5 * self.moment + self.number
            self.ema = self.ema * 1.01 + self.moment
            on_step({"loss": float(self.ema), "success": 0.5})

    def state(self):
        return {"ema": {"w": self.ema}, "rl": {"moment": self.moment}}

    def record(self):
        return {"number": self.number}

    def restore(self, state, record):
        self.ema, self.moment = state["ema"]["w"], state["rl"]["moment"]
        self.number = record["number"]


def run(out, place=None, config=CONFIG, **options):
    place = place or Counting()
    at = Run(out, {"rl": "a test"}, {})
    return improve(lambda: nullcontext(place), at, config, QUIET, **options)


def losses(out):
    return [(row["step"], row["loss"]) for row in read_metrics(out) if "loss" in row]
