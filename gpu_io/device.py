"""Which copier serves which device. A new kind of device is one more file and one more line here."""

from gpu_io.copier import Copier
from gpu_io.cpu_copier import CpuCopier
from gpu_io.packing import packer_for
from gpu_io.pages import PagedKV
from gpu_io.pipeline import PipelineCopier
from gpu_io.torch_device import TorchDevice


def copier_for(kv: PagedKV) -> Copier:
    """A copier for the device that ``kv`` is on, whose pages nobody uses yet.

    Raises ``LayoutError`` for pages it cannot serve.
    """
    if kv.device.type == "cpu":
        return CpuCopier(kv)
    return PipelineCopier(kv, TorchDevice(kv.device), packer_for(kv))
