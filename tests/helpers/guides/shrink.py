"""Commands of the guides at a test's size: every option stays, numbers become small, and presets
and suites are those of stage.py."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STAGE = Path(__file__).with_name("stage.py")


def _preset(found: re.Match[str]) -> str:
    return f"--preset {STAGE}:{found[1].upper().replace('-', '_')}"


_RULES = (
    (r"^JAX_PLATFORMS=cpu ", ""),
    (r"^chiliad ", "python -m tools."),
    (r"(?<!plan )--preset (?!tabletop-ppo|\w+-grpo)([\w-]+)(?=\s|$)", _preset),
    (r"(pi05_libero .*)suite \S+", rf"\1suite {STAGE}:LIBERO"),
    (r"suite (?!/|\S*line(_suite)?\.py)\S+", f"suite {STAGE}:SUITE"),
    (r"(?<![a-z])(?<!out-)tasks( (?!--)\S+)*", "tasks point"),
    (r"held-out-tasks \S+", "held-out-tasks other"),
    (r"--image-size \d+", "--image-size 16"),
    (r"--(draw-every|seed|requests) \d+", r"--\1 2"),
    (r"--takeover 40", "--takeover 4"),
    (r"/checkpoints/\d+", "/checkpoints/2"),
    (r"PATH/metaworld_v30", "PATH"),
    (r"\b(libero|mt[15]0[bc]?|both|push|goal|object|without|three|words)\.json", "mixture.json"),
    (r"evaluate --data mixture", "evaluate --data one"),
    (r"(pi0_fast.*) paligemma_tokenizer", r"\1 pi0_fast_tokenizer"),
    (r" PATH(.* --data-format)", r" episodes\1"),
    (r"gs://openpi-assets/(?=checkpoints/)", ""),
    (r"(N1\.7-3B .*--embodiment) new_embodiment", r"\1 4"),
    (r"fsdp 8 --mesh\.tensor 2", "fsdp 4 --mesh.tensor 2"),
    (r"stage 3 --mesh\.fsdp 8", "stage 2 --mesh.fsdp 4"),
    (r"microbatches 6", "microbatches 2"),
    (r"profile \d+:\d+", "profile 1:2"),
    (r"nan@rank0:step20", "nan@rank0:step1"),
    (r"--host \S+", "--host 127.0.0.1"),
    (r"--population 4", "--population 2"),
    (r"rtc-max-delay 8", "rtc-max-delay 2"),
    (r"launch -n 4", "launch -n 2"),
)
_SECOND = r"(?:data (?:convert|from-robot)|convert_checkpoint|quantize|checkpoint export) \S+"
_OUTPUT = rf"(?:--out|--record|{_SECOND}) (\S+)"
_TRAIN = (
    "--trainer.train-steps 2 --trainer.save-every 1 --trainer.log-every 1 "
    "--optimizer.warmup-steps 1 --trainer.eval-every"
)
_RL = f"--eval-every 1 --eval-episodes 2 --save-every 1 --rollout.suite {STAGE}:SUITE"
_APART = _RL.replace("SUITE", "APART")
_FEW = "--rollout.slots 2 --rollout.groups 2 --rollout.group 2"
_GROUPS = f"--rollout.tasks point {_FEW}"
SMALLER = {
    "train": f"{_TRAIN} 0 --rows.number 2 --rows.samples 1",
    "train --mesh.fsdp": f"{_TRAIN} 0 --rows.number 8 --rows.samples 1",
    "train --trainer.keep-best": f"{_TRAIN} 1 --rows.number 8 --rows.samples 1",
    "train --trainer.patience": f"{_TRAIN} 1 --rows.number 2",
    "train --closed-loop.suite": f"{_TRAIN} 2 --closed-loop.episodes 2 --rows.number 2",
    "launch": f"{_TRAIN} 0 --rows.number 2 --rows.samples 1",
    "launch tools.rl": f"--learner-steps 1 {_RL} {_GROUPS}",
    "record": "--episodes 2 --slots 2",
    "evaluate": "--episodes 1 --slots 1",
    "evaluate --data": "--observations 4 --shown 1",
    "rl": f"--learner-steps 1 {_RL} {_GROUPS}",
    "rl --held-out-tasks": f"--learner-steps 1 {_APART} {_FEW} --rollout.tasks point apart",
    "rl --profile": f"--learner-steps 2 {_RL} {_GROUPS}",
    "rl tabletop-ppo": f"--learner-steps 1 {_RL} --colocated.envs 4 --colocated.unroll 2 "
    "--learner.warmup 0 --learner.micro 8",
    "serve": "--port PORT --sizes 1 --euler-steps 1",
    "serve --fast": "--port PORT --sizes 1",
    "serve --replay": "--port PORT",
    "data convert": "--image-size 16",
}
"""Options of commands with such words, of the longest row that fits; a command's own of that name
are left out."""


def shrunk(command: str) -> str:
    """The command as it is run."""
    command = rewritten(command, _RULES)
    words = command.removeprefix("python -m tools.").split()
    rows = [row for row in SMALLER if words[0] == row.split()[0] and set(row.split()) <= {*words}]
    if not rows or command.endswith("--help") or "--to v3.0" in command:
        return command
    for option in re.findall(r"--(\S+)", smaller := SMALLER[max(rows, key=len)]):
        command = re.sub(rf" --{re.escape(option)} \S+", "", command)
    if "tools.train" in command and "--preset" not in command:
        smaller = f"--preset {STAGE}:TINY {smaller}"
    return f"{command} {smaller}"


def rewritten(text: str, rules: Iterable[tuple[str, Any]]) -> str:
    """The text after each pattern, in turn, was replaced by what stands beside it."""
    for pattern, said in rules:
        text = re.sub(pattern, said, text)
    return text


def outputs(command: str) -> list[str]:
    """Files and folders that a command makes and must not find."""
    return re.findall(_OUTPUT, command)
