"""What people type: `python -m tools.<command>`, thin command lines over the other folders.

Settings that must stand before JAX starts are made here, once for all commands: MJX is up to 100
times slower with XLA's CPU fusion emitters; programs over several forced devices deadlock unless
the thread pool is large, which slows all others. Compiled programs are kept between commands.
"""

import os
from pathlib import Path

_EMITTERS = "--xla_cpu_use_fusion_emitters"
_FORCED = "--xla_force_host_platform_device_count"

if _EMITTERS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EMITTERS}=false".strip()
if _FORCED in os.environ["XLA_FLAGS"]:
    os.environ.setdefault("NPROC", "32")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache/chiliad/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
