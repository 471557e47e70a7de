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
    said = f"Memory ran out{asked}; a step takes 8 rows; in this order, try fewer (--a) or b."
    assert exits.sentence(found.value) == said
    assert exits.code(found.value, begun=True) == exits.FAILED
    plain = f"Memory ran out{asked}; take less at a time, or a machine with more memory."
    assert exits.sentence(error) == plain


def test_other_errors_of_xla_keep_their_traceback():
    error = jax.errors.JaxRuntimeError("INTERNAL: nothing about room")
    with pytest.raises(jax.errors.JaxRuntimeError), exits.in_memory("", ("a", "b")):
        raise error
    assert exits.sentence(error) is None
