"""Checkpoints on the Hugging Face hub and in buckets, downloaded to this machine's disk. Every path
of a checkpoint may be a URL: `hf://org/name[@revision][/folder]` or any that fsspec knows.

Only what is needed is downloaded, never pickles or Python. Each content of a bucket (names, sizes,
tags) has a folder of its own, which gets its name when it is complete; hub files are kept in
huggingface_hub's cache.
"""

import fcntl
import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from models.files.address import Address, parse
from models.files.bounds import check_name
from models.files.bucket import Bucket, StoredFile
from models.files.foreign_json import parse_json, read_json
from models.files.hub import fetch_model
from models.files.terminal import byte_bar
from models.files.user_cache import user_cache

Wanted = Literal["policy", "statistics"]
Check = Callable[[dict[str, Any], str], None]
"""Called with a config.json and its place, before weights beside it are downloaded; raises if they
are not wanted."""
CONFIG = "config.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")

_WHOLE = re.compile(r"((?:checkpoints/)?(\d+)/)digests\.json")
_OURS = re.compile(r"(checkpoints/)?\d+/state/.*")
_WEIGHTS = re.compile(r"(params/)?_METADATA|digests\.json|.*\.safetensors")
_STATISTICS = re.compile(r".*\.json|(.*/)?policy_[^/]*\.safetensors")
_UNNEEDED = re.compile(
    r"(.*/)?(train_state|training_state|optimizer[^/]*|\.git[^/]*|\.cache)(/.*)?"
    r"|.*\.(bin|ckpt|gif|h5|joblib|mp4|msgpack|npy|npz|onnx|pickle|pkl|pt|pth|py)"
)
"""Optimizer states, videos, and files of weights in formats that run code or that nothing reads."""


def local(path: Path | str, wanted: Wanted = "policy", check: Check | None = None) -> Path:
    """The checkpoint on this machine's disk. If `path` is a URL, it is downloaded unless it is
    there already: of a run, its newest complete checkpoint; of a URL of a file, that file.

    Args:
      wanted: "statistics" does not download the weights of other codes' checkpoints.
      check: see `Check`.

    Raises:
      FileNotFoundError: nothing is there, or nothing that is a checkpoint.
      ValueError: it is not a URL that can be read, or lists a name that leads out of its folder.
      OSError: it cannot be reached, access is refused, or it changed during the download.
    """
    address = parse(path)
    if not address.is_remote:
        return address.path
    where = str(address)

    def choose(names: Mapping[str, object]) -> list[str]:
        return needed(where, list(names), wanted)

    def first(file: Path) -> None:
        if check is not None:
            check(read_json(file), f"{where}/{CONFIG}")

    if address.protocol == "hf":
        return fetch_model(where, choose, (CONFIG, first))
    return _fetched(address, choose, check)


def refuse_adapter(where: str, names: Collection[str]) -> None:
    """Raises ValueError if the files of a policy, of these `names`, are only an adapter of PEFT."""
    weights = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    others = [name for name in weights if not name.startswith(("policy_", _ADAPTER[1]))]
    if any(name in names for name in _ADAPTER) and not others:
        raise ValueError(
            f"{where} holds only an adapter of PEFT ({_ADAPTER[0]}), not the policy that it "
            "adapts; merge both where it was trained (`merge_and_unload()` of the PEFT model, then "
            "`save_pretrained`), and give that folder."
        )


def needed(url: str, names: Sequence[str], wanted: Wanted = "policy") -> list[str]:
    """The files to download of those under a URL: of a run of ours, its newest complete checkpoint;
    of anything else, what may hold weights or what belongs to them.

    Raises:
      FileNotFoundError: there is nothing of the kind.
    """
    whole = [found for name in names if (found := _WHOLE.fullmatch(name))]
    if whole:
        newest = max(whole, key=lambda found: int(found[2]))[1]
        return [name for name in names if name.startswith(newest)]
    if any(map(_OURS.fullmatch, names)):
        raise FileNotFoundError(
            f"{url}: holds no complete checkpoint, only one that is still being uploaded; wait "
            "until it has a digests.json, or give another URL."
        )
    if wanted == "policy":
        refuse_adapter(url, names)
    rule = _STATISTICS if wanted == "statistics" else _WEIGHTS
    if not any(map(rule.fullmatch, names)):
        raise FileNotFoundError(
            f"{url}: holds no {'statistics' if wanted == 'statistics' else 'checkpoint'}; give the "
            "folder of a run, of one of its checkpoints, of openpi's params or of safetensors."
        )
    if wanted == "statistics":
        return [name for name in names if rule.fullmatch(name)]
    return [name for name in names if not _UNNEEDED.fullmatch(name)]


def _fetched(
    address: Address,
    choose: Callable[[Mapping[str, StoredFile]], list[str]],
    check: Check | None,
) -> Path:
    url, place = str(address), address.place
    bucket = Bucket(url)
    listed = bucket.list()
    if not listed:
        raise FileNotFoundError(f"{url}: is empty or not there; check the name.")
    names = [""] if list(listed) == [""] else choose(listed)
    files = {name: listed[name] for name in names}
    if check is not None and CONFIG in names and (told := bucket.read(CONFIG)) is not None:
        check(parse_json(told, f"{url}/{CONFIG}"), f"{url}/{CONFIG}")
    check_name("A checkpoint's URL", place, nested=True)
    content = hashlib.sha256(repr((url, sorted(files.items()))).encode()).hexdigest()[:16]
    folder = user_cache("checkpoints") / content
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{content}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            partial = folder.with_name(f"{content}.partial")
            with byte_bar(f"Fetching {url}", sum(file.size for file in files.values())) as done:
                bucket.get(files, partial / place, done)
            now = bucket.list()
            if any(now.get(name) != file for name, file in files.items()):
                raise OSError(f"{url}: changed during the download; try again.")
            partial.rename(folder)
    return folder / place
