"""Settings that must stand before JAX starts: the fast CPU emitters, 8 forced devices, one
compilation cache."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["NPROC"] = (
    "32"  # thread pool size: without it loops over forced devices deadlock on few cores
)
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_cpu_use_fusion_emitters=false --xla_force_host_platform_device_count=8"
)

import jax

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
