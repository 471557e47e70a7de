"""Bytes of a LoRA training step at released sizes on one GPU, by the format of its frozen base: the
steps of the presets `pi05-qlora` and `groot-qlora`, compiled for an H100 that need not be there.
"""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from models.files.terminal import Console
from models.model import QuantizedTrainable, groups_of, rules_of
from parallel.mesh import MeshConfig
from parallel.optimizer import with_groups
from parallel.planning.deviceless import CompiledStep, compile_step, devices
from tools.bench.attempt import tell
from tools.recipes.presets import RunConfig, presets

SAMPLES, CAMERAS, TEXT = 4, 3, 64
"""Largest number of samples in a row, and each sample's pictures and text tokens."""
GPU_BYTES = 24e9
BASES = ("float32", "bfloat16", "float8", "int8", "nf4")
_CASES = tuple((preset, n) for n in (4, 1, 16) for preset in ("pi05-qlora", "groot-qlora"))


def with_base(config: RunConfig, base: str) -> RunConfig:
    """A preset of adapters with its frozen base kept as `base`. "float32" keeps all of it in
    float32; the others keep what they do not quantise in bfloat16."""
    plain = base in ("float32", "bfloat16")
    model = config.model.computing(
        quantized="" if plain else config.model.compute.quantized,
        quantized_kind="float8" if plain else base,
    )
    frozen: Any = "float32" if base == "float32" else "bfloat16"
    return replace(config, model=model, optimizer=replace(config.optimizer, frozen_dtype=frozen))


def compiled(config: RunConfig, samples: int) -> CompiledStep:
    """The training step on `samples` samples on one H100."""
    model, row = config.model.build(), min(samples, SAMPLES)
    places = row * (CAMERAS * config.model.tokens_per_image + TEXT)
    layout = config.model.layout(prefix=places, samples=row, images=row * CAMERAS, text=row * TEXT)
    optimizer = replace(config.optimizer, decay_steps=config.optimizer.warmup_steps + 1)
    return compile_step(
        QuantizedTrainable(model),
        with_groups(optimizer, groups_of(model)),
        rules_of(model),
        MeshConfig(),
        layout,
        samples // row,
        topology="1x1x1",
    )


def run(console: Console) -> dict[str, Any]:
    """Compiles every case; the ratio is that of π0.5's bytes at peak with f32 to those with NF4.

    Raises:
      ImportError: the compiler is not installed (extra `plan`).
    """
    devices()
    state: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    peak: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for preset, samples in _CASES:
        for base in BASES:
            memory = compiled(with_base(presets()[preset], base), samples).memory
            state[preset][str(samples)][base] = memory.arguments / 1e9
            peak[preset][str(samples)][base] = memory.peak / 1e9
            fits = "fits" if memory.peak < GPU_BYTES else "does not fit"
            console.print(
                f"{preset}, {samples} samples, {base}: state {memory.arguments / 1e9:.2f} GB, peak "
                f"{memory.peak / 1e9:.2f} GB, {fits} 24 GB",
                highlight=False,
            )
            tell(console, {"unit": "GB of 1e9 bytes", "state": state, "peak": peak})
    preset, samples = _CASES[0]
    ours, other = (peak[preset][str(samples)][base] for base in ("nf4", "float32"))
    return {
        "ratio": other / ours,
        "ours": f"{ours:.2f} GB at peak in NF4",
        "other": f"{other:.2f} GB in f32",
        "unit": "GB of 1e9 bytes",
        "state": state,
        "peak": peak,
    }
