"""Exported policies act as their policies do, in a process that has none of our packages: every
released policy's recorded observations, to 1e-4 of the actions."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Normalizer, Pi, load_policy
from models.inputs.pictures import picture_fit
from tests.helpers.models import groot_whole
from tests.helpers.models.released_cases import RELEASED_CASES, answers, case_policy
from tests.helpers.models.tiny_policy import CONFIG, KEYS, PROMPTS, openpi, seen, tiny_policy
from tests.helpers.tools.exported_run import ran
from tools.export.__main__ import main
from tools.export.act import whole
from tools.export.facts import _pictures
from tools.export.facts import facts as described
from tools.export.run import ExportedPolicy
from tools.export.write import _write_fits, write

CASES = (
    "openpi/pi05_droid", "openpi/pi05_libero", "openpi/pi05_aloha", "openpi/pi0_aloha_sim",
    "openpi/pi0_base", "lerobot/0.4.4/pi05", "lerobot/0.6.1/pi0_relative",
)  # fmt: skip
"""One of each way in which released policies are prepared; all 27 hold."""
FITS = ("antialiased", "bilinear", "bilinear-dark", "stretched", "stretched-middle")
FAST = Path(__file__).parents[1] / "fixtures" / "pi0_fast"


def asked(requests, noise, longest):
    """The exported program's inputs for requests."""
    tokens = np.zeros((len(requests), longest), np.int32)
    for row, request in zip(tokens, requests, strict=True):
        row[: len(request.sample.text)] = request.sample.text
    return {
        "images": np.stack([np.stack(request.sample.images) for request in requests]),
        "state": np.stack([request.state for request in requests]).astype(np.float32),
        "tokens": tokens,
        "length": np.array([len(request.sample.text) for request in requests], np.int32),
        "noise": np.asarray(noise, np.float32),
    }


def facts(folder):
    return json.loads((folder / "policy.json").read_text())


def places(folder):
    (spec,) = [spec for spec in facts(folder)["inputs"] if spec["name"] == "tokens"]
    return spec["shape"][1]


def differ(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


def needs(to):
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
        return ("jax",)
    pytest.importorskip("flatbuffers")
    return ()


def exported(policy, observations, noise, folder, to, **options):
    """The exported policy's answers to those observations that show as many cameras as the first,
    which it reads itself, the policy's own, and their numbers."""
    also = needs(to)
    requests = [policy.prepare(seen)[0] for seen in observations]
    cameras = requests[0].sample.cameras
    alike = [i for i, request in enumerate(requests) if request.sample.cameras == cameras]
    requests, noise = [requests[i] for i in alike], noise[alike]
    robot = policy.processor.embodiments[policy.embodiment]
    write(policy, folder, to, cameras=[robot.cameras[i] for i in cameras], **options)
    given = asked(requests, noise, places(folder))
    rows = zip(requests, noise, strict=True)
    wanted = np.concatenate(
        [policy.sample_actions([request], start[None]) for request, start in rows]
    )
    prompts = [observations[i].get("prompt", observations[i].get("task", "")) for i in alike]
    spells = policy.processor.state_input == "text" and robot.adapter
    found = ran(folder, given, [] if spells else prompts, also)
    if not spells:
        ids = np.concatenate([request.sample.text for request in requests])
        np.testing.assert_array_equal(found["read"], ids)
    return found["actions"], wanted, alike


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_released_policy_answers_recorded_observations_in_onnx(name, tmp_path):
    case = RELEASED_CASES / name
    root = case_policy(case, tmp_path)
    if case.parent.name == "0.4.4":
        (root / "train_config.json").write_text("{}")
    options = {"relative": ()} if case.name.endswith("_base") else {}
    policy = load_policy(root, tokenizer=RELEASED_CASES / "tokenizer.model", **options)
    observations, recorded = answers(case)
    noise, out = recorded["noise"], tmp_path / "out"
    found, wanted, alike = exported(policy, observations, noise, out, "onnx")
    assert differ(found, wanted) < 1e-4
    assert differ(found, recorded["actions"][alike][..., : found.shape[-1]]) < 1e-4


def groot(folder):
    policy = load_policy(groot_whole.lerobots_folder(folder))
    return policy, [groot_whole.observed(case) for case in groot_whole.CASES]


def ours(count=3):
    pictures, states = seen(count)
    rows = zip(pictures, states, PROMPTS, strict=False)
    return [
        {"image": {"front": picture[0]}, "state": state, "prompt": prompt}
        for picture, state, prompt in rows
    ]


def unit_noise(policy, count):
    config = policy.model.config
    shape = count, config.horizon, config.action_dim
    return np.random.default_rng(7).standard_normal(shape, np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["stablehlo", "onnx"])
def test_groot_answers_the_same_outside(to, tmp_path):
    policy, observations = groot(tmp_path / "groot")
    noise = unit_noise(policy, len(observations))
    found, wanted, _ = exported(policy, observations, noise, tmp_path / "out", to)
    assert differ(found, wanted) < 1e-4
    assert (tmp_path / "out/tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("to", "solver"),
    [
        ("stablehlo", "euler"),
        ("onnx", "euler"),
        pytest.param("onnx", "ab2", marks=pytest.mark.slow),
    ],
)
def test_a_policy_of_ours_answers_the_same_outside(to, solver, tmp_path):
    policy = replace(tiny_policy(), model=Pi(replace(CONFIG, solver=solver)))
    observations = ours()
    found, wanted, _ = exported(policy, observations, unit_noise(policy, 3), tmp_path / "out", to)
    assert differ(found, wanted) < 1e-4
    assert differ(found[:2], found[1:]) > 1e-2, "it sees no difference"


def fast_policy():
    told = {"released": "pi0_fast_base", "horizon": 10, "relative": ()}
    told |= {"tokenizer": FAST / "tokenizer.model", "fast": FAST / "fast"}
    return load_policy(FAST / "openpi" / "pi0_fast", **told)


@pytest.mark.slow
def test_a_policy_that_writes_its_chunks_answers_the_same_in_stablehlo(tmp_path):
    policy, rng = fast_policy(), np.random.default_rng(3)
    robot = policy.processor.embodiments[0]
    observation = {
        "image": {
            name: rng.integers(0, 256, (224, 224, 3), dtype=np.uint8) for name in robot.cameras
        },
        "state": rng.normal(size=len(robot.state.offset)).astype(np.float32),
        "prompt": "Fold_the towel",
    }
    noise = unit_noise(policy, 1)
    found, wanted, _ = exported(policy, [observation], noise, tmp_path / "out", "stablehlo")
    assert differ(found, wanted) < 1e-4


def test_a_loop_without_a_given_length_is_refused_in_onnx(tmp_path):
    pytest.importorskip("onnx")
    with pytest.raises(ValueError, match=r"there is no ONNX rule; export it with --to stablehlo"):
        write(fast_policy(), tmp_path / "out", "onnx")


def in_onnx(function, given, folder):
    """Answers of a function of arrays by name, by ONNX and by JAX."""
    needs("onnx")
    import onnxruntime

    from tools.export import onnx_rules, onnx_writer

    specs = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in given.items()}
    model, arrays = onnx_writer.model_of(
        lambda weights, inputs: function(**inputs), {}, specs, "found", onnx_rules.RULES
    )
    onnx_writer.write(model, folder / "program.onnx", arrays, "program.data")
    session = onnxruntime.InferenceSession(str(folder / "program.onnx"))
    wanted = function(**{name: jnp.asarray(x) for name, x in given.items()})
    return session.run(None, given)[0], np.asarray(wanted)


@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_what_is_added_beyond_an_array_goes_where_jax_puts_it(mode, tmp_path):
    given = {"to": np.zeros(6, np.float32), "at": np.array([0, 2, 7], np.int32)}
    found, wanted = in_onnx(lambda to, at: to.at[at].add(1.0, mode=mode), given, tmp_path)
    np.testing.assert_array_equal(found, wanted)


NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ((3, 2, 4, 6), {"padding": "SAME", "dimension_numbers": NHWC}),
        ((3, 2, 4, 6), {"padding": "VALID", "window_strides": (2, 3), "dimension_numbers": NHWC}),
        ((3, 3, 2, 6), {"padding": [(2, 0), (1, 3)], "rhs_dilation": (2, 1),
                        "feature_group_count": 2, "dimension_numbers": NHWC}),
        ((3, 3, 1, 8), {"padding": "SAME", "feature_group_count": 4, "dimension_numbers": NHWC}),
        ((3, 3, 4, 6), {"padding": [(2, 2), (2, 1)], "lhs_dilation": (2, 3),
                        "dimension_numbers": NHWC}),
        ((2, 2, 4, 6), {"padding": [(-1, 0), (3, -2)], "dimension_numbers": NHWC}),
        ((6, 7, 3, 2), {"padding": "SAME", "window_strides": (2, 1)}),
        ((5, 8, 6), {"padding": [(4, 0)], "dimension_numbers": ("NWC", "WIO", "NWC")}),
        ((2, 3, 2, 4, 5), {"padding": "SAME", "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}),
    ],
)  # fmt: skip
def test_a_convolution_is_exported_as_it_is(kernel, options, tmp_path):
    rng = np.random.default_rng(0)
    shape = {3: (2, 9, 8), 4: (2, 7, 9, 4), 5: (1, 4, 5, 6, 4)}[len(kernel)]
    given = {"x": rng.normal(size=shape), "kernel": rng.normal(size=kernel)}
    given = {name: value.astype(np.float32) for name, value in given.items()}
    options = {"window_strides": (1,) * (len(kernel) - 2), **options}
    found, wanted = in_onnx(
        lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, **options), given, tmp_path
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int32"])
@pytest.mark.parametrize(
    ("window", "strides", "padding", "dilations"),
    [
        ((1, 3, 2, 1), (1, 2, 2, 1), "SAME", {}),
        ((1, 2, 2, 1), (1, 1, 3, 1), "VALID", {}),
        ((2, 1, 3, 4), (1, 1, 1, 2), [(1, 0), (0, 2), (2, 1), (0, 0)], {}),
        ((1, 3, 2, 1), (1, 1, 2, 1), "VALID", {"window_dilation": (1, 2, 3, 1)}),
        ((1, 3, 3, 1), (1, 2, 1, 1), [(0, 0), (1, 1), (2, 0), (0, 0)],
         {"base_dilation": (1, 2, 3, 1)}),
        ((1, 7, 9, 1), (1, 1, 1, 1), "VALID", {}),
    ],
)  # fmt: skip
def test_pooling_is_exported_as_it_is(window, strides, padding, dilations, dtype, tmp_path):
    given = {"x": (9 * np.random.default_rng(0).normal(size=(2, 7, 9, 4))).astype(dtype)}
    low = -np.inf if dtype == "float32" else np.iinfo(dtype).min
    high = np.inf if dtype == "float32" else np.iinfo(dtype).max

    def pooled(x):
        kinds = (jax.lax.max, low), (jax.lax.min, high), (jax.lax.add, 0)
        return jnp.stack(
            [
                jax.lax.reduce_window(
                    x, np.asarray(nothing, dtype), how, window, strides, padding, **dilations
                )
                for how, nothing in kinds
            ]
        )

    found, wanted = in_onnx(pooled, given, tmp_path)
    np.testing.assert_array_equal(found[:2], wanted[:2])
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-5, atol=1e-4)


SORTED = {
    "sort": lambda x: jnp.sort(x, axis=0),
    "argsort": lambda x: jnp.argsort(x, axis=1),
    "descending": lambda x: jnp.argsort(x, axis=1, descending=True),
    "two keys": lambda x: jnp.stack(
        jax.lax.sort((jnp.round(x / 4), x % 3, jax.lax.broadcasted_iota(x.dtype, x.shape, 1)),
                     dimension=1, num_keys=2)
    ),
    "top": lambda x: jnp.stack([y.astype(x.dtype) for y in jax.lax.top_k(x, 4)]),
    "median": lambda x: jnp.median(x, axis=1),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["float32", "int32", "odd"])
@pytest.mark.parametrize("name", SORTED)
def test_sorting_is_exported_with_its_order_of_equals(name, kind, tmp_path):
    x = np.random.default_rng(0).integers(-4, 5, (6, 11)).astype(kind.replace("odd", "float32"))
    if kind == "odd":
        x[:, 2:5], x[0, 7], x[1, 1], x[2, 6], x[3] = np.nan, np.inf, -np.inf, -0.0, 0.0
        x[3, ::2] = -0.0
    found, wanted = in_onnx(SORTED[name], {"x": x}, tmp_path)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", FITS)
def test_pictures_are_fitted_outside_as_the_policy_fits_them(kind, tmp_path):
    rng, fit, policy = np.random.default_rng(0), picture_fit(kind, (20, 28)), tiny_policy()
    act = whole(replace(policy, processor=replace(policy.processor, pictures=fit)))
    _write_fits(act, tmp_path)
    assert not re.search(
        "^(from|import) (models|jax)", (tmp_path / "pictures.py").read_text(), re.M
    )
    policy = object.__new__(ExportedPolicy)
    told = _pictures(act, "images", fit.shape, ["front"])
    policy.folder, policy.facts = tmp_path, {"cameras": ["front"], "pictures": told}
    for shape in ((20, 28), (41, 33), (9, 90), (11, 13)):
        seen = [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for _ in range(2)]
        found = policy.pictures([{"front": picture} for picture in seen])["images"]
        wanted = np.stack([fit(picture) for picture in seen])[:, None]
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)
    for wrong, given in (
        ({"wrist": seen[0]}, "NoneType"),
        ({"front": seen[0][..., 0]}, r"uint8 \[11, 13\]"),
        ({"front": seen[0] / 255}, "float64"),
        ({"front": "x"}, "str"),
    ):
        with pytest.raises(ValueError, match=rf"Picture 'front' is {given}.*; expected uint8 \[h"):
            policy.pictures([wrong])


def test_a_policy_is_described_from_a_clone_that_is_not_installed(monkeypatch):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("tools.command_line.versions.version", version)
    told = described(whole(tiny_policy()), "stablehlo", "policy.stablehlo", {}, None)
    assert told["made_by"] == "chiliad from a clone"


def test_a_prompt_with_a_pictures_token_is_refused_outside_too():
    policy = object.__new__(ExportedPolicy)
    turn = {"template": ["P P {quoted}"], "default": "act", "without": "P"}
    policy.facts = {"prompt": turn}
    policy._encode = lambda text: [ord(x) for x in text.replace(" ", "")]
    assert policy.ids("go", None) == [ord(x) for x in "['go']"]
    with pytest.raises(ValueError, match="stands for an image"):
        policy.ids("go P", None)


@pytest.mark.slow
def test_a_batch_is_answered_row_by_row_the_same(tmp_path):
    also, policy, folder = needs("onnx"), tiny_policy(), tmp_path / "out"
    write(policy, folder, "onnx", batch=2)
    requests, noise = policy.prepare(openpi(2), KEYS[:2]), unit_noise(policy, 2)
    given = asked(requests, noise, places(folder))
    np.savez(folder / "given.npz", **given)
    command = [sys.executable, folder / "run.py", folder / "given.npz", folder / "found.npy"]
    said = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    assert "actions [2, 6, 2]" in said.stdout
    assert not also[1:]
    assert differ(np.load(folder / "found.npy"), policy.sample_actions(requests, noise)) < 1e-4


def test_every_array_is_described(tmp_path):
    needs("onnx")
    names = {"state": ["x", "y", "z"], "actions": ["dx", "grip"]}
    write(tiny_policy(), tmp_path / "out", "onnx", names=names)
    told = facts(tmp_path / "out")
    assert [x["name"] for x in told["inputs"]] == ["images", "state", "tokens", "length", "noise"]
    for spec in (*told["inputs"], *told["outputs"]):
        assert len(spec["axes"]) == len(spec["shape"])
        assert spec["units"]
    assert told["inputs"][1]["names"] == names["state"]
    assert told["outputs"][0]["names"] == names["actions"]
    assert told["cameras"] == ["front"]


def test_a_state_that_hardly_moves_keeps_its_digits(tmp_path):
    policy = tiny_policy()
    robot = replace(
        policy.processor.embodiments[0], state=Normalizer((1.0, 2.0, 1e3 / 3), (1e-4, 1e-4, 1e-2))
    )
    policy = replace(policy, processor=replace(policy.processor, embodiments=(robot,)))
    state = np.array([1.00003, 1.9999, 333.33], np.float32)
    observation = ours(1)[0] | {"state": state}
    noise, act = unit_noise(policy, 1), whole(policy)
    (request,) = policy.prepare(observation)
    given = asked([request], noise, act.inputs["tokens"].shape[1])
    assert differ(jax.jit(act)(act.weights, given), policy.sample_actions([request], noise)) < 1e-4


def test_what_cannot_be_exported_is_refused_in_a_sentence(tmp_path, monkeypatch):
    policy = tiny_policy()
    with pytest.raises(ValueError, match="came without a processor"):
        write(replace(policy, processor=None), tmp_path / "a")
    with pytest.raises(ValueError, match=r"cameras are \['top'\]"):
        write(policy, tmp_path / "b", cameras=["top"])
    speaking = replace(policy, processor=replace(policy.processor, subtask_limit=8))
    with pytest.raises(ValueError, match="writes a subtask before it acts"):
        write(speaking, tmp_path / "c")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("")
    with pytest.raises(ValueError, match="is not empty"):
        write(policy, tmp_path / "full")
    with pytest.raises(SystemExit, match="ONNX is written in float32"):
        main(tmp_path, tmp_path / "d", "onnx", dtype="bfloat16")
