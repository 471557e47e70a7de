"""Room for compiled programs: each has up to twenty memory mappings of the 65,530 that Linux allows
a process, and XLA's compiler crashes at the limit."""

from pathlib import Path

_MOST = 20_000


def give_programs_up() -> None:
    """Gives all compiled programs up if the process has very many mappings."""
    mappings = Path("/proc/self/maps")
    if mappings.exists() and mappings.read_bytes().count(b"\n") > _MOST:
        import jax  # read once conftest's settings stand

        jax.clear_caches()
