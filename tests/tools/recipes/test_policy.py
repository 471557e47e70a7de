"""The same options load a checkpoint of another code wherever it acts."""

import io
import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tyro

from data import open_dataset
from models import Pi, load_policy
from models.files.terminal import Console
from models.inputs.pictures import resize_with_pad
from models.policy import Policy
from sim.protocol import EVAL_SEEDS
from tests.helpers.models.openpi_numbers import FIXTURES
from tests.helpers.models.tiny_policy import CONFIG, tiny_policy
from tests.helpers.sim import libero_like
from tools import convert_checkpoint, evaluate, quantize, rl, serve
from tools.recipes.conditions import Condition
from tools.recipes.evaluation import EvaluateConfig, _identity
from tools.recipes.policy import PolicyOptions, camera_map, load
from tools.recipes.recording import RecordConfig, record_dataset
from tools.serving.metrics import Metrics

CAMERAS = ("image=base_0_rgb", "image2=left_wrist_0_rgb")
SUITE = f"{libero_like.__file__}:ARM"
OPTIONS: dict[str, tuple[str, Any]] = {
    "released": ("pi05_droid", "pi05_droid"),
    "horizon": ("8", 8),
    "tokenizer": ("words.model", Path("words.model")),
    "robot": ("arm", "arm"),
    "fast": ("fast", Path("fast")),
    "state": ("none", "none"),
    "relative": ("0 1", (0, 1)),
    "modality": ("modality.json", Path("modality.json")),
    "cameras": (f"{CAMERAS[0]} {CAMERAS[1]}", CAMERAS),
    "base": ("base", Path("base")),
    "backbone": ("backbone", Path("backbone")),
}
"""Each option as it is typed, and its value."""


def typed(*names):
    return [word for name in names for word in (f"--{name}", *OPTIONS[name][0].split())]


def called(main, *given):
    """Options that a command's function would be called with."""
    found = []

    def caught(*args, **options):
        found.append(options["options"])

    caught.__wrapped__ = main
    tyro.cli(caught, args=given)
    return found[0]


COMMANDS = {
    "evaluate": lambda *given: (
        tyro.cli(EvaluateConfig, args=["--checkpoint", "a", "--out", "b", *given]).options
    ),
    "serve": lambda *given: tyro.cli(serve.ServeConfig, args=["--checkpoint", "a", *given]).options,
    "record": lambda *given: tyro.cli(RecordConfig, args=["--out", "b", *given]).options,
    "rl": lambda *given: rl.parse(["--checkpoint", "a", "--out", "b", *given])[0].options,
    "quantize": partial(called, quantize.main, "a", "b"),
    "convert": partial(called, convert_checkpoint.main, "a", "b"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_loads_a_policy_takes_the_same_options(command):
    values = {name: value for name, (_, value) in OPTIONS.items()}
    assert COMMANDS[command](*typed(*OPTIONS)).flat() == values
    assert COMMANDS[command]() == PolicyOptions()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    model = io.BytesIO()
    texts = [f"go to the {c} disc, reach {c}" for c in ("red", "green", "blue")] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=model, vocab_size=24, minloglevel=2
    )
    file = tmp_path_factory.mktemp("words") / "tokenizer.model"
    file.write_bytes(model.getvalue())
    return file


@pytest.fixture(scope="module")
def options(tokenizer):
    given = ["--horizon", "8", "--relative", "--robot", "robot", "--tokenizer", str(tokenizer)]
    return tyro.cli(PolicyOptions, args=[*given, *typed("cameras")])


@pytest.fixture
def shown(monkeypatch):
    """Keeps the samples that policies are asked about, with their chunks."""
    kept, answer = [], Policy.sample_actions

    def answered(policy, requests, noise=None):
        chunks = answer(policy, requests, noise)
        kept.extend(zip(requests, chunks, strict=True))
        return chunks

    monkeypatch.setattr(Policy, "sample_actions", answered)
    return kept


def test_a_policy_is_served_by_the_solver_that_is_asked_for(options):
    typed = ["--checkpoint", str(FIXTURES / "pi0"), "--solver", "ab2", "--euler-steps", "5"]
    config = replace(tyro.cli(serve.ServeConfig, args=typed), options=options)
    assert serve.load(config).model.config.solver == "ab2"
    assert serve.load(replace(config, solver=None)).model.config.solver == "euler"


def test_a_journal_of_another_solver_than_eulers_says_so():
    policy = tiny_policy()
    other = replace(policy, model=Pi(replace(CONFIG, solver="ab2")))
    euler, ab2 = (Condition("trained", p).header() for p in (policy, other))
    assert ab2 == euler | {"solver": "ab2"}
    assert "solver" not in euler


def test_openpis_policy_acts_in_a_suite_whose_cameras_have_other_names(options, shown, tmp_path):
    """Case 7: it had no horizon, no tokenizer and no cameras there."""
    config = EvaluateConfig(
        FIXTURES / "pi0", SUITE, (), 1, out=tmp_path, euler_steps=1, options=options
    )
    found = evaluate.run(config, Console(quiet=True))["trained"]
    assert found.success.trials == 1
    policy = load_policy(
        FIXTURES / "pi0", horizon=8, relative=(), tokenizer=options.tokenizer, euler_steps=1
    )
    for request, chunk in shown:
        assert chunk.shape == (8, libero_like.ACTIONS)
        assert request.sample.cameras == (0, 1), "the third is absent and costs nothing"
    request, chunk = shown[0]
    (again,) = policy.prepare(
        {
            "image": dict(
                zip(
                    ("base_0_rgb", "left_wrist_0_rgb"),
                    seen(EVAL_SEEDS.start, policy.model.config.image_size),
                    strict=True,
                )
            ),
            "state": np.zeros(libero_like.STATES),
            "prompt": found.episodes[0].prompt,
        },
        request.key[None],
    )
    np.testing.assert_array_equal(again.sample.images, request.sample.images)
    np.testing.assert_array_equal(again.sample.text, request.sample.text)


@cache
def seen(seed, size):
    env = libero_like.Arm(size)
    return env.observe(env.reset(np.array([seed]))).images[0]


def test_a_suite_is_drawn_in_its_datasets_size_and_policies_resize_that(options, shown, tmp_path):
    """Case 8: it was drawn in the policy's size, 21 pixels here, which antialiases otherwise."""
    drawn = f"{libero_like.__file__}:DRAWN"
    config = EvaluateConfig(
        FIXTURES / "pi0", drawn, (), 1, out=tmp_path / "e", euler_steps=1, options=options
    )
    evaluate.run(config, Console(quiet=True))
    size = load(FIXTURES / "pi0", options).model.config.image_size
    assert size != 40
    for ours, picture in zip(shown[0][0].sample.images, seen(EVAL_SEEDS.start, 40), strict=True):
        np.testing.assert_array_equal(ours, resize_with_pad(picture, size))
    lines = (tmp_path / "e" / "episodes.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["evaluates"]["picture"] == 40


def test_a_recording_of_openpis_policy_has_the_suites_names_and_size(options, tmp_path):
    config = RecordConfig(
        tmp_path / "data",
        f"{libero_like.__file__}:EASY",
        episodes=1,
        checkpoint=FIXTURES / "pi0",
        euler_steps=1,
        options=options,
    )
    record_dataset(config)
    dataset = open_dataset(tmp_path / "data")
    assert dataset.cameras == libero_like.CAMERAS
    assert dataset.episode(0)[libero_like.CAMERAS[0]].shape[1:] == (40, 40, 3)


def test_a_server_of_openpis_policy_asks_for_the_robots_cameras(options):
    config = serve.ServeConfig(FIXTURES / "pi0", sizes=(1,), euler_steps=1, options=options)
    with serve._engine(config, Metrics()) as engine:
        expected = engine.inputs.expected
        assert [key for key, kind in expected.items() if "optional" not in kind] == [
            "observation/image",
            "observation/image2",
            "observation/state",
            "prompt",
        ]
        assert expected["observation/right_wrist_0_rgb"]["optional"]
        assert engine.metadata["actions"]["shape"] == [8, libero_like.ACTIONS]


def test_options_are_kept_by_a_conversion(options, tmp_path):
    convert_checkpoint.main(FIXTURES / "pi0", tmp_path / "own", options=options)
    (kept,) = load_policy(tmp_path / "own").processor.embodiments
    assert kept.cameras == ("image", "image2", "right_wrist_0_rgb")
    assert kept.absent == ("right_wrist_0_rgb",)


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        (("image",), "'image'; give ROBOT=POLICY, such as"),
        (("=base_0_rgb",), "'=base_0_rgb'; give ROBOT=POLICY"),
        (("a=base_0_rgb", "b=base_0_rgb"), "'b=base_0_rgb', but one of these cameras is already"),
        (("a=base_0_rgb", "a=left_wrist_0_rgb"), "'a=left_wrist_0_rgb', but one of these"),
    ],
)
def test_a_map_that_is_none_is_refused_with_an_example(pairs, why):
    with pytest.raises(ValueError, match=why):
        camera_map(pairs)


@pytest.mark.parametrize("field", OPTIONS)
def test_options_of_a_policy_are_refused_where_the_expert_acts(field, tmp_path):
    options = tyro.cli(PolicyOptions, args=typed(field))
    config = RecordConfig(tmp_path / "data", SUITE, options=options)
    with pytest.raises(ValueError, match=f"{field} is .*leave --{field} out"):
        record_dataset(config)


def test_an_evaluation_knows_a_policy_by_the_folder_that_its_link_leads_to(tmp_path):
    for step in ("010000", "020000"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "model.safetensors").touch()
        (tmp_path / "last").unlink(missing_ok=True)
        (tmp_path / "last").symlink_to(step)
        assert _identity(tmp_path / "last") == str((tmp_path / step).resolve())
