"""Facts of an exported policy, for `policy.json`: every array's name, shape, dtype and meaning, and
how a prompt becomes token ids.
"""

import base64
from inspect import getdoc
from pathlib import Path
from typing import Any

from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment
from models.inputs.processor import Processor
from models.inputs.tokenizer import SentencePiece, TextTokenizer, Tokenizer
from tools.command_line.versions import own_version
from tools.export.act import Act, Specs

_AXES = {
    "images": ("observation", "camera", "height", "width", "red, green, blue"),
    "state": ("observation", "dim"),
    "tokens": ("observation", "token"),
    "length": ("observation",),
    "noise": ("observation", "step", "dim of the model"),
    "actions": ("observation", "step", "dim"),
}
_UNITS = {
    "images": "grey levels, 0 to 255, fitted to this size (see pictures)",
    "state": "the robot's, as in the dataset it learnt from",
    "tokens": "token ids of the prompt (see prompt); any behind the length are not read",
    "length": "how many of the tokens count",
    "noise": "unit normal; an answer follows from it and the observation alone",
    "actions": "the robot's, as in the dataset it learnt from",
}


def facts(act: Act, form: str, file: str, names: dict[str, Any], weights: Any) -> dict[str, Any]:
    """Everything that a program without our packages needs to know.

    Args:
      file: name of the program's file, in the same folder.
      names: names of the dims of "state" and "actions", where they are known.
      weights: the program's further inputs, if they are not in its file.
    """
    processor, robot = act.processor, act.robot
    pictures = [_pictures(act, *one) for one in act.pictures]
    return {
        "format": form,
        "file": file,
        "made_by": f"chiliad {own_version()}",
        "family": act.policy.model.config.family,
        "robot": robot.name,
        "inputs": _described(act.inputs, names),
        "outputs": _described(act.outputs, names),
        "cameras": list(act.cameras),
        "pictures": pictures[0] if len(pictures) == 1 else pictures,
        "prompt": _prompt(processor, robot, len(act.cameras)),
        "weights": weights,
    }


def write_tokenizer(processor: Processor, folder: Path) -> None:
    """Writes the file that `facts` names as the tokenizer's, if there is one."""
    text = None if processor.prompts is None else processor.prompts.tokenizer
    if isinstance(text, ByteBpe):
        (folder / "tokenizer.json").write_text(text.json, encoding="utf-8")
    elif isinstance(text, SentencePiece):
        (folder / "tokenizer.model").write_bytes(base64.b64decode(text.model))


def _pictures(act: Act, name: str, shape: tuple[int, int], cameras: list[str]) -> dict[str, Any]:
    fit = act.processor.fit(act.robot.cameras.index(cameras[0]))
    which = {} if len(act.pictures) == 1 else {"input": name, "cameras": cameras}
    size = shape[0] if shape[0] == shape[1] else list(shape)
    return which | {"size": size, "kind": fit.kind, "fit": getdoc(type(fit))}


def _described(specs: Specs, names: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": list(spec.shape),
            "dtype": str(spec.dtype),
            "axes": list(_AXES[name.split("_")[0]]),
            "units": _UNITS[name.split("_")[0]],
            **({"names": names[name]} if name in names else {}),
        }
        for name, spec in specs.items()
    ]


def _prompt(processor: Processor, robot: Embodiment, pictures: int) -> dict[str, Any]:
    prompts = processor.prompts
    rule = None if prompts is None else prompts.rule(pictures)
    if prompts is None or rule is None:
        return {"longest": processor.text_limit, "tokenizer": None}
    rule |= {"longest": processor.text_limit, "tokenizer": _tokenizer(prompts.tokenizer)}
    if prompts.spells_state:
        rule["state"] = {
            "adapter": robot.adapter,
            "offset": list(robot.state.offset),
            "scale": list(robot.state.scale),
            "dims": processor.state_dim if prompts.pads_state else len(robot.state.offset),
        }
    return rule


def _tokenizer(text: TextTokenizer | None) -> dict[str, Any] | None:
    if isinstance(text, ByteBpe):
        return {"kind": "bpe", "begins": text.begins, "file": "tokenizer.json"}
    if isinstance(text, SentencePiece):
        return {"kind": "sentencepiece", "begins": text.begins, "file": "tokenizer.model"}
    if not isinstance(text, Tokenizer):
        return None
    first = text.size - len(text.words)
    return {
        "kind": "words",
        "begins": text.begins,
        "begin": text.begin,
        "first_byte": first - 256,
        "first_word": first,
        "words": list(text.words),
    }
