"""RAM as a level: its tables together with the bytes of its slots. Owner thread only."""

from collections.abc import Sequence

from kvstore.namespace import Namespace
from kvstore.slot_level import OnEvict, PolicyFactory, SlotLevel
from kvstore.tiers.memory import MemoryTier


class MemoryLevel(SlotLevel):
    """Where blocks of every layout are in RAM."""

    def __init__(self, tier: MemoryTier, policy: PolicyFactory, *, on_evict: OnEvict | None = None) -> None:
        """``on_evict`` as of ``SlotLevel``."""
        super().__init__(tier, policy, on_evict=on_evict)
        self._arena = tier.arena

    def buffer(self, ns: Namespace, slot: int) -> memoryview:
        """The whole slot, padding included, so that O_DIRECT can move it as it is."""
        (offset_bytes,) = self.offsets_bytes(ns.fingerprint, [slot])
        return self._arena.view(offset_bytes, self.tier.slot_bytes(ns.layout.block_bytes))

    def views(self, ns: Namespace, slots: Sequence[int]) -> list[memoryview]:
        """The block in each slot."""
        return self._arena.views(self.offsets_bytes(ns.fingerprint, slots), ns.layout.block_bytes)
