"""Copiers against their contract, and what one that copies in threads does while a copy is held up."""

from gpu_io.copier import Copier
from gpu_io.cpu_copier import CpuCopier
from gpu_io.pages import PagedKV
from gpu_io.testing import CopierContract


class TestCpuCopier(CopierContract):
    def open(self, kv: PagedKV) -> Copier:
        return CpuCopier(kv)
