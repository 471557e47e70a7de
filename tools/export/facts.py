"""Facts of an exported policy, for `policy.json`: every array's name, shape, dtype and meaning, and
how a prompt becomes token ids.
"""

import base64
from pathlib import Path
from typing import Any

from models.inputs.chat import DEFAULT, PICTURE, eagle_template
from models.inputs.embodiment import Embodiment
from models.inputs.pictures import Resize
from models.inputs.processor import Processor
from models.inputs.tokenizer import Tokenizer
from tools.command_line.push import own_version
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
_FITS: dict[Resize, str] = {
    "antialiased": "Pillow's bilinear resize to fit the square, the aspect kept, in the middle of "
    "black",
    "bilinear": "torch's bilinear interpolation to fit the square, the aspect kept, in the middle "
    "of black; in floats",
    "bilinear-dark": "torch's bilinear interpolation to fit the square, the aspect kept, in the "
    "middle of -255; in floats",
    "stretched": "torchvision's antialiased bicubic resize, each side by its own factor",
    "stretched-middle": "the middle 95 % of each side, by torchvision's antialiased bilinear "
    "resize, each side by its own factor",
}


def facts(act: Act, form: str, file: str, names: dict[str, Any], weights: Any) -> dict[str, Any]:
    """Everything that a program without our packages needs to know.

    Args:
      file: name of the program's file, in the same folder.
      names: names of the dims of "state" and "actions", where they are known.
      weights: the program's further inputs, if they are not in its file.
    """
    processor, robot = act.processor, act.robot
    return {
        "format": form,
        "file": file,
        "made_by": f"chiliad {own_version()}",
        "family": act.policy.model.config.family,
        "robot": robot.name,
        "inputs": _described(act.inputs, names),
        "outputs": _described(act.outputs, names),
        "cameras": list(act.cameras),
        "pictures": {"size": processor.image_size, "fit": _FITS[processor.resize]},
        "prompt": _prompt(processor, robot, len(act.cameras)),
        "weights": weights,
    }


def write_tokenizer(processor: Processor, folder: Path) -> None:
    """Writes the file that `facts` names as the tokenizer's, if there is one."""
    if processor.bpe:
        tokenizer: Any = processor.tokenizer
        (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    elif processor.sentencepiece:
        (folder / "tokenizer.model").write_bytes(base64.b64decode(processor.sentencepiece))


def _described(specs: Specs, names: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "shape": list(spec.shape),
            "dtype": str(spec.dtype),
            "axes": list(_AXES[name]),
            "units": _UNITS[name],
            **({"names": names[name]} if name in names else {}),
        }
        for name, spec in specs.items()
    ]


def _prompt(processor: Processor, robot: Embodiment, pictures: int) -> dict[str, Any]:
    rule: dict[str, Any] = {"longest": processor.text_limit, "tokenizer": _tokenizer(processor)}
    if processor.chat:
        turn = eagle_template(pictures)
        return rule | {"template": [turn], "default": DEFAULT, "without": PICTURE}
    rule |= {"template": list(processor.template), "cleans": processor.cleans}
    if rule["tokenizer"] is not None:
        rule["closing"] = list(processor.closing)
    if processor.writes == "openpi":
        rule["lowers"] = True
    if processor.state_input == "text":
        rule["state"] = {
            "adapter": robot.adapter,
            "offset": list(robot.state.offset),
            "scale": list(robot.state.scale),
            "dims": processor.state_dim if processor.spells_padding else len(robot.state.offset),
        }
    return rule


def _tokenizer(processor: Processor) -> dict[str, Any] | None:
    if processor.bpe:
        return {"kind": "bpe", "file": "tokenizer.json"}
    if processor.sentencepiece:
        return {"kind": "sentencepiece", "file": "tokenizer.model"}
    if not processor.words:
        return None
    tokenizer = Tokenizer(processor.words)
    first = tokenizer.size - len(tokenizer.words)
    return {
        "kind": "words",
        "begin": tokenizer.begin,
        "first_byte": first - 256,
        "first_word": first,
        "words": list(tokenizer.words),
    }
