"""What a store has at this moment, as metrics. Owner thread only."""

from collections.abc import Iterable

from kvstore.breaker import BreakerState
from kvstore.mover import Lane
from kvstore.pool import SlotState
from kvstore.slot_level import SlotLevel
from kvstore.stats import Stats


def set_gauges(stats: Stats, levels: Iterable[SlotLevel], lanes: Iterable[Lane]) -> None:
    """Of every level and of the way to every tier."""
    for level in levels:
        pools = [pool for _, pool in level.pools()]
        stats.set("kvstore_evicted_blocks_total", sum(pool.num_evicted for pool in pools), level.name)
        stats.set("kvstore_capacity_bytes", level.capacity_bytes, level.name)
        stats.set("kvstore_used_bytes", level.used_bytes, level.name)
        stats.set("kvstore_blocks", sum(map(len, pools)), level.name)
        stats.set("kvstore_pinned_blocks", sum(pool.num_pinned for pool in pools), level.name)
        quarantined = sum(pool.num(SlotState.QUARANTINED) for pool in pools)
        stats.set("kvstore_quarantined_slots", quarantined, level.name)
    for lane in lanes:
        stats.set("kvstore_tickets_in_flight", len(lane.in_flight), lane.name)
        stats.set("kvstore_in_flight_bytes", lane.bytes_in_flight, lane.name)
        stats.set("kvstore_copy_seconds_total", lane.copy_s, lane.name)
        stats.set("kvstore_breaker_openings_total", lane.breaker.num_openings, lane.name)
        if lane.reads.bytes_per_s is not None:
            stats.set("kvstore_read_bytes_per_second", lane.reads.bytes_per_s, lane.name)
            stats.set("kvstore_read_latency_seconds", lane.reads.latency_s, lane.name)
        for state in BreakerState:
            stats.set("kvstore_tier_state", lane.breaker.state is state, lane.name, state.value)
