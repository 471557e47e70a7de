"""Every host reads the same facts, each of the host that brought it."""

import pytest

from parallel.hosts.facts import facts_sharding
from parallel.mesh import MeshConfig, make_mesh


@pytest.mark.parametrize("config", [MeshConfig(data=4, stage=2), MeshConfig(data=4, tensor=2)])
def test_the_facts_of_a_device_stand_where_the_mesh_has_the_device(config):
    mesh = make_mesh(config)
    rows = facts_sharding(mesh).devices_indices_map((mesh.size,))
    assert [rows[device][0].start for device in mesh.devices.flat] == list(range(mesh.size))
