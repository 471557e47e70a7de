"""A tower of a run from nothing begins with a ResNet's file, and a frozen one must."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from models.checkpoints.layout import their_arrays
from models.checkpoints.rename import Table
from models.checkpoints.resnet_file import open_resnet
from models.checkpoints.torch_rules import resnet
from models.layers.functional import Functional
from models.layers.vision.resnet import Resnet, ResnetConfig
from models.load import begin_new


class Tower:
    """A model that is a ResNet alone."""

    def __init__(self, config):
        self.made = Functional(lambda rngs: Resnet(config, "float32", rngs))

    def init(self, key):
        return {"tower": self.made.init(key), "head": jax.random.normal(key, (2,))}


@pytest.mark.parametrize("norm", ["frozen", "running"])
def test_a_tower_begins_with_a_file_and_the_rest_is_drawn(norm, tmp_path):
    config = ResnetConfig("resnet18", norm, 16)
    model = Tower(config)
    like = jax.eval_shape(model.init, jax.random.key(0))
    shapes = {path: x.shape for path, x in flatten_dict(like, sep="/").items() if path != "head"}
    rules = Table(resnet(ResnetConfig("resnet18", "running", 16), "tower", "", counted=True))
    running = flatten_dict(
        jax.eval_shape(Tower(ResnetConfig("resnet18", "running", 16)).init, jax.random.key(0)),
        sep="/",
    )
    theirs = their_arrays(rules, {n: x.shape for n, x in running.items() if n != "head"}, "it")
    drawn = np.random.default_rng(0)
    file = {n: drawn.random(x.shape, np.float32) for n, x in theirs.items()}
    file |= {"fc.weight": np.zeros((10, 128), np.float32), "fc.bias": np.zeros(10, np.float32)}
    save_file(file, tmp_path / "model.safetensors")
    found = open_resnet(str(tmp_path), config, "tower")
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), like)
    params = flatten_dict(begin_new(found, model, like, 3), sep="/")
    assert params.keys() == {*shapes, "head"}
    kernel = np.asarray(params["tower/conv1/kernel"])
    np.testing.assert_array_equal(kernel.transpose(3, 2, 0, 1), file["conv1.weight"])
    np.testing.assert_array_equal(params["head"], model.init(jax.random.key(3))["head"])


def test_a_tower_that_cannot_begin_so_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"hf://timm/resnet34.tv_in1k.*--init.*norm running"):
        open_resnet("", ResnetConfig("resnet34"), "tower")
    with pytest.raises(ValueError, match="norm 'group'"):
        open_resnet(str(tmp_path), ResnetConfig(norm="group"), "tower")
    assert open_resnet("", ResnetConfig(norm="running"), "tower") is None
    with pytest.raises(FileNotFoundError):
        open_resnet(str(tmp_path / "none"), ResnetConfig(), "tower")
    with pytest.raises(ValueError, match=r"never read; .*hf://timm/resnet18.*save_file"):
        open_resnet("resnet18-f37072fd.pth", ResnetConfig(), "tower")
