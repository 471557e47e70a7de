"""`--help` of any command without JAX. The command is imported, and tyro makes the text from its
real dataclasses and functions, but packages that only compute, read or send data are left out.

Placeholders that do nothing stand in for these packages, enough for modules to define their
functions, classes and configs. They last only in a process that prints help and ends.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from math import nan
from types import ModuleType
from typing import Any, cast

# fmt: off
LEFT_OUT = frozenset({
    "absl", "array_record", "av", "etils", "flax", "fsspec", "google_crc32c", "grain",
    "httpx2", "huggingface_hub", "jax", "jaxlib", "jaxtyping", "matplotlib", "msgpack",
    "mujoco", "optax", "orbax", "PIL", "prometheus_client", "pyarrow", "ray", "scipy",
    "sentencepiece", "simplejpeg", "tensorboardX", "tensorstore", "tokenizers", "websockets",
    "yaml",
})
# fmt: on


def asks_for_help(arguments: Sequence[str]) -> bool:
    """True for arguments that make a command print its help.

    Arguments after `--` belong to another command. False if the arguments name a user's own Python
    file (`--preset FILE.py:NAME`), which may compute defaults: that help is made with everything
    imported.
    """
    ours = list(arguments)[: [*arguments, "--"].index("--")]
    return not {"-h", "--help"}.isdisjoint(ours) and not any(".py" in word for word in ours)


def leave_out_what_computes() -> None:
    """Makes placeholders of the packages that are imported from now on, in a process that is to
    print help. A process that parses its options and continues is ended. Does nothing once JAX is
    imported."""
    if "jax" in sys.modules:
        return
    sys.meta_path.insert(0, _Finder())
    if find_spec("tyro") is not None:  # `tools.bench.gpu` works without it, to say what is missing
        _end_after_parsing()


def join_lines() -> None:
    """Wraps the help of options at the terminal's width alone: tyro (1.0.17) also keeps the line
    breaks of docstrings. Does nothing without tyro's packages."""
    if find_spec("docstring_parser") is None:
        return
    import docstring_parser

    def joining(parse: Callable[..., docstring_parser.Docstring]) -> Any:
        def joined(*args: Any, **kwargs: Any) -> docstring_parser.Docstring:
            found = parse(*args, **kwargs)
            for each in found.params:
                each.description = re.sub(r"(?<=\S)\n *(?=\S)", " ", each.description or "") or None
            return found

        return joined

    for name in ("parse", "parse_from_object"):
        setattr(docstring_parser, name, joining(getattr(docstring_parser, name)))


def _end_after_parsing() -> None:
    import tyro

    parse = tyro.cli

    def print_help(*args: Any, **kwargs: Any) -> None:
        parse(*args, **kwargs)
        sys.exit("error: -h or --help was taken for the value of an option; give another value.")

    tyro.cli = cast(Any, print_help)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        left_out = name.partition(".")[0] in LEFT_OUT
        return ModuleSpec(name, self, is_package=True) if left_out else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return _Placeholder()

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Placeholder:
    """A package that is left out, or a value, type, base class or decorator of one."""

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return version(self.__name__)
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and isinstance(args[0], type) else self

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __float__(self) -> float:
        return nan

    def __getitem__(self, item: Any) -> Any:
        return self

    __or__ = __ror__ = __getitem__
