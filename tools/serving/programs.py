"""Programs of a policy that are kept on disk, so that a server starts again in seconds.

Traced programs are kept here (StableHLO, by `jax.export`), compiled ones in JAX's own cache. A
program's name is a digest of everything that it is made from, including the source of `models`.
"""

import hashlib
import json
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import export

import models
from models import Policy
from models.config import to_json
from models.files.terminal import logger
from models.files.user_cache import user_cache
from models.files.whole_text import replacing

log = logger(__name__)


def keep_compiled() -> None:
    """Lets JAX keep compiled programs in the user's cache, unless another place is set (as by
    JAX_COMPILATION_CACHE_DIR)."""
    config: Any = jax.config
    if config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def with_programs(policy: Policy, folder: Path | None = None) -> Policy:
    """The policy with programs that are kept in `folder`, or in the user's cache if None. Whatever
    the policy is made from must not change afterwards."""
    facts = (*_made_from(policy), jax.__version__, jax.devices()[0].device_kind)
    made = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    kept = user_cache("programs") if folder is None else folder
    return policy.sampling_by(lambda sample: Programs(sample, made, kept))


class _Flat(NamedTuple):
    """A tree of arrays, and the kind of tree that it is: structure, shapes and dtypes."""

    leaves: list[Any]
    tree: Any
    kind: str

    @classmethod
    def of(cls, tree: Any) -> "_Flat":
        leaves, structure = jax.tree.flatten(tree)
        return cls(leaves, structure, f"{structure} {[(x.shape, str(x.dtype)) for x in leaves]}")


@dataclass
class Programs:
    """A jitted function of parameters and more, whose traced programs are kept in `folder`. Their
    names are digests of the arguments' shapes and of `made`, everything else that they are made
    from."""

    function: Any
    made: str
    folder: Path
    _known: dict[Any, Any] = field(default_factory=dict)
    _last: tuple[Any, _Flat] | None = None
    """The last parameters, as a policy has the same in every request, in hundreds of arrays."""

    def __call__(self, params: Any, *arguments: Any) -> jax.Array:
        last = self._last
        if last is None or last[0] is not params:
            self._last = last = params, _Flat.of(params)
        weights, more = last[1], _Flat.of(arguments)
        if (key := (weights.kind, more.kind)) not in self._known:
            self._known[key] = self._program(weights, more)
        return self._known[key](*weights.leaves, *more.leaves)

    def _program(self, weights: _Flat, more: _Flat) -> Any:
        told = f"{self.made} {weights.kind} {more.kind}"
        file = self.folder / f"{hashlib.sha256(told.encode()).hexdigest()}.stablehlo"
        if (kept := _kept(file)) is not None:
            return jax.jit(kept.call)
        leaves = (*weights.leaves, *more.leaves)
        count = len(weights.leaves)

        @jax.jit
        def flat(*leaves: Any) -> jax.Array:
            params = jax.tree.unflatten(weights.tree, leaves[:count])
            return self.function(params, *jax.tree.unflatten(more.tree, leaves[count:]))

        try:
            traced = export.export(flat)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))
        except ValueError as error:  # kernels that jax.export does not keep
            log.warning(
                "this program cannot be saved and is traced at every start: %s", str(error)[:200]
            )
            return flat
        with replacing(file) as partial:
            partial.write_bytes(traced.serialize())
        return jax.jit(traced.call)


def _kept(file: Path) -> export.Exported | None:
    """The program in a file; None if there is none that can be read."""
    if not file.is_file():
        return None
    try:
        return export.deserialize(bytearray(file.read_bytes()))
    except Exception:  # flatbuffers and MLIR raise whatever they stumble on
        log.warning("%s is damaged; the program is traced again", file)
        return None


def _made_from(policy: Policy) -> tuple[Any, ...]:
    own = sys.modules[type(policy.model).__module__].__file__
    processor = None if policy.processor is None else to_json(policy.processor)
    acting = policy.continues, policy.guidance, policy.embodiment
    source = hashlib.sha256(Path(own).read_bytes()).hexdigest() if own else ""
    return to_json(policy.model.config), processor, acting, source, _sources()


@cache
def _sources() -> str:
    found = hashlib.sha256()
    for file in sorted(Path(models.__file__).parent.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()
