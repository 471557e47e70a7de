# %% [markdown]
# # Asynchronous RL on a laptop
#
# In this notebook you improve a policy by reinforcement learning on two CPU cores, look at who
# waits for whom, and loosen the one bound that decides it: staleness. A policy that copies
# demonstrations stops where they end. Reinforcement learning lets the policy act, keeps what went
# well and continues from there. Simulators, the acting policy and the learner then wait for each
# other, unless acting may run ahead of learning.

# %%
import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jax
import matplotlib.pyplot as plt

from models.files.terminal import Console, Progress
from parallel.monitor.metrics import read_metrics
from tools.recipes import rl, training
from tools.recipes.closed_loop import read_closed_loop
from tools.recipes.presets import load_preset
from tools.recipes.recording import RecordConfig, record_dataset
from tools.recipes.rl_figures import total
from tools.recipes.rl_presets import load_rl_preset

# %% tags=["parameters"]
EPISODES = 1024  # demonstrations to record
STEPS = 450  # of training by them: a policy that often fails
RL_STEPS = 60  # of learning from its own episodes
COMPARED = 8  # of each run that is compared by its timeline
STARTS = 64  # to judge by, none of them learnt from
GROUPS = 16  # starts in a step
GROUP = 8  # episodes from each start
SLOTS = 128  # episodes at a time

# %% [markdown]
# ## A policy that needs help
#
# The demonstrations show how to reach for the block that the instruction names. The policy gets
# too little training on them. Compiled XLA programs are cached, because the runs below share them.

# %%
out = Path("runs/asynchronous_rl")
shutil.rmtree(out, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", str(out.absolute() / "programs"))
console = Console()

with Progress(console=console) as progress:
    bar = progress.add_task("Recording", total=EPISODES)
    record_dataset(
        RecordConfig(out / "dataset", suite="tabletop-reach", episodes=EPISODES),
        lambda done, total: progress.update(bar, completed=done),
    )
preset = load_preset("tiny")
trainer = replace(preset.trainer, train_steps=STEPS, eval_every=STEPS, save_every=STEPS)
optimizer = replace(preset.optimizer, warmup_steps=STEPS // 6)
preset = replace(preset, trainer=trainer, optimizer=optimizer)
copied = training.run(training.Paths(str(out / "dataset"), out / "copied"), preset, console)

# %% [markdown]
# ## Groups
#
# The objective is GRPO. From each start, the policy acts a *group* of episodes, which differ
# because of noise within its flow sampler. An episode's advantage is its success minus its group's
# mean. A group in which all episodes succeed or all fail teaches nothing. No value head is needed.
#
# A step learns from 16 such groups. With staleness 1, a group may begin one update early: before
# the update that precedes the one that learns from it. By construction, acting is then at most one
# policy behind, and nothing is thrown away.

# %%
config = load_rl_preset("tabletop-grpo")
rollout = replace(
    config.rollout, suite="tabletop-reach", groups=GROUPS, group=GROUP, slots=SLOTS, staleness=1
)
config = replace(
    config, rollout=rollout, learner_steps=RL_STEPS, eval_every=max(1, RL_STEPS // 3),
    eval_episodes=STARTS, save_every=RL_STEPS,
)  # fmt: skip
result = rl.run(rl.RlPaths(out / "copied", out / "improved"), config, console)

# %%
judged = read_closed_loop(out / "improved")
steps = [line for line in read_metrics(out / "improved") if "success" in line]
fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
axes[0].plot([s["step"] for s in steps], [s["success"] for s in steps], color="0.7",
             label="in training, with noise")  # fmt: skip
axes[0].plot([j["step"] for j in judged], [j["success"]["rate"] for j in judged], "o-",
             label=f"{STARTS} held-out starts")  # fmt: skip
axes[0].set(xlabel="update", ylabel="success", ylim=(0, 1))
axes[0].legend()
lags = sorted({name for step in steps for name in step if name.startswith("lag/")})
axes[1].stackplot([s["step"] for s in steps], [[s.get(name, 0) for s in steps] for name in lags],
                  labels=[f"{name[4:]} updates old" for name in lags])  # fmt: skip
axes[1].set(xlabel="update", ylabel="decisions that it learns from")
axes[1].legend(loc="lower left")
plt.show()
print("before:", judged[0]["success"]["rate"], " after:", judged[-1]["success"]["rate"])

# %% [markdown]
# ## Who waits for whom
#
# Every slot, the policy and the learner record what they are doing. The next cell runs the same
# few steps with three bounds. Bound 0 is synchronous RL, in which acting stops while the learner
# learns. In the figure, time begins after the learner's longest update, in which its program is
# compiled.

# %%
timelines = {}
for staleness in (0, 1, 2):
    folder = out / f"staleness-{staleness}"
    compared = replace(
        config, rollout=replace(rollout, staleness=staleness), learner_steps=COMPARED,
        eval_every=COMPARED, eval_episodes=1, save_every=COMPARED,
    )  # fmt: skip
    rl.run(rl.RlPaths(out / "copied", folder), compared, console)
    timelines[staleness] = json.loads((folder / "timeline.json").read_text())


# %%
def spans(trace):
    """Lane by lane: (begin, seconds, what, cause of a wait or None)."""
    events = trace["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    found = defaultdict(list)
    for e in events:
        if e.get("ph") == "X":
            cause = e.get("args", {}).get("cause")
            found[names[e["tid"]]].append((e["ts"] / 1e6, e["dur"] / 1e6, e["name"], cause))
    return found


def lane_of(name):
    return 1 if name.startswith("inference") else 2 if name.startswith("learner") else 0


COLOURS = ("C0", "C2", "C3")
fig, axes = plt.subplots(3, 1, figsize=(9, 5), sharex=True, layout="constrained")
for ax, (staleness, trace) in zip(axes, timelines.items(), strict=True):
    lanes = spans(trace)
    slots = [name for name in lanes if name.startswith("slot")]
    learnt = [part for name in lanes if lane_of(name) == 2 for part in lanes[name]]
    begun = max((s, begin + s) for begin, s, _, cause in learnt if cause is None)[1]
    for name, parts in lanes.items():
        row = lane_of(name)
        if row or name == slots[0]:
            worked = [(begin - begun, s) for begin, s, _, cause in parts if cause is None]
            ax.broken_barh(worked, (row - 0.4, 0.8), color=COLOURS[row])
    ax.set_yticks(range(3), ["a slot", "inference", "learner"])
    ax.set(title=f"staleness {staleness}")
    ax.set_xlim(left=0)
    ax.invert_yaxis()
axes[-1].set(xlabel="seconds")
plt.show()

# %% [markdown]
# The gaps in the learner's lane are the times when it waits. The next figure sums them over the
# updates after the first:

# %%
waits = [total(read_metrics(out / f"staleness-{s}")[1:], "idle/") for s in timelines]
left = [0.0] * len(waits)
fig, ax = plt.subplots(figsize=(8, 2.2), layout="constrained")
for cause in sorted(set().union(*waits)):
    seconds = [wait.get(cause, 0.0) for wait in waits]
    ax.barh(range(3), seconds, left=left, label=cause)
    left = [a + b for a, b in zip(left, seconds, strict=True)]
for staleness, seconds in zip(timelines, left, strict=True):
    print(f"staleness {staleness}: the learner waited {seconds:.1f} s")
ax.set_yticks(range(3), [f"staleness {s}" for s in timelines])
ax.set(xlabel="seconds that the learner waited, by cause")
ax.invert_yaxis()
ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# On two cores, simulators, policy and learner share the same processors, so overlapping hides a
# wait only where a core would have been idle. With an accelerator to learn on, or simulators on
# other machines, overlapping hides the rest: `docs/results/rl.md` has measurements. Open a run's
# `timeline.json` in <https://ui.perfetto.dev> to look at every slot.
#
# ## Next
#
# `--preset tabletop-ppo` keeps simulators, policy and learner in one program on the device.
# `--placement disaggregated` spreads them over several machines with Ray. `--population 4` tunes
# hyperparameters while learning. `docs/rl.md` describes all of this.
