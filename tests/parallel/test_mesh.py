import jax
import pytest

from parallel.mesh import MeshConfig, check_rows, make_mesh


def test_minus_one_takes_the_devices_that_are_left():
    sizes = {"data": 4, "fsdp": 2, "stage": 1, "context": 1, "tensor": 1}
    assert dict(make_mesh(MeshConfig(fsdp=2)).shape) == sizes
    assert make_mesh(MeshConfig(data=2, fsdp=-1)).axis_sizes == (1, 2, 4, 1, 1)
    assert make_mesh(devices=jax.devices()[:1]).axis_sizes == (1, 1, 1, 1, 1)


@pytest.mark.parametrize("sizes", [(-1, 3), (-1, -1), (2, 2), (0, -1), (-2, -4), (-1, 16)])
def test_sizes_that_do_not_fit_the_devices_are_refused(sizes):
    with pytest.raises(ValueError, match="does not fit 8 devices"):
        make_mesh(MeshConfig(*sizes))


def test_rows_must_divide_over_devices_and_micro_batches():
    mesh = make_mesh()
    check_rows(16, mesh, accumulation=2)
    with pytest.raises(ValueError, match="12 rows does not divide over 8 devices × 1"):
        check_rows(12, mesh)
    with pytest.raises(ValueError, match="16 rows does not divide over 8 devices × 4"):
        check_rows(16, mesh, accumulation=4)
