"""ResNets trained on pictures alone, with which towers of policies begin: safetensors under
torchvision's names, as timm publishes them on the hub (its `tv_in1k` are torchvision's own)."""

from models.checkpoints.remote import local
from models.checkpoints.rename import Table
from models.checkpoints.sources import CheckpointSource, open_safetensors
from models.checkpoints.torch_rules import resnet
from models.layers.vision.resnet import ResnetConfig


def open_resnet(
    where: str, config: ResnetConfig, ours: str
) -> tuple[CheckpointSource, Table] | None:
    """The arrays for a tower whose parameters are at the path `ours`; None if it is trained from
    nothing. The classifier is left out.

    Args:
      where: file or folder of safetensors, or its URL (hf://timm/resnet18.tv_in1k); "" for none.

    Raises:
      FileNotFoundError: nothing is there.
      ValueError: the tower is frozen, but no file is given; or it has group norms, but one is; or
        the file is torch's own.
    """
    if not where and config.norm == "frozen":
        raise ValueError(
            "A ResNet of norm 'frozen' needs weights that were trained elsewhere; give "
            f"--model.tower-weights hf://timm/{config.name}.tv_in1k (torchvision's) or a file of "
            "such safetensors, start from a policy with --init, or train the statistics with "
            "--model.tower.norm running."
        )
    if where and config.norm == "group":
        raise ValueError(
            f"{where} is a ResNet with batch norms, but the model's has norm 'group'; leave out "
            "--model.tower-weights, or give --model.tower.norm running."
        )
    if where.endswith((".pth", ".pt", ".bin")):
        raise ValueError(
            f"{where} is a file of torch, a pickle, which is never read; give "
            f"--model.tower-weights hf://timm/{config.name}.tv_in1k, or write it as safetensors "
            f"where torch is: "
            f"safetensors.torch.save_file(torch.load('{where}', weights_only=True), "
            f"'{config.name}.safetensors')."
        )
    if not where:
        return None
    table = Table(resnet(config, ours, "", counted=True), (r"^fc\.", "num_batches_tracked$"))
    return open_safetensors(local(where)), table
