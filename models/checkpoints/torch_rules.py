"""Rules for parts that PyTorch codes store alike: projections ([out, in], heads merged), norms, and
the SigLIP towers and decoders of Hugging Face's transformers, one tensor per layer; and
torchvision's ResNet."""

from collections.abc import Callable

from models.checkpoints.rename import Rule
from models.layers.vision.resnet import DEPTHS, ResnetConfig

PLAIN, STACKED = ("o i -> i o", "o -> o"), ("o i -> l i o", "o -> l o")
"""Axes of a projection's kernel and bias."""


def linear(
    ours: str, theirs: str, axes: tuple[str, ...] = PLAIN, also: tuple[str, ...] = ()
) -> tuple[Rule, ...]:
    """Kernel of a projection, and its bias if `axes` has one; `also`: other names for it."""
    leaves = zip(("kernel", "bias"), ("weight", "bias"), axes, strict=False)
    return tuple(
        Rule(f"{ours}/{own}", f"{theirs}.{leaf}", each, tuple(f"{name}.{leaf}" for name in also))
        for own, leaf, each in leaves
    )


def norm(ours: str, theirs: str, axes: str) -> tuple[Rule, ...]:
    """Scale and bias of a layer norm."""
    return (
        Rule(f"{ours}/scale", f"{theirs}.weight", axes),
        Rule(f"{ours}/bias", f"{theirs}.bias", axes),
    )


def attention(ours: str, theirs: str, names: tuple[str, ...]) -> tuple[Rule, ...]:
    """Queries, keys, values and output of a stack, with biases; its heads are the axis h."""
    inward, outward = ("(h e) w -> l w h e", "(h e) -> l h e"), ("w (h e) -> l h e w", "w -> l w")
    rules: tuple[Rule, ...] = ()
    for part, name in zip(("q", "k", "v", "out"), names, strict=True):
        axes = outward if part == "out" else inward
        rules += linear(f"{ours}/{part}", f"{theirs}.{name}", axes)
    return rules


def siglip(tower: str, head: str) -> tuple[Rule, ...]:
    """A vision tower, and the projection of its tokens."""
    block = f"{tower}.encoder.layers.{{l}}"
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    patches = ("w c=3 p p' -> (p p' c) w", "w -> w")
    return (
        *linear("vision/embed", f"{tower}.embeddings.patch_embedding", patches),
        Rule("vision/position", f"{tower}.embeddings.position_embedding.weight", "n w -> n w"),
        *norm("vision/blocks/norm1", f"{block}.layer_norm1", "w -> l w"),
        *norm("vision/blocks/norm2", f"{block}.layer_norm2", "w -> l w"),
        *attention("vision/blocks", f"{block}.self_attn", names),
        *linear("vision/blocks/up", f"{block}.mlp.fc1", STACKED),
        *linear("vision/blocks/down", f"{block}.mlp.fc2", STACKED),
        *norm("vision/norm", f"{tower}.post_layernorm", "w -> w"),
        *linear("vision/head", head),
    )


def projections(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A decoder's projections; its heads are the axes n and, of keys and values, g."""
    attention, mlp = f"{ours}/layers/attention", f"{ours}/layers/mlp"
    layer = f"{theirs}.layers.{{l}}"
    return (
        Rule(f"{attention}/q/kernel", f"{layer}.self_attn.q_proj.weight", "(n d) w -> l w n d"),
        Rule(f"{attention}/k/kernel", f"{layer}.self_attn.k_proj.weight", "(g d) w -> l w g d"),
        Rule(f"{attention}/v/kernel", f"{layer}.self_attn.v_proj.weight", "(g d) w -> l w g d"),
        Rule(f"{attention}/out/kernel", f"{layer}.self_attn.o_proj.weight", "w (n d) -> l n d w"),
        Rule(f"{mlp}/gate/kernel", f"{layer}.mlp.gate_proj.weight", "f w -> l w f"),
        Rule(f"{mlp}/up/kernel", f"{layer}.mlp.up_proj.weight", "f w -> l w f"),
        Rule(f"{mlp}/down/kernel", f"{layer}.mlp.down_proj.weight", "w f -> l f w"),
    )


def norms(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A decoder's RMS norms."""
    layers, layer = f"{ours}/layers", f"{theirs}.layers.{{l}}"
    return (
        Rule(f"{layers}/norm1/scale", f"{layer}.input_layernorm.weight", "w -> l w"),
        Rule(f"{layers}/norm2/scale", f"{layer}.post_attention_layernorm.weight", "w -> l w"),
        Rule(f"{ours}/norm/scale", f"{theirs}.norm.weight", "w -> w"),
    )


def resnet(
    config: ResnetConfig,
    ours: str,
    theirs: str,
    names: Callable[[str], str] = lambda name: name,
    counted: bool = False,
) -> tuple[Rule, ...]:
    """Rules for a tower at `ours` and its tensors in torchvision's layout, whose names begin with
    `theirs` ("model.backbone.").

    Args:
      names: their name of a part of the tower, "conv1", "bn1" or "layer1" to "layer4"; `SEQUENTIAL`
        has those of a list of its children.
      counted: the file has `num_batches_tracked` of norms "running".
    """
    depths, deep = DEPTHS[config.name]
    pairs = [("conv1", "bn1", names("conv1"), names("bn1"))]
    for stage, depth in enumerate(depths, 1):
        for number in range(depth):
            block, own = f"stages/{stage - 1}/{number}", f"{names(f'layer{stage}')}.{number}"
            each = range(1, 4 if deep else 3)
            pairs += [
                (f"{block}/conv{i}", f"{block}/bn{i}", f"{own}.conv{i}", f"{own}.bn{i}")
                for i in each
            ]
            if not number and (stage > 1 or deep):
                short = f"{block}/short", f"{block}/short_bn"
                pairs.append((*short, f"{own}.downsample.0", f"{own}.downsample.1"))
    rules = []
    for conv, norm, their_conv, their_norm in pairs:
        kernel = f"{theirs}{their_conv}.weight"
        rules.append(Rule(f"{ours}/{conv}/kernel", kernel, "o i h w -> h w i o"))
        rules += [
            Rule(f"{ours}/{norm}/{leaf}", f"{theirs}{their_norm}.{tensor}", axes)
            for leaf, tensor, axes in _LEAVES[config.norm]
            if counted or tensor != "num_batches_tracked"
        ]
    return tuple(rules)


SEQUENTIAL = {
    "conv1": "0",
    "bn1": "1",
    **{f"layer{stage}": str(stage + 3) for stage in range(1, 5)},
}.__getitem__
"""Names of the parts of a tower that is kept as a list of its children."""
_AFFINE = (("scale", "weight", "c -> c"), ("bias", "bias", "c -> c"))
_MOMENTS = (("mean", "running_mean", "c -> c"), ("variance", "running_var", "c -> c"))
_LEAVES = {
    "group": _AFFINE,
    "running": (
        *_AFFINE,
        *((f"running/{leaf}", *rest) for leaf, *rest in _MOMENTS),
        ("running/batches", "num_batches_tracked", "->"),
    ),
    "frozen": tuple((f"frozen/{leaf}", *rest) for leaf, *rest in (*_AFFINE, *_MOMENTS)),
}
