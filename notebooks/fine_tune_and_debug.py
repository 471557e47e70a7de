# %% [markdown]
# # Fine-tune a released checkpoint, and debug it before it moves a robot
#
# You have a released π0.5 and a few recordings of your robot. In this notebook you fine-tune the
# policy on the recordings, compare its chunks with the recorded ones, and then break something on
# purpose to see how you would find the fault. Released weights have billions of parameters. A
# stand-in in the same format, with few and random parameters, lets you follow on a laptop. The
# calls are the same.

# %%
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import sentencepiece

from data import open_dataset
from data.lerobot.writer import DatasetWriter
from models import Policy, load_policy
from models.files.terminal import Console
from models.load import inspect_params
from sim.open_loop import BLIND, HOLD, MEAN, POLICY
from tools.convert_checkpoint import convert
from tools.recipes import open_loop, training
from tools.recipes.presets import RowsConfig, load_preset

# %% tags=["parameters"]
EPISODES = 40  # recorded
STEPS = 600  # of fine-tuning
OBSERVATIONS = 256  # to look at open loop

# %% [markdown]
# ## The recording
#
# A robot follows a ball that moves in circles. The base camera shows the ball; the wrist camera
# shows only the gripper's own shadow. The action is the position of the ball, so one base image is
# enough to tell where the ball is now. To tell where it will be, the policy needs that image and
# also the state, which is where the gripper was a moment ago.

# %%
out = Path("runs/fine_tune_and_debug")
shutil.rmtree(out, ignore_errors=True)
console = Console()

BASE, WRIST = "observation.images.base", "observation.images.wrist"
place = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
video = {"dtype": "video", "shape": (32, 32, 3), "names": ["height", "width", "channels"]}
features = {"observation.state": place, "action": place, BASE: video, WRIST: video}
y, x = np.mgrid[-1:1:32j, -1:1:32j]

with DatasetWriter(out / "robot", fps=10, features=features, robot_type="follower") as writer:
    for number in range(EPISODES):
        rng = np.random.default_rng(number)
        turned = rng.uniform(0, 6) + rng.choice([-0.3, 0.3]) * np.arange(40)
        ball = rng.uniform(0.4, 0.8) * np.stack([np.cos(turned), np.sin(turned)], 1)
        state, action = ball[:-2].astype(np.float32), ball[2:].astype(np.float32)
        near = np.hypot(x - action[:, :1, None], y - action[:, 1:, None]) < 0.2
        seen = np.where(near[..., None], (60, 40, 40), (235, 235, 225)).astype(np.uint8)
        shadow = np.broadcast_to(np.where(x[..., None] < 0, (90,) * 3, (120,) * 3), seen.shape)
        pictures = {BASE: seen, WRIST: shadow.astype(np.uint8)}
        writer.add_episode(
            {"observation.state": state, "action": action}, pictures, "follow the ball"
        )
open_dataset(out / "robot").episode(0)

# %% [markdown]
# ## The checkpoint
#
# An openpi checkpoint is a folder of parameters. The tokenizer is a separate file (PaliGemma's).
# We make small ones. If you have the real ones, `checkpoint` and `tokenizer` are their paths; for
# the checkpoint, this can also be `gs://openpi-assets/checkpoints/pi05_base`.

# %%
preset = load_preset("tiny")
model = preset.model.changed(image_size=32, horizon=10, state_input="text", film=False)
released = Policy(model.build(), model.build().init(jax.random.key(0)), None)
checkpoint, tokenizer = out / "released", out / "tokenizer.model"
convert(released, checkpoint, "openpi")

words = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["Task: follow the ball, State: 0 1 2 3 4 5 6 7 8 9;\nAction: "] * 9),
    model_writer=words, vocab_size=48, hard_vocab_limit=False, minloglevel=2,
)  # fmt: skip
tokenizer.write_bytes(words.getvalue())
sorted(str(path.relative_to(checkpoint)) for path in checkpoint.iterdir())

# %% [markdown]
# `inspect_params` recognises the kind of a checkpoint by its files, and its sizes by the shapes in
# them. You do not have to declare anything.

# %%
inspect_params(checkpoint).config

# %% [markdown]
# ## Fine-tune
#
# With `init`, training starts from the checkpoint. Where the released model has more dimensions
# than your robot, the rest is padded. The cameras are those of your dataset. On a GPU with 24 GB,
# use the preset `pi05-qlora`, which trains adapters on a 4-bit base.

# %%
config = replace(
    preset,
    model=model,
    rows=RowsConfig(number=8, samples=4),
    trainer=replace(
        preset.trainer, train_steps=STEPS, eval_every=max(1, STEPS // 4), save_every=STEPS
    ),
    optimizer=replace(preset.optimizer, warmup_steps=STEPS // 6),
)
paths = training.Paths(str(out / "robot"), out / "run", init=checkpoint, tokenizer=tokenizer)
training.run(paths, config, console)
policy = load_policy(out / "run")
policy

# %% [markdown]
# ## Open loop
#
# The policy is shown observations from episodes that it was not trained on, and its chunks are
# compared with the recorded ones. Baselines that know nothing are compared in the same way: one
# repeats the last action, another always gives the mean. A policy should at least beat these two.

# %%
look = open_loop.OpenLoopConfig(
    str(out / "robot"), out / "run", out / "open_loop", observations=OBSERVATIONS
)
found = open_loop.run(look, console)
found

# %% [markdown]
# The table's last column shows how much the chunks change when an input is taken away. Without its
# base camera, the policy is as bad as one constant action. It relies on what it sees there, as it
# should. A black wrist image hurts too, although there is nothing to see in a real one: the policy
# was not trained on black images. So a change shows that an input is read, not that it is needed.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for name in (POLICY, HOLD, MEAN, BLIND):
    axes[0].plot(1 + np.arange(model.horizon), found.errors[name].by_step, ".-", label=name)
axes[0].set(xlabel="step of the chunk", ylabel="error, in action scales", ylim=(0, None))
axes[0].legend(fontsize=8)

episode = found.worst[0]
recorded = open_dataset(out / "robot").episode(episode)["action"]
axes[1].plot(recorded[:, 0], color="black", lw=2, label="recorded")
for i in np.flatnonzero(found.recorded.episode == episode)[::3]:
    frames = found.recorded.frame[i] + np.arange(model.horizon)
    axes[1].plot(frames, found.predicted[POLICY][i, :, 0], color="C0", lw=1)
axes[1].set(xlabel="frame", ylabel="x", title=f"the worst episode, {episode}")
axes[1].legend(fontsize=8)
plt.show()

# %% [markdown]
# ## Break something
#
# The most common faults are not in the network: two camera cables are swapped, or a state has
# other units. The next cell reads the same recording as if the cables had been swapped. How would
# you notice?

# %%
swapped = {"datasets": [{"path": "robot", "cameras": {BASE: WRIST, WRIST: BASE}}]}
(out / "swapped.json").write_text(json.dumps(swapped))
broken = open_loop.run(replace(look, data=str(out / "swapped.json"), out=out / "broken"), console)
broken

# %% [markdown]
# The policy is now as bad as one constant action, and hardly worse without the camera that it
# relied on. Side by side, the fault is obvious. On the robot, you would only see that "it does not
# work".

# %%
names = [name for name in found.errors if name in broken.errors]
fig, ax = plt.subplots(figsize=(8, 3), layout="constrained")
for shift, result, label in ((-0.2, found, "as recorded"), (0.2, broken, "cameras swapped")):
    means = [result.errors[name].mean for name in names]
    ax.barh(np.arange(len(names)) + shift, means, 0.35, label=label)
ax.set_yticks(range(len(names)), names, fontsize=8)
ax.invert_yaxis()
ax.set(xlabel="mean error, in action scales")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## And back
#
# You can write the fine-tuned policy in the format that it came from, with the scales of your
# robot, for the authors' own stack.

# %%
convert(policy, out / "exported", "openpi")
sorted(str(path.relative_to(out / "exported")) for path in (out / "exported").iterdir())

# %% [markdown]
# ## Next
#
# `report.html` in the `open_loop` folder shows the worst episodes as videos, and what the policy
# looks at. `docs/debugging.md` lists what to check when open-loop results are fine and the robot
# is not. Then `python -m tools.serve --checkpoint …` answers openpi's client.
