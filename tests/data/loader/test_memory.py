import gc
import pickle

import jax
import numpy as np

from data.loader.memory import BufferPool


def address(array):
    return array.ctypes.data


def test_memory_is_lent_again_once_an_array_and_its_views_are_gone():
    memory = BufferPool((3, 4))
    first = memory.lend()
    at, view = address(first), first.reshape(-1)[2:]
    view[:] = 7
    del first
    second = memory.lend()
    assert address(second) != at
    second[:] = 1
    assert (view == 7).all()
    del view
    assert address(memory.lend()) == at


def test_memory_that_a_device_shares_is_not_lent_again():
    memory = BufferPool((64, 1024))
    lent = memory.lend()
    lent[:] = 5
    at = address(lent)
    on_device = jax.device_put(lent)
    assert on_device.unsafe_buffer_pointer() == at  # no copy, so this is the case to get right
    doubled = jax.jit(lambda x: 2 * x)(on_device)
    del lent
    others = [memory.lend() for _ in range(4)]
    for other in others:
        assert address(other) != at
        other[:] = 9
    np.testing.assert_array_equal(on_device, 5)
    np.testing.assert_array_equal(doubled, 10)
    del on_device
    gc.collect()
    assert address(memory.lend()) == at


def test_lent_arrays_have_the_shape_and_can_be_written():
    memory = pickle.loads(pickle.dumps(BufferPool((2, 3, 5))))
    lent = memory.lend()
    assert (lent.shape, lent.dtype) == ((2, 3, 5), np.uint8)
    lent[:] = 3
    assert lent.flags.c_contiguous
