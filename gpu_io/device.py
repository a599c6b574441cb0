"""Which copier serves which device. A new kind of device is one more file and one more line here."""

from gpu_io.copier import Copier
from gpu_io.cpu_copier import CpuCopier
from gpu_io.pages import PagedKV
from gpu_io.pipeline import PipelineCopier
from gpu_io.torch_device import TorchDevice


def copier_for(kv: PagedKV) -> Copier:
    """A copier for the device that ``kv`` is on. Raises ``LayoutError`` for pages it cannot serve."""
    return CpuCopier(kv) if kv.device.type == "cpu" else PipelineCopier(kv, TorchDevice(kv.device))
