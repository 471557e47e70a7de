"""SmolVLA's names and layouts: what LeRobot's safetensors call our parameters."""

from models.checkpoints.rename import Rule, Table
from models.checkpoints.torch_rules import layer_norms, linear, norms, projections, siglip

VLM = "model.vlm_with_expert.vlm"
HEAD = f"{VLM}.lm_head.weight"
"""The language model's output head, which nothing reads."""
VISION, TEXT = f"{VLM}.model.vision_model", f"{VLM}.model.text_model"
EXPERT = "model.vlm_with_expert.lm_expert"
CONNECTOR = f"{VLM}.model.connector.modality_projection.proj"


def table(period: int) -> Table:
    """Maps their names to our parameters; layers of the expert go to its stacks in turn, as many as
    its period."""
    stacks = [(EXPERT, f"layers/{n}", f"layers.{{{period}*l+{n}}}") for n in range(period)]
    return Table(
        (
            *siglip(VISION),
            *linear("connector", CONNECTOR, ("o i -> i o",)),
            Rule("embedding", f"{TEXT}.embed_tokens.weight", "v w -> v w"),
            *projections("language", TEXT),
            *norms("language", TEXT),
            *(rule for names in stacks for rule in projections("expert", *names)),
            *(rule for names in stacks for rule in layer_norms("expert", *names)),
            Rule("expert/norm/scale", f"{EXPERT}.norm.weight", "w -> w"),
            *linear("state_in", "model.state_proj"),
            *linear("action_in", "model.action_in_proj"),
            *linear("action_out", "model.action_out_proj"),
            *linear("time_in", "model.action_time_mlp_in"),
            *linear("time_out", "model.action_time_mlp_out"),
        ),
        (rf"^{VLM}\.lm_head\.", r"^(un)?normalize_(in|out)puts\.|^normalize_targets\."),
    )
