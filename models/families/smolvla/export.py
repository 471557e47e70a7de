"""A SmolVLA policy as LeRobot's folder, with the config and tokenizer of its vision-language model
in a folder of its name, so that LeRobot can load both without the hub.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.layout import exported
from models.checkpoints.lerobot_pipeline import TOKENIZE, step
from models.checkpoints.lerobot_policy import ACTION, PICTURES, STATE, Feature, write_policy
from models.families.smolvla.checkpoint import FAKE, VLMS, WHOLE, SmolvlaFields, Vlm
from models.families.smolvla.inputs import Corner, Line
from models.families.smolvla.lora import merge
from models.families.smolvla.model import SmolvlaConfig
from models.families.smolvla.names import HEAD, table
from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment
from models.policy import Policy

_OWN = "SmolVLM2"
"""Name of a vision-language model of other sizes than the published ones, a folder beside."""
_SPECIAL = {"fake_image_token": FAKE, "global_image_token": WHOLE, "image_token": "<image>"}


def write(policy: Policy, target: Path) -> None:
    """Writes the policy of one robot in f32, with adapters folded in.

    Raises:
      ValueError: `target` holds a model, or LeRobot would prepare the policy's inputs or scale its
        actions differently, or it has no place for some parameter.
    """
    robot, prompts = _checked(policy)
    config, params = merge(policy.model.config, policy.params)
    name, depth = _name(config), config.language.depth
    side, words = config.image_size, config.vocabulary
    told = SmolvlaFields(
        input_features={
            STATE: Feature("STATE", (len(robot.state.offset),)),
            **{
                PICTURES + camera.removeprefix(PICTURES): Feature("VISUAL", (3, side, side))
                for camera in robot.cameras
            },
        },
        output_features={ACTION: Feature("ACTION", (len(robot.actions.offset),))},
        chunk_size=config.horizon,
        n_action_steps=config.horizon,
        max_state_dim=config.state_dim,
        max_action_dim=config.action_dim,
        resize_imgs_with_padding=(side, side),
        adapt_to_pi_aloha=robot.adapter == "aloha",
        tokenizer_max_length=prompts.limit,
        num_steps=config.euler_steps,
        vlm_model_name=name,
        add_image_special_tokens=bool(config.image_tokens),
        pad_language_to="max_length",
        num_expert_layers=config.expert.depth,
        num_vlm_layers=depth,
        self_attn_every_n_layers=config.self_attention_every,
        expert_width_multiplier=_multiplier(config),
        min_period=config.min_period,
        max_period=config.max_period,
    )
    tokens = step(
        TOKENIZE,
        max_length=prompts.limit,
        task_key="task",
        padding_side="right",
        padding="max_length",
        truncation=True,
        tokenizer_name=name,
    )
    arrays = exported(params, table(config.kinds), "A SmolVLA checkpoint of LeRobot's")
    arrays[HEAD] = (words, config.language.width), lambda: np.zeros(1, np.float32)
    scales = {STATE: robot.state, ACTION: robot.actions}
    write_policy(target, told, arrays, scales, (step("smolvla_new_line_processor"), tokens))
    _write_vlm(target / name, config, prompts)


def _checked(policy: Policy) -> tuple[Embodiment, Line]:
    """The robot and the reader of prompts of a policy that LeRobot can prompt and act with."""
    processor, config = policy.processor, policy.model.config
    if processor is None or not isinstance(prompts := processor.prompts, Line):
        raise ValueError(
            "LeRobot's SmolVLA reads prompts as lines, but this policy does not; give --to chiliad."
        )
    if not isinstance(prompts.tokenizer, ByteBpe | None):
        raise ValueError(
            "LeRobot's SmolVLA reads prompts with a byte-level BPE tokenizer, but this policy has "
            "a list of words; train with --tokenizer, or give --to chiliad."
        )
    robot = processor.embodiments[policy.embodiment]
    if any(d >= 0 for d in robot.relative):
        raise ValueError(
            f"LeRobot's files have no place for actions relative to the state, as those of "
            f"'{robot.name}' are; give --to chiliad."
        )
    if any(not isinstance(fit, Corner) for fit in processor.fits):
        raise ValueError(
            "LeRobot's SmolVLA puts pictures into the lower right corner, but this policy takes "
            f"them as '{processor.fits[0].kind}'; give --to chiliad."
        )
    if config.solver != "euler":
        raise ValueError(
            f"LeRobot supports only Euler's steps, but this policy's model.solver is "
            f"'{config.solver}'; give --solver euler (solver of load_policy), or --to chiliad."
        )
    return robot, prompts


def _name(config: SmolvlaConfig) -> str:
    language = config.language
    facts = language.heads, language.kv_heads, language.head_dim, config.vision.heads
    for name, known in VLMS.items():
        if known == Vlm(*facts) and config.vocabulary == 49_280:
            return f"HuggingFaceTB/{name}"
    return _OWN


def _multiplier(config: SmolvlaConfig) -> float:
    """The expert's width as LeRobot gives it, a factor of the language model's.

    Raises:
      ValueError: the expert's hidden width is not the one that LeRobot derives from its width.
    """
    language, expert = config.language.width, config.expert
    factor = expert.width / language
    while int(language * factor) < expert.width:
        factor = float(np.nextafter(factor, np.inf))
    hidden = -(-4 * int(2 * expert.width / 3) // 256) * 256
    if expert.hidden != hidden:
        raise ValueError(
            f"LeRobot's expert of width {expert.width} has a hidden width of {hidden}, but "
            f"model.expert.hidden is {expert.hidden}; give --to chiliad."
        )
    return factor


def _write_vlm(folder: Path, config: SmolvlaConfig, prompts: Line) -> None:
    """Writes what LeRobot asks transformers for by the model's name: its config, its processor's
    settings and, if the policy has one, its tokenizer."""
    language, vision, words = config.language, config.vision, config.vocabulary
    side = (config.grid or config.image_size // vision.patch) * vision.patch
    tokenizer = prompts.tokenizer
    assert isinstance(tokenizer, ByteBpe | None)
    text: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": language.width,
        "intermediate_size": language.hidden,
        "num_hidden_layers": language.depth,
        "num_attention_heads": language.heads,
        "num_key_value_heads": language.kv_heads,
        "head_dim": language.head_dim,
        "rms_norm_eps": 1e-5,
        "vocab_size": words,
        "pad_token_id": 2,
        "torch_dtype": "float32",
    }
    tower = {
        "model_type": "smolvlm_vision",
        "hidden_size": vision.width,
        "intermediate_size": vision.hidden,
        "num_hidden_layers": vision.depth,
        "num_attention_heads": vision.heads,
        "image_size": side,
        "patch_size": vision.patch,
    }
    shown = {"longest_edge": side}
    half = [0.5] * 3
    files: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["SmolVLMForConditionalGeneration"],
            "model_type": "smolvlm",
            "image_token_id": _id(tokenizer, "<image>", words - 1),
            "pad_token_id": 2,
            "scale_factor": config.shuffle,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "text_config": text,
            "vision_config": tower,
            "vocab_size": words,
        },
        "preprocessor_config.json": {
            **dict.fromkeys(("do_convert_rgb", "do_image_splitting", "do_normalize"), True),
            **dict.fromkeys(("do_pad", "do_rescale", "do_resize"), True),
            "image_mean": half,
            "image_std": half,
            "image_processor_type": "SmolVLMImageProcessor",
            "max_image_size": shown,
            "processor_class": "SmolVLMProcessor",
            "resample": 1,
            "rescale_factor": 1 / 255,
            "size": {"longest_edge": 4 * side},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": shown},
        },
        "processor_config.json": {
            "image_seq_len": (side // vision.patch // config.shuffle) ** 2,
            "processor_class": "SmolVLMProcessor",
        },
    }
    if tokenizer is not None:
        files["tokenizer_config.json"] = {
            "bos_token": "<|im_start|>",
            "eos_token": "<end_of_utterance>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "extra_special_tokens": _SPECIAL,
            **_SPECIAL,
            "model_max_length": 8192,
            "processor_class": "SmolVLMProcessor",
            "tokenizer_class": "PreTrainedTokenizerFast",
            "truncation_side": prompts.cut,
        }
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=1) + "\n")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(tokenizer.json)


def _id(tokenizer: ByteBpe | None, name: str, default: int) -> int:
    try:
        return default if tokenizer is None else tokenizer.id(name)
    except ValueError:
        return default
