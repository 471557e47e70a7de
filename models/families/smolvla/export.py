"""A SmolVLA policy as LeRobot's folder, with the config and tokenizer of its vision-language model
in a folder of its name, so that LeRobot can load both without the hub.
"""

import json
from pathlib import Path

import numpy as np

from models.checkpoints.layout import exported
from models.checkpoints.lerobot_pipeline import TOKENIZE, step
from models.checkpoints.lerobot_policy import ACTION, STATE, Feature, picture_name, write_policy
from models.families.smolvla.checkpoint import VLMS, SmolvlaFields, Vlm
from models.families.smolvla.inputs import Corner, TaskLine
from models.families.smolvla.model import SmolvlaConfig
from models.families.smolvla.names import HEAD, table
from models.inputs.bpe import ByteBpe
from models.inputs.embodiment import Embodiment
from models.layers.adapters import merge
from models.policy import Policy

_OWN = "SmolVLM2"
"""Name of a vision-language model of other sizes than the published ones, a folder beside."""


def write(policy: Policy, target: Path) -> None:
    """Writes the policy of one robot in f32, with adapters folded in.

    Raises:
      ValueError: `target` holds a model, or LeRobot would prepare the policy's inputs or scale its
        actions differently, or it has no place for some parameter.
    """
    robot, prompts = _checked(policy)
    config, params = merge(policy.model.config, policy.params)
    name, depth = _name(config), config.language.depth
    side, width, wide = config.image_size, config.language.width, config.expert.width
    factor = wide / width
    told = SmolvlaFields(
        input_features={
            STATE: Feature("STATE", (len(robot.state.offset),)),
            **{
                picture_name(camera): Feature("VISUAL", (3, side, side)) for camera in robot.cameras
            },
        },
        output_features={ACTION: Feature("ACTION", (len(robot.actions.offset),))},
        chunk_size=config.horizon,
        n_action_steps=min(config.n_action_steps, config.horizon),
        max_state_dim=config.state_dim,
        max_action_dim=config.action_dim,
        resize_imgs_with_padding=(side, side),
        tokenizer_max_length=prompts.limit,
        num_steps=config.euler_steps,
        vlm_model_name=name,
        add_image_special_tokens=bool(config.image_tokens),
        pad_language_to="max_length",
        num_expert_layers=config.expert.depth,
        num_vlm_layers=depth,
        self_attn_every_n_layers=config.self_attention_every,
        expert_width_multiplier=factor if int(factor * width) == wide else (wide + 0.5) / width,
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
    arrays = exported(params, table(len(config.crosses)), "A SmolVLA checkpoint of LeRobot's")
    arrays[HEAD] = (config.vocabulary, width), lambda: np.zeros(1, np.float32)
    scales = {STATE: robot.state, ACTION: robot.actions}
    write_policy(target, told, arrays, scales, (step("smolvla_new_line_processor"), tokens))
    _write_vlm(target / name, config, prompts)


def _checked(policy: Policy) -> tuple[Embodiment, TaskLine]:
    """The robot and the reader of prompts of a policy that LeRobot can prompt and act with."""
    processor, config = policy.processor, policy.model.config
    if processor is None or not isinstance(prompts := processor.prompts, TaskLine):
        raise ValueError(
            "LeRobot's SmolVLA reads prompts as lines, but this policy does not; give --to chiliad."
        )
    robot, hidden = processor.embodiments[policy.embodiment], _hidden(config.expert.width)
    wrong = {
        "a list of words for a tokenizer": not isinstance(prompts.tokenizer, ByteBpe | None),
        "actions relative to the state": any(d >= 0 for d in robot.relative),
        f"units of adapter '{robot.adapter}'": bool(robot.adapter),
        "pictures in other places": any(not isinstance(fit, Corner) for fit in processor.fits),
        f"model.solver '{config.solver}'": config.solver != "euler",
        f"model.expert.hidden other than {hidden}": config.expert.hidden != hidden,
    }
    if any(wrong.values()):
        raise ValueError(
            f"This policy has {' and '.join(x for x, there in wrong.items() if there)}, for which "
            "LeRobot's SmolVLA has no place; give --to chiliad."
        )
    return robot, prompts


def _name(config: SmolvlaConfig) -> str:
    language = config.language
    facts = language.heads, language.kv_heads, language.head_dim, config.vision.heads
    for name, known in VLMS.items():
        if known == Vlm(*facts) and config.vocabulary == 49_280:
            return f"HuggingFaceTB/{name}"
    return _OWN


def _hidden(width: int) -> int:
    """LeRobot's hidden width of an expert."""
    return -(-4 * int(2 * width / 3) // 256) * 256


def _write_vlm(folder: Path, config: SmolvlaConfig, prompts: TaskLine) -> None:
    """Writes what LeRobot asks transformers for by the model's name: its config, its processor's
    settings and, if the policy has one, its tokenizer."""
    language, vision, words = config.language, config.vision, config.vocabulary
    side = (config.grid or config.image_size // vision.patch) * vision.patch
    files = json.loads(_FILES)
    told, shown = files["config.json"], files["preprocessor_config.json"]
    sizes = language.width, language.hidden, language.depth, language.heads
    told["text_config"] |= dict(zip(_SIZES, sizes, strict=True)) | {
        "num_key_value_heads": language.kv_heads,
        "head_dim": language.head_dim,
        "vocab_size": words,
    }
    sizes = vision.width, vision.hidden, vision.depth, vision.heads
    tower = dict(zip(_SIZES, sizes, strict=True)) | {"image_size": side, "patch_size": vision.patch}
    told["vision_config"] |= tower
    told |= {"scale_factor": config.shuffle, "vocab_size": words, "image_token_id": words - 1}
    shown |= {"max_image_size": {"longest_edge": side}, "size": {"longest_edge": 4 * side}}
    shown["video_sampling"]["video_size"] = {"longest_edge": side}
    tokens = (side // vision.patch // config.shuffle) ** 2
    files["processor_config.json"]["image_seq_len"] = tokens
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(tokenizer := prompts.tokenizer, ByteBpe):
        settings = files["tokenizer_config.json"]
        settings |= settings["extra_special_tokens"] | {"truncation_side": prompts.cut}
        told["image_token_id"] = tokenizer.id(settings["image_token"])
        (folder / "tokenizer.json").write_text(tokenizer.json)
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values, indent=1) + "\n")


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_FILES = """{
"config.json": {
 "architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm", "pad_token_id": 2,
 "tie_word_embeddings": false, "torch_dtype": "float32",
 "text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "pad_token_id": 2,
  "torch_dtype": "float32"},
 "vision_config": {"model_type": "smolvlm_vision"}},
"preprocessor_config.json": {
 "image_processor_type": "SmolVLMImageProcessor", "processor_class": "SmolVLMProcessor",
 "do_convert_rgb": true, "do_image_splitting": true, "do_normalize": true, "do_pad": true,
 "do_rescale": true, "do_resize": true, "resample": 1, "rescale_factor": 0.00392156862745098,
 "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
 "video_sampling": {"fps": 1, "max_frames": 64}},
"processor_config.json": {"processor_class": "SmolVLMProcessor"},
"tokenizer_config.json": {
 "tokenizer_class": "PreTrainedTokenizerFast", "processor_class": "SmolVLMProcessor",
 "bos_token": "<|im_start|>", "eos_token": "<end_of_utterance>", "pad_token": "<|im_end|>",
 "unk_token": "<|endoftext|>", "clean_up_tokenization_spaces": false, "model_max_length": 8192,
 "extra_special_tokens": {"fake_image_token": "<fake_token_around_image>",
  "global_image_token": "<global-img>", "image_token": "<image>"}}}"""
"""Constant parts of the files that transformers reads of a SmolVLM2."""
