"""Run an exported policy, the program beside this file, without the packages that made it.

    python run.py                          # answers a blank observation and says how long it took
    python run.py inputs.npz actions.npy   # answers the arrays in a file

Needs numpy and, as policy.json says, onnxruntime (format "onnx") or jax and flatbuffers (format
"stablehlo"). Fitting pictures also needs pillow; prompts need sentencepiece or tokenizers, if the
policy's tokenizer is of that kind. In Python:

    from run import ExportedPolicy
    policy = ExportedPolicy("exported")
    words, length = policy.tokens(["lift the red block"], state)
    noise = policy.noise(seed=0)
    images = policy.pictures([{"observation.images.front": picture}])  # of any size
    actions = policy(**images, state=state, tokens=words, length=length, noise=noise)
"""

import json
import re
import runpy
import sys
import time
from functools import cached_property
from pathlib import Path

import numpy as np


class ExportedPolicy:
    """The policy in `folder`; see policy.json for what it takes and gives."""

    def __init__(self, folder="."):
        self.folder = Path(folder)
        self.facts = json.loads((self.folder / "policy.json").read_text(encoding="utf-8"))
        load = {"onnx": self._onnx, "stablehlo": self._stablehlo}
        self._run = load[self.facts["format"]](self.folder / self.facts["file"])

    def __call__(self, **inputs):
        """Actions [observation, step, dim] in the robot's units, for one array of each input."""
        given = {}
        for spec in self.facts["inputs"]:
            given[spec["name"]] = array = np.asarray(inputs[spec["name"]], spec["dtype"])
            if list(array.shape) != spec["shape"]:
                raise ValueError(
                    f"{spec['name']} is {list(array.shape)}; expected {spec['shape']}."
                )
        return np.asarray(self._run(given))

    def blank(self):
        """Inputs of the right shapes."""
        found = {
            spec["name"]: np.zeros(spec["shape"], spec["dtype"]) for spec in self.facts["inputs"]
        }
        return found | {"length": found["length"] + 1} if "length" in found else found

    def noise(self, seed):
        """Noise for one call."""
        (spec,) = [spec for spec in self.facts["inputs"] if spec["name"] == "noise"]
        return np.random.default_rng(seed).standard_normal(spec["shape"], np.float32)

    def pictures(self, observations):
        """Inputs "images" (and "images_2", … for further sizes), fitted as the policy does, from a
        picture uint8 [height, width, 3] of any size by camera for each observation. Needs
        pillow."""
        file, fits = self.folder / "pictures.py", self.facts["pictures"]
        if not file.is_file():
            raise ValueError("The policy's own way of fitting is not here; see policy.json.")
        fit = runpy.run_path(str(file))["picture_fit"]
        if isinstance(fits, dict):
            fits = [{"input": "images", "cameras": self.facts["cameras"], **fits}]
        found = {}
        for told in fits:
            size = told["size"] if isinstance(told["size"], int) else tuple(told["size"])
            fitted = fit(told["kind"], size)
            found[told["input"]] = np.stack(
                [
                    np.stack([fitted(self._picture(seen, name)) for name in told["cameras"]])
                    for seen in observations
                ]
            )
        return found

    def _picture(self, seen, name):
        picture = seen.get(name)
        given = f"{getattr(picture, 'dtype', type(picture).__name__)} {list(np.shape(picture))}"
        if given[:6] != "uint8 " or picture.ndim != 3 or picture.shape[-1] != 3:
            raise ValueError(
                f"Picture '{name}' is {given}; expected uint8 [height, width, 3] for each of the "
                f"cameras {self.facts['cameras']}."
            )
        return picture

    def tokens(self, prompts, states):
        """Token ids of prompts, padded with 0, and their lengths."""
        if not self.facts["prompt"]["longest"]:
            raise ValueError("The policy reads no prompts; leave out tokens and length.")
        (spec,) = [spec for spec in self.facts["inputs"] if spec["name"] == "tokens"]
        found, length = np.zeros(spec["shape"], np.int32), np.zeros(spec["shape"][0], np.int32)
        for i, (prompt, state) in enumerate(zip(prompts, states, strict=True)):
            ids = self.ids(prompt, state)
            if len(ids) > self.facts["prompt"]["longest"]:
                raise ValueError(
                    f"The prompt ({prompt[:40]!r}) is {len(ids)} tokens long, but this policy "
                    f"reads at most {self.facts['prompt']['longest']}; shorten it."
                )
            found[i, : len(ids)], length[i] = ids, len(ids)
        return found, length

    def ids(self, prompt, state):
        """Token ids of one prompt."""
        rule = self.facts["prompt"]
        if "template" not in rule:
            raise ValueError("The policy's prompts cannot be read here; give token ids.")
        if "default" in rule:
            text = rule["template"][0].format(quoted=[prompt or rule["default"]])
            left_out = self._encode(rule["without"])
            ids = self._encode(text)
            kept = [i for i in ids if i not in left_out]
            if len(ids) - len(kept) != rule["template"][0].count(rule["without"]):
                raise ValueError(
                    f"The prompt ({prompt[:40]!r}) contains {rule['without']}, which stands "
                    "for an image; leave it out."
                )
            return kept
        text = prompt[:-1] if prompt.endswith("\n") else prompt
        if rule["normalize"] != "line":
            text = prompt.strip().replace("_", " ")
            text = text.lower() if rule["normalize"] == "lower" else text.replace("\n", " ")
        spelt = self._spelt(state) if "state" in rule else ""
        pieces = [self._encode(x.format(prompt=text, state=spelt)) for x in rule["template"]]
        rest = [i for ids in pieces[1:] for i in ids[rule["tokenizer"]["begins"] :]]
        return pieces[0] + rest + rule["closing"]

    def _spelt(self, state):
        rule = self.facts["prompt"]["state"]
        if rule["adapter"]:
            raise ValueError(
                f"This policy's prompt contains the state as the adapter '{rule['adapter']}' "
                "converts it, which this program cannot do; give token ids that "
                "Policy.requests made."
            )
        dims = (np.asarray(state, np.float32) - np.asarray(rule["offset"])) / rule["scale"]
        padded = np.zeros(rule["dims"])
        padded[: len(dims)] = dims.astype(np.float32)
        bins = np.digitize(padded, np.linspace(-1, 1, 257)[:-1]) - 1
        return " ".join(map(str, bins.tolist()))

    @cached_property
    def _encode(self):
        told = self.facts["prompt"]["tokenizer"]
        if told is None:
            raise ValueError("The policy came without a tokenizer; give token ids.")
        if told["kind"] == "sentencepiece":
            from sentencepiece import SentencePieceProcessor

            pieces = SentencePieceProcessor(model_file=str(self.folder / told["file"]))
            return lambda text: pieces.encode(text, add_bos=True)
        if told["kind"] == "bpe":
            from tokenizers import Tokenizer

            core = Tokenizer.from_file(str(self.folder / told["file"]))
            return lambda text: core.encode(text, add_special_tokens=False).ids
        known = {word: told["first_word"] + i for i, word in enumerate(told["words"])}

        def encode(text):
            ids = [told["begin"]]
            for piece in re.findall(r"\w+|[^\w\s]|\n", text):
                letters = [told["first_byte"] + byte for byte in piece.encode()]
                ids += [known[piece]] if piece in known else letters
            return ids

        return encode

    def _onnx(self, file):
        import onnxruntime

        session = onnxruntime.InferenceSession(
            str(file), providers=onnxruntime.get_available_providers()
        )
        taken = {x.name for x in session.get_inputs()}
        return lambda given: session.run(None, {k: v for k, v in given.items() if k in taken})[0]

    def _stablehlo(self, file):
        import jax
        from jax import export

        act = jax.jit(export.deserialize(file.read_bytes()).call)
        weights = {}
        with np.load(self.folder / "weights.npz") as kept:
            for name, dtype in self.facts["weights"].items():
                weights[name] = jax.numpy.asarray(kept[name].view(jax.numpy.dtype(dtype)))
        return lambda given: act(weights, given)


def main(inputs=None, actions=None):
    began = time.perf_counter()
    policy = ExportedPolicy(Path(__file__).parent)
    given = policy.blank()
    if inputs is not None:
        with np.load(inputs) as kept:
            given = {name: kept[name] for name in given}
    found = policy(**given)
    loaded, began = time.perf_counter() - began, time.perf_counter()
    policy(**given)
    print(f"actions {list(found.shape)}; first answer {loaded:.2f} s after the start, ", end="")
    print(f"the next in {(time.perf_counter() - began) * 1000:.0f} ms")
    if actions is not None:
        np.save(actions, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
