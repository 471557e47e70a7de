"""Processors of older checkpoints: one object of 19 fields, before a preparation was composed of
parts."""

from typing import Any

_PARTS = (
    *("image_size", "resize", "words", "sentencepiece", "bpe", "chat", "text_limit"),
    *("spells_padding", "cleans", "writes", "blackens", "fast", "fast_top"),
)
_NORMALIZE = {"openpi": "lower", "lerobot": "spaces", "plain": "spaces"}


def current_fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a processor's JSON as they are today; those of today stay."""
    if "image_size" not in values or "pictures" in values:
        return values
    old = {name: values[name] for name in _PARTS if name in values}
    kept = {name: value for name, value in values.items() if name not in _PARTS}
    writes, fast, size = old.get("writes"), old.get("fast"), old["image_size"]
    if writes or fast is not None:
        kind = "written_fast" if writes else "fast"
        kept["targets"] = {"kind": kind, "fast": fast, "top": old.get("fast_top", 0)}
    return kept | {
        "prompts": _prompts(old, values.get("state_input")),
        "pictures": {"kind": old.get("resize", "antialiased"), "size": size},
        "black_absent": old.get("blackens", False),
    }


def _prompts(old: dict[str, Any], state_input: Any) -> dict[str, Any]:
    read = {"tokenizer": _tokenizer(old), "limit": old.get("text_limit", 200)}
    if old.get("chat"):
        return {"kind": f"{old['chat']}_turn", **read}
    writes, template = old.get("writes"), ["{prompt}", "\n"]
    if state_input == "text":
        template = ["Task: {prompt}, State: {state};\n" + ("" if writes else "Action: ")]
    plain = "spaces" if old.get("cleans", True) else "line"
    return {
        "kind": "template",
        **read,
        "template": template,
        "normalize": _NORMALIZE.get(str(writes), plain),
        "begin_last": writes == "lerobot",
        "pad_state_text": old.get("spells_padding", False),
    }


def _tokenizer(old: dict[str, Any]) -> dict[str, Any] | None:
    if old.get("bpe"):
        return {"kind": "byte_bpe", "packed": old["bpe"]}
    if old.get("sentencepiece"):
        return {"kind": "sentencepiece", "model": old["sentencepiece"]}
    return {"kind": "words", "words": old["words"]} if old.get("words") else None
