# %% [markdown]
# # Look at a dataset and mend it
#
# Most runs that fail, fail because of their data: a sensor that glitched once, an episode saved
# twice, an operator who paused. In this notebook you record a small dataset with such faults, find
# them, fix them without re-encoding video, and look at what training draws.

# %%
import json
import shutil
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from data import open_dataset
from data.edit.edit import edit_dataset
from data.edit.plan import Edit, Trim
from data.lerobot.recording import video_feature
from data.lerobot.writer import DatasetWriter
from data.loader.loader import Loader
from data.packing.plan import Plan
from data.statistics.idle import IdleLimits, find_idle, to_json
from data.statistics.stats import compute
from data.validation.validate import validate
from data.view.view import write_page
from models.files.terminal import Console
from tools.recipes.prepare import prepare
from tools.recipes.presets import RowsConfig, load_preset

# %% tags=["parameters"]
EPISODES = 24

# %% [markdown]
# ## A recording with faults
#
# In this toy world, an instruction tells a dot to go to the red, green or blue disc. A scripted
# expert shows how.

# %%
out = Path("runs/mend_a_dataset")
shutil.rmtree(out, ignore_errors=True)

COLOURS = {"red": (230, 60, 60), "green": (60, 200, 80), "blue": (70, 90, 235)}
AXIS = np.linspace(-1.4, 1.4, 64)


def paint(picture, centre, radius, colour):
    """Paints a disc."""
    picture[np.hypot(AXIS - centre[0], AXIS[:, None] - centre[1]) < radius] = colour


def demonstration(seed, cameras):
    """Columns, pictures and instruction of one episode."""
    rng = np.random.default_rng(seed)
    angles = 2 * np.pi * (rng.random() + np.arange(3) / 3)
    discs = np.stack([np.cos(angles), np.sin(angles)], -1)
    goal = rng.integers(3)
    places, actions, pictures = [], [], []
    place = np.zeros(2)
    while np.linalg.norm(discs[goal] - place) > 0.2:
        picture = np.full((64, 64, 3), 245, np.uint8)
        for disc, colour in zip(discs, COLOURS.values(), strict=True):
            paint(picture, disc, 0.2, colour)
        paint(picture, place, 0.1, (40, 40, 40))
        way = discs[goal] - place
        action = way / np.linalg.norm(way)
        places.append(place)
        actions.append(action)
        pictures.append(picture)
        place = place + 0.05 * (action + 0.4 * rng.normal(size=2))
    columns = {"observation.state": np.float32(places), "action": np.float32(actions)}
    wording = rng.choice(["go to the {} disc", "reach {}"])
    instruction = wording.format(list(COLOURS)[goal])
    return columns, dict.fromkeys(cameras, np.stack(pictures)), instruction


def features(cameras):
    """What a LeRobot dataset of such episodes consists of."""
    numbers = {"dtype": "float32", "shape": (2,), "names": ["x", "y"]}
    videos = dict.fromkeys(cameras, video_feature((64, 64, 3)))
    return {"observation.state": numbers, "action": numbers, **videos}


cameras = ("observation.images.top",)
episodes = [demonstration(seed, cameras) for seed in range(EPISODES)]

# %% [markdown]
# We write the episodes as a LeRobot dataset (columns of numbers, images that become mp4, an
# instruction) with four faults:
#
# - In episode 2, the operator pauses for three seconds.
# - Episode 5 is saved twice.
# - In episode 8, the sensor reports a position a million times too far away.
# - One instruction has a typo.

# %%
with DatasetWriter(out / "raw", fps=10, features=features(cameras), robot_type="dot") as writer:
    for number, (columns, pictures, task) in enumerate(episodes):
        frame = np.arange(len(columns["action"]))
        if number == 2:
            frame = np.insert(frame, 3, [3] * 30)
        columns = {name: values[frame] for name, values in columns.items()}
        pictures = {camera: seen[frame] for camera, seen in pictures.items()}
        if number == 2:
            columns["action"][3:33] = 0
        if number == 8:
            columns["observation.state"][-1] *= 1_000_000
        for _ in range(1 + (number == 5)):
            writer.add_episode(columns, pictures, task + " plaese" * (number == 9))
dataset = open_dataset(out / "raw")
dataset

# %% [markdown]
# ## Look
#
# The table above lists the instructions, and one of them looks odd. In a notebook, an episode
# shows a few of its frames.

# %%
dataset.episode(0)

# %% [markdown]
# `write_page` writes a page that plays the episode in a browser, with videos beside numbers. The
# figure shows the paths of all episodes. You see at once that something is wrong: one position is
# very far away.

# %%
write_page(dataset, 0, out / "episode.html")

fig, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
for i in range(len(dataset.lengths)):
    x, y = dataset.columns(i)["observation.state"].T
    for ax in axes:
        ax.plot(x, y, ".-", lw=0.8)
axes[0].set(title="paths of all episodes", xlabel="x", ylabel="y")
axes[1].set(title="the same, near the middle", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5), xlabel="x")
plt.show()

# %% [markdown]
# ## Check
#
# Training begins with this check, and refuses data that it cannot learn from. Warnings leave the
# decision to you. Each warning names the file, the field and what to do about it.

# %%
for problem in validate(out / "raw"):
    print(f"{problem.severity}: {problem.message}\n")

# %% [markdown]
# One bad frame distorts some statistics and not others. The standard deviation, by which some
# codebases scale states, is off by orders of magnitude. The 1st and 99th percentiles, by which
# π0.5 scales, hardly change.

# %%
for name, values in compute(dataset, None, ["observation.state"])["observation.state"].items():
    if name in ("mean", "std", "q01", "q99", "max"):
        print(f"{name:5}", np.round(values, 3))

# %% [markdown]
# ## Mend
#
# An `Edit` says what changes. It numbers episodes as they were before the edit. Video packets are
# copied, not re-encoded, so every frame that stays is identical, bit for bit. The old dataset is
# left unchanged.

# %%
edit = Edit(
    delete=(6,),  # the second copy of episode 5
    trims=(Trim((9,), 0, int(dataset.lengths[9]) - 1),),  # the last frame of what was episode 8
    task_names=((dataset.task(10), dataset.task(10).removesuffix(" plaese")),),
)
edit_dataset([out / "raw"], out / "clean", edit)
clean = open_dataset(out / "clean")
print("problems left:", validate(out / "clean"))
clean

# %% [markdown]
# ## Idle frames
#
# The pause is not an error, but a policy that sees it learns to pause. `find_idle` looks for
# periods of time in which nothing moves.

# %%
limits = IdleLimits(still=0.01, seconds=1.0)
idle = list(find_idle(clean, limits))

fig, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
for i, found in enumerate(idle):
    frames = np.arange(len(found.moved))
    ax.plot(frames, found.moved, color="C0", lw=0.6)
    if found.still.any():
        ax.fill_between(frames, 0, 1, where=found.still, color="C1", alpha=0.4)
        ax.text(frames[found.still].mean(), 0.5, f"episode {i}", ha="center")
ax.set(xlabel="frame", ylabel="share of the range passed", ylim=(0, None))
print({i: found.kept for i, found in enumerate(idle) if found.still.any()})
plt.show()

# %% [markdown]
# You do not have to cut anything out. A mixture lists the frames that are left, and training draws
# samples from these frames only.

# %%
(out / "idle.json").write_text(json.dumps(to_json(clean, limits, idle)))
print((out / "idle.json").read_text())

# %% [markdown]
# ## A mixture
#
# Most policies learn from several datasets. Here, a second robot has two cameras, and its dataset
# is drawn half as often.

# %%
two = ("observation.images.top", "observation.images.wrist")
with DatasetWriter(out / "two", fps=10, features=features(two), robot_type="two eyes") as writer:
    for seed in range(1000, 1000 + EPISODES):
        writer.add_episode(*demonstration(seed, two))

mixture = {
    "datasets": [
        {"path": "clean", "embodiment": "dot", "frames": "idle.json", "weight": 2},
        {"path": "two", "embodiment": "two eyes", "weight": 1},
    ]
}
(out / "mixture.json").write_text(json.dumps(mixture))
print((out / "mixture.json").read_text())

# %% [markdown]
# Training begins with `prepare`. It checks both datasets, keeps their images in a frame store, and
# computes the scales of each robot. The plan then says which sample goes where.

# %%
preset = load_preset("tiny")
preset = replace(preset, rows=RowsConfig(4, 4), data=replace(preset.data, holdout=0))
ready = prepare(out / "mixture.json", out / "run", preset, Console(quiet=True))
sources = ready.sources()
plan = Plan(sources, preset.layout(sources), preset.rows.number)
plan

# %% [markdown]
# A frame of the second robot takes two image slots of a row. A frame of the first robot takes only
# one. No sample is padded.

# %%
with Loader(ready.mixed.feeds, ready.processor, plan, threads=0) as loader:
    batch, _ = next(loader)

fig, axes = plt.subplots(4, plan.layout.images, figsize=(9, 7.5), layout="constrained")
for row, (draws, line) in enumerate(zip(plan.rows(0), axes, strict=True)):
    titles = []
    for draw in draws:
        cameras = int(sources[draw.source].images[0])
        titles += [
            f"{sources[draw.source].name}\nepisode {draw.episode}, frame {draw.frame}"
        ] * cameras
    for slot, ax in enumerate(line):
        ax.axis("off")
        if slot < len(titles):
            ax.imshow(batch.images[row, slot])
            ax.set_title(titles[slot], fontsize=6)
plt.show()

# %% [markdown]
# The next cell checks, over many batches, that no idle frame is drawn:

# %%
(where,) = (i for i, found in enumerate(idle) if found.still.any())
drawn = [d for step in range(50) for row in plan.rows(step) for d in row]
frames = {d.frame for d in drawn if (d.source, d.episode) == (0, where)}
print("drawn of the episode with the pause:", sorted(frames))
print("idle frames among them:", sum(idle[where].still[frame] for frame in frames))

# %% [markdown]
# ## Next
#
# `python -m tools.train --data runs/mend_a_dataset/mixture.json --preset tiny` trains on this
# mixture. You can also do all of this on the command line: `python -m tools.data validate | edit |
# idle | view | stats | diff`.
