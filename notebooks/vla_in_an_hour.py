# %% [markdown]
# # A VLA in an hour
#
# A vision-language-action policy (VLA) looks at camera images, reads an instruction, and answers
# with a *chunk*: the next few actions of a robot. In this notebook you make one from scratch: you
# record demonstrations, look at the batches it learns from, train it, see what it looks at, and
# let it act. You need JAX but no accelerator. The notebook takes a few minutes on two CPU cores;
# the rest of the hour is for reading.

# %%
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from data import open_dataset
from data.loader.loader import Loader
from data.packing.plan import Plan
from models import load_policy
from models.attention.attention import attend
from models.files.terminal import Console, Progress
from parallel.monitor.metrics import read_metrics
from sim.suites import load_suite
from tools.recipes import training
from tools.recipes.conditions import conditions, evaluate_all
from tools.recipes.prepare import prepare
from tools.recipes.presets import RowsConfig, load_preset
from tools.recipes.recording import RecordConfig, record_dataset

# %% tags=["parameters"]
EPISODES = 512  # demonstrations to record
STEPS = 600  # of training
STARTS = 64  # to act from, none of them seen in training

# %% [markdown]
# ## Demonstrations
#
# A scripted expert shows how a gripper goes to the red, green or blue block. The physics is MJX,
# so all episodes run at once in one JAX program. The result is a LeRobot v3.0 dataset: parquet and
# mp4, as you would get it from a robot.

# %%
out = Path("runs/vla_in_an_hour")
shutil.rmtree(out, ignore_errors=True)
console = Console()

with Progress(console=console) as progress:
    bar = progress.add_task("Recording", total=EPISODES)
    record_dataset(
        RecordConfig(out / "dataset", suite="tabletop-reach", episodes=EPISODES),
        lambda done, total: progress.update(bar, completed=done),
    )
dataset = open_dataset(out / "dataset")
dataset

# %%
episode = dataset.episode(0)
episode

# %% [markdown]
# The policy has to find out where the block is from the camera image, and which block is meant
# from the instruction. The gripper's fingers have nothing to do in this task; the checks before
# training will warn about that.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 2.5), layout="constrained")
for ax, column in zip(axes, ("observation.state", "action"), strict=True):
    ax.plot(episode[column], label=dataset.features[column]["names"])
    ax.set(title=column, xlabel="frame")
    ax.legend(fontsize=7)
plt.show()

# %% [markdown]
# ## A packed batch
#
# Samples differ in length: more cameras or a longer instruction mean more tokens. Instead of
# padding each sample to the longest, we lay samples end to end in rows of one size. A *plan* says
# which sample goes where. It is made from lengths alone, before any image is decoded. (Here the
# lengths hardly differ; `mend_a_dataset` mixes robots with one and with two cameras.)

# %%
preset = load_preset("tiny")
preset = replace(preset, rows=RowsConfig(number=8, samples=4))
ready = prepare(str(out / "dataset"), out / "run", preset, console)
sources = ready.sources()
plan = Plan(sources, preset.layout(sources), preset.rows.number)
plan

# %%
with Loader(ready.mixed.feeds, ready.processor, plan, threads=0) as loader:
    batch, _ = next(loader)
batch

# %% [markdown]
# The images of the first row, one for each of its samples:

# %%
drawn = plan.rows(0)[0]
fig, axes = plt.subplots(1, len(drawn), figsize=(2 * len(drawn), 2.4), layout="constrained")
for ax, image, draw in zip(np.atleast_1d(axes), batch.images[0], drawn, strict=False):
    ax.imshow(image)
    ax.set_title(f"episode {draw.episode}, frame {draw.frame}", fontsize=8)
    ax.axis("off")
plt.show()

# %% [markdown]
# The next figure shows all rows, place by place. A *segment* is one sample's part of its row;
# segment 0 is padding. `prefix_source` says which token fills a place: image tokens are numbered
# first, then words, then the state.

# %%
segment = np.asarray(batch.prefix_segment)
pictures = plan.layout.images * plan.layout.tokens_per_image
kind = np.digitize(batch.prefix_source, [pictures, pictures + plan.layout.text]) + 1
fig, axes = plt.subplots(2, 1, figsize=(9, 3.6), sharex=True, layout="constrained")
drawing = {"aspect": "auto", "interpolation": "nearest"}
axes[0].imshow(np.ma.masked_equal(segment, 0), cmap="tab10", vmin=0, vmax=9, **drawing)
axes[0].set(title="segment: whose place it is (white: padding)", ylabel="row")
axes[1].imshow(np.ma.masked_where(segment == 0, kind), cmap="viridis", vmin=0, vmax=3, **drawing)
axes[1].set(
    title="kind: picture (blue), word (green), state (yellow)", ylabel="row", xlabel="place"
)
plt.show()

# %% [markdown]
# ## Segment masks
#
# A sample must not attend to its neighbours. One function, `attend`, does all attention here, and
# its mask is one rule: a query sees a key if their segments are equal and not 0. With one-hot
# values, the output of `attend` *is* the attention: one block for each sample.

# %%
row = jnp.asarray(segment[:1])
places = row.shape[1]
q, k = jax.random.normal(jax.random.key(0), (2, 1, places, 1, places))
one_hot = jnp.eye(places)[None, :, None]
weights = attend(q, k, one_hot, row, row).out[0, :, 0]

fig, axes = plt.subplots(1, 2, figsize=(8, 3.8), layout="constrained")
axes[0].imshow((row[0, :, None] == row[0]) & (row[0] > 0), cmap="Greys", interpolation="nearest")
axes[0].set(title="mask", xlabel="key", ylabel="query")
axes[1].imshow(weights, cmap="magma", vmax=float(weights.max()) / 3, interpolation="nearest")
axes[1].set(title="attention of random queries and keys", xlabel="key")
plt.show()

# %% [markdown]
# ## Training
#
# The model has π0.5's architecture with small sizes. A vision tower and a language model read the
# sample. An *action expert* learns, by flow matching, to turn noise into the chunk that the
# demonstrator executed. A run is one folder. You can stop a run and resume it exactly.

# %%
trainer = replace(
    preset.trainer, train_steps=STEPS, eval_every=max(1, STEPS // 4), save_every=STEPS
)
optimizer = replace(preset.optimizer, warmup_steps=STEPS // 6)
preset = replace(preset, trainer=trainer, optimizer=optimizer)
training.run(training.Paths(str(out / "dataset"), out / "run"), preset, console)
policy = load_policy(out / "run")
policy

# %%
metrics = read_metrics(out / "run")
fig, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
for name, style in (("loss", "-"), ("val_loss", "o-")):
    points = [(line["step"], line[name]) for line in metrics if name in line]
    ax.plot(*zip(*points, strict=True), style, label=name)
ax.set(xlabel="step", ylabel="flow matching loss", yscale="log")
ax.legend()
plt.show()

# %% [markdown]
# ## What it looks at
#
# Everything is a pure function of the parameters and a batch, so `jax.grad` can answer questions.
# For example, which pixels change the first sample's actions? We differentiate the sample's chunk
# with respect to *all* images of the row.

# %%
first = jax.tree.map(lambda x: jnp.asarray(x[:1]), batch)
images = first.images.astype(jnp.float32)
noise = jax.random.normal(jax.random.key(1), first.actions.shape)


@jax.jit
@jax.grad
def slope(images):
    chunks = policy.model.sample_actions(policy.params, replace(first, images=images), noise)
    return jnp.abs(chunks[0, 0]).sum()


heat = np.asarray(jnp.abs(slope(images)).sum(-1)[0])  # [image, height, width]

# %%
shown = len(drawn)
fig, axes = plt.subplots(2, shown, figsize=(2 * shown, 4.2), layout="constrained", squeeze=False)
for i in range(shown):
    axes[0, i].imshow(batch.images[0, i])
    axes[1, i].imshow(heat[i], cmap="magma", vmin=0, vmax=heat.max())
    axes[0, i].set_title(f"sample {i + 1}")
    axes[0, i].axis("off")
    axes[1, i].axis("off")
fig.suptitle("Pixels that the first sample's actions depend on")
plt.show()

# %% [markdown]
# After a few hundred training steps, the policy looks at the block that the instruction names, and
# hardly at the others. Packing is also exact: in the images of the sample's neighbours, the slope
# is zero, not just small.

# %%
print("largest slope in its own picture:", f"{heat[0].max():.2g}")
print("largest slope in the others:     ", heat[1:].max(initial=0))

# %% [markdown]
# ## Let it act
#
# The policy now acts from starts that no demonstration had. Two controls show what it uses. In the
# first, the instruction names another block, so the policy should fail to reach the original
# block. In the second, the images are black.

# %%
suite = load_suite("tabletop-reach")
asked = conditions(policy, ("wrong-prompt", "blank-image"))
results = evaluate_all(suite, asked, console, episodes=STARTS)
results["trained"]

# %%
fig, ax = plt.subplots(figsize=(7, 2), layout="constrained")
for y, found in enumerate(results.values()):
    low, high = found.success.interval
    ax.plot([low, high], [y, y], lw=3, color="C0")
    ax.plot(found.success.value, y, "o", color="C0")
ax.set(xlim=(0, 1), xlabel="success, with its 95 % interval")
ax.set_yticks(range(len(results)), list(results))
plt.show()

# %% [markdown]
# One episode, from its start to its end:

# %%
clip = results["trained"].clips[0]
print(results["trained"].episodes[clip.episode].prompt)
stills = clip.frames[np.linspace(0, len(clip.frames) - 1, 6).round().astype(int)]
plt.figure(figsize=(9, 1.6))
plt.imshow(np.concatenate(list(stills), axis=1))
plt.axis("off")
plt.show()

# %% [markdown]
# ## Next
#
# `make demo` does the same at full length, with a report. To use your own data, see
# `mend_a_dataset`. To use a released checkpoint, see `fine_tune_and_debug`. The same call trains
# on a thousand GPUs: see `plan_a_cluster`. Reinforcement learning continues where demonstrations
# end: see `docs/rl.md`.
