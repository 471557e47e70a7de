"""Errors as one sentence: memory that runs out, on the host and on devices."""

import jax
import pytest

from parallel.hosts import exits

GPU = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 43,000,000,000 bytes.
BufferAssignment OOM Debugging.
"""


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 4e13 bytes."),
            ": 40,000.0 GB were asked for at once",
        ),
        (jax.errors.JaxRuntimeError(GPU), ": 43.0 GB were asked for at once"),
        (
            jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
            "",
        ),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate request for 2.5GiB"),
            ": 2.7 GB were asked for at once",
        ),
        (
            MemoryError("Unable to allocate 728. TiB for an array with shape (10000000000000, 10)"),
            ": 800,444.5 GB were asked for at once",
        ),
        (
            jax.errors.JaxRuntimeError("INTERNAL: Failed to Allocate 1,2,e GiB " + 300 * "x"),
            "",
        ),
        (MemoryError(), ""),
    ],
)
def test_memory_that_runs_out_is_a_sentence_with_the_bytes_and_what_helps(error, asked):
    with (
        pytest.raises(exits.OutOfMemory) as found,
        exits.in_memory("never said", ("x", "y")),
        exits.in_memory("a step takes 8 rows", ("fewer (--a)", "b")),
    ):
        raise error
    line = str(error).splitlines()[0][:200] if str(error) else ""
    quoted = f" ({line})" if line else ""
    said = f"Memory ran out{asked}; a step takes 8 rows; in this order, try fewer (--a) or b."
    said += quoted
    assert exits.sentence(found.value) == said
    assert exits.code(found.value, begun=True) == exits.FAILED
    plain = f"Memory ran out{asked}; take less at a time, or a machine with more memory.{quoted}"
    assert exits.sentence(error) == plain


@pytest.mark.parametrize(
    "words",
    [
        "INTERNAL: nothing about room",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 270336, available: 2324",
        "RESOURCE_EXHAUSTED: Received message larger than max (5 vs. 4)",
        "RESOURCE_EXHAUSTED: Too many open files",
    ],
)
def test_other_errors_of_xla_keep_their_traceback(words):
    error = jax.errors.JaxRuntimeError(words)
    with pytest.raises(jax.errors.JaxRuntimeError), exits.in_memory("", ("a", "b")):
        raise error
    assert exits.sentence(error) is None
