# %% [markdown]
# # Plan a thousand GPUs
#
# Before you rent machines, you want to know: will the model fit, how should it be split, how long
# will it take, what will it cost, and how often will something break? This notebook computes the
# answers on your CPU from the model's own jaxpr; no GPU is needed. Times are predictions, not
# measurements: `docs/planning.md` says what is exact and what is assumed.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np

from parallel.planning.predict import profiler
from parallel.planning.reliability import Recovery, daly, goodput, mean_time_between_failures
from parallel.planning.scaling import curve
from tools.plan import Machines, PlannedRun, describe, plan

# %% tags=["parameters"]
PRESET = "pi05"  # π0.5 as released, 3.4 billion parameters
GPUS = 1024
REMATS = ("none", "dots", "full")  # what may be computed again in backward
SIZES = (8, 32, 128, 512, 1024, 4096, 10_240)  # clusters to compare

# %% [markdown]
# ## The question
#
# A run is a preset with a global batch size. Machines are a kind of GPU, the number of GPUs, and
# the network between nodes.

# %%
run = PlannedRun(preset=PRESET, rows=8 * GPUS, dataset_frames=100_000_000)
machines = Machines(gpus=GPUS, gpu="h100", nic_gbps=400, price_per_gpu_hour=2.5)
task, cluster, found = plan(run, machines, ("bf16",), REMATS)
network = cluster.across.bandwidth * 8e-9
print(
    f"{cluster.devices:,} {cluster.chip.name}, {cluster.node} to a node, {network:.0f} Gbit/s each"
)
print(f"{task.rows:,} rows of {task.samples:.1f} samples; {len(found):,} ways to run it fit")

# %% [markdown]
# `plan` has tried every mesh (data × fsdp × stage × context × tensor), every number of
# micro-batches and the choices of what to recompute. This is the fastest that fits:

# %%
best = found[0]
best

# %% [markdown]
# ## All that fit
#
# Each point is one way to run the same step. Only a few points are near the lower edge, and the
# choice is not obvious: sharding the state (fsdp) saves memory, while splitting layers (tensor,
# stage) costs communication or idle time.

# %%
limit = cluster.chip.memory * cluster.chip.memory_share / 2**30
fig, ax = plt.subplots(figsize=(8, 4), layout="constrained")
sharded = np.array([way.choice.sizes["fsdp"] for way in found])
split = np.array([way.choice.sizes["tensor"] * way.choice.sizes["stage"] > 1 for way in found])
memory = np.array([way.bytes / 2**30 for way in found])
step = np.array([way.step for way in found])
for mask, marker, label in (
    (~split, "o", "data and fsdp alone"),
    (split, "x", "with tensor or stage"),
):
    if mask.any():
        dots = ax.scatter(
            memory[mask], step[mask], 18, np.log2(sharded[mask]), marker=marker, label=label,
            cmap="viridis", vmin=0, vmax=np.log2(sharded.max()) + 1,
        )  # fmt: skip
ax.axvline(limit, color="C3", ls="--", label="usable memory of a GPU")
ax.set(xlabel="memory of a GPU, GiB", ylabel="seconds a step", yscale="log")
ax.legend()
fig.colorbar(dots, label="log₂ of the fsdp axis")
plt.show()

# %% [markdown]
# ## Where a step goes
#
# The figure shows the best choice for each way of splitting, and what its step time is spent on.
# "Slowest device" is the time spent waiting for the unluckiest device of all: with more devices,
# there is always an unlucky one.

# %%
ways = {}
for way in found:
    axes = tuple(axis for axis, size in way.choice.sizes.items() if size > 1)
    ways.setdefault(axes, way)
few = list(ways.values())[:6]
fig, ax = plt.subplots(figsize=(8, 0.5 * len(few) + 1.2), layout="constrained")
left = np.zeros(len(few))
for part in best.parts:
    seconds = np.array([way.parts[part] for way in few])
    ax.barh(range(len(few)), seconds, left=left, label=part)
    left += seconds
ax.set_yticks(range(len(few)), [str(way.choice).split(",")[0] for way in few], fontsize=8)
ax.invert_yaxis()
ax.set(xlabel="seconds")
ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## Time and money
#
# `describe` adds how long an epoch of 100 million samples takes and what it costs, including the
# time lost to saves and failures.

# %%
told = describe(run, cluster, best)
print(f"samples a second    {told['samples_per_second']:,.0f}")
print(f"an epoch            {told['epoch_hours']:.2f} h for ${told['epoch_cost']:,.0f}")
print(f"save every          {told['save_every_seconds'] / 60:.0f} min")
print(f"goodput             {told['goodput']:.1%}")

# %% [markdown]
# ## Something always breaks
#
# One GPU fails every few years. Among a thousand GPUs, one fails every two days. Saving too seldom
# loses work, and saving too often wastes time. The best interval follows from these two losses
# (Young and Daly), and the optimum is flat.

# %%
recovery = Recovery(run.save_seconds, run.restart_seconds)
minutes = np.geomspace(0.5, 600, 60)
fig, ax = plt.subplots(figsize=(8, 3.2), layout="constrained")
for i, devices in enumerate((GPUS, 4 * GPUS, 16 * GPUS)):
    mtbf = mean_time_between_failures(devices, cluster.failures)
    shares = [goodput(60 * interval, recovery, mtbf) for interval in minutes]
    often = daly(recovery.save, mtbf)
    label = f"{devices:,} GPUs, one failure in {mtbf / 3600:,.0f} h"
    ax.plot(minutes, shares, color=f"C{i}", label=label)
    ax.plot(often / 60, goodput(often, recovery, mtbf), "o", color=f"C{i}")
ax.set(xscale="log", xlabel="minutes between saves", ylabel="share of time that counts")
ax.legend(fontsize=8)
plt.show()

# %% [markdown]
# ## From eight to ten thousand
#
# At every size, each GPU has the same number of rows. Each point is the best choice at that size,
# and a month of it is simulated with failures.

# %%
profiles = profiler(task, cluster.chip)
points = curve(task, cluster, SIZES, recovery, REMATS, ("bf16",), profiles)

fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
devices = [point.devices for point in points]
rates = np.array([point.best.samples_per_second for point in points])
axes[0].loglog(devices, rates, "o-", label="predicted")
axes[0].loglog(
    devices, rates[0] / devices[0] * np.array(devices), "--", color="grey", label="perfect"
)
axes[0].set(xlabel="GPUs", ylabel="samples a second")
axes[0].legend()
axes[1].semilogx(devices, [point.efficiency for point in points], "o-", label="efficiency")
axes[1].semilogx(devices, [point.simulated for point in points], "s-", label="goodput, simulated")
axes[1].fill_between(
    devices, [p.low for p in points], [p.high for p in points], alpha=0.2, color="C1"
)
axes[1].set(xlabel="GPUs", ylim=(0, 1.05))
axes[1].legend()
plt.show()

# %% [markdown]
# ## What if?
#
# Each question takes a few seconds. What would a slower network do to this batch?

# %%
for gbps in (400, 200, 100, 50):
    across = replace(cluster.across, bandwidth=gbps * 1e9 / 8)
    (point,) = curve(
        task, replace(cluster, across=across), (GPUS,), recovery, REMATS, ("bf16",), profiles
    )
    hidden = point.best.parts["exposed communication"] / point.best.step
    print(f"{gbps:4} Gbit/s: step {point.best.step:.3f} s, {hidden:5.1%} waits for the network, "
          f"{point.best.choice}")  # fmt: skip

# %% [markdown]
# ## Next
#
# `python -m tools.plan --preset pi05 --gpus 1024 --compile` also compiles the best choice for the
# chip, without having one, and reports the exact memory. You can use the mesh directly in a run:
# `python -m tools.train … --mesh.fsdp 8`.
