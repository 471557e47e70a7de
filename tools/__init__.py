"""What people type: `python -m tools.<command>`, thin command lines over the other folders.

Settings that must stand before JAX starts are made here, once for all commands: MJX is up to 100
times slower with XLA's CPU fusion emitters, and programs over several devices of few cores need a
larger thread pool. Compiled programs are kept between commands.
"""

import os
from pathlib import Path

_EMITTERS = "--xla_cpu_use_fusion_emitters"

if _EMITTERS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EMITTERS}=false".strip()
os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache/chiliad/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
