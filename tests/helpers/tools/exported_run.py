"""An exported policy, run in a process in which our packages cannot be imported."""

import subprocess
import sys

import numpy as np

OURS = ("models", "data", "parallel", "sim", "rl", "tools", "tests", "flax")
BLOCKED = """
import json, runpy, sys
blocked, script, *arguments = sys.argv[1:]
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked.split(","):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocker())
module = runpy.run_path(script)
policy = module["ExportedPolicy"](arguments[0])
with __import__("numpy").load(arguments[1]) as kept:
    given = dict(kept)
prompts, states = given.pop("prompts"), given["state"]
read = [policy.ids(str(p), s) for p, s in zip(prompts, states)]
calls = [policy(**{k: v[i : i + 1] for k, v in given.items()}) for i in range(len(states))]
np = __import__("numpy")
np.savez(arguments[2], actions=np.concatenate(calls), read=sum(read, []))
"""


def ran(folder, inputs, prompts=(), also=()):
    """Answers, one observation a call, of the exported policy in `folder`, and all token ids that
    it reads of the prompts, in a process without our packages."""
    np.savez(folder / "given.npz", **inputs, prompts=np.array(prompts, str))
    command = [sys.executable, "-I", "-c", BLOCKED, ",".join((*OURS, *also))]
    command += [folder / "run.py", folder, folder / "given.npz", folder / "found.npz"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "found.npz") as found:
        return dict(found)
