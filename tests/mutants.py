"""Faults planted in a copy of the product, one at a time: the suite must kill every one of them. ``make mutants``.

make mutants ARGS=server    only those in files with that in their path
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOUNS = ("pool", "mover", "store", "promotion", "copydown", "lending")
CLIENTS = "tests/fault/test_sidecar_clients.py"
RANKS = "tests/fault/test_sidecar_ranks.py"
TENANTS = "tests/integration/test_sidecar_tenants.py"
BATCHES = ("tests/unit/test_batched_copy.py",)
BOUNCE = ("tests/unit/test_bounce.py",)
ENGINES = ("tests/unit/test_engine_simulator.py",)
SUITE = (*(f"tests/unit/test_{noun}.py" for noun in NOUNS), "tests/stateful")


@dataclass(frozen=True)
class Mutant:
    name: str
    path: str
    old: str
    new: str
    suite: tuple[str, ...] = SUITE


MUTANTS = (
    Mutant(
        "every rank has the heads of the first one",
        "kvstore/layout.py",
        "return slice(rank * num_bytes, (rank + 1) * num_bytes)",
        "return slice(0, num_bytes)",
        ("tests/unit/test_layout.py",),
    ),
    Mutant(
        "engines of different dtypes share quantised blocks",
        "kvstore/layout.py",
        'quantisation=f"channel-token of {self.dtype}"',
        'quantisation="channel-token of float32"',
        ("tests/unit/test_hashing.py",),
    ),
    Mutant(
        "kernels round fp8 up where two codes are as near",
        "gpu_io/quantiser_kernels.py",
        "0x7FFFF + ((magnitude >> 20) & 1)",
        "0x80000",
        ("tests/unit/test_quantiser.py",),
    ),
    Mutant(
        "a group with a NaN gets a number for its scale",
        "gpu_io/quantiser_kernels.py",
        "tl.where(is_finite, scale, _NAN)",
        "scale",
        ("tests/unit/test_quantiser.py",),
    ),
    Mutant(
        "a layer counts as there when its first stripe is",
        "gpu_io/copy_plan.py",
        "return max(0, layers.stop - (self.num_stripes - 1) * self.num_layers)",
        "return min(layers.stop, self.num_layers)",
        ("tests/unit/test_copy_plan.py",),
    ),
    Mutant(
        "a batch is read before compute has written",
        "gpu_io/driver_batch.py",
        "STREAM_ORDER = 1",
        "STREAM_ORDER = 3",
        BATCHES,
    ),
    Mutant(
        "a batch that the driver refuses is lost",
        "gpu_io/direct_path.py",
        "self._copy(piece, is_offload=is_offload).run()",
        "pass",
        BATCHES,
    ),
    Mutant(
        "memory that a device may still write to is given back",
        "gpu_io/calibration.py",
        "            keep_for_good(taken)\n            return None",
        "            pass",
        BATCHES,
    ),
    Mutant(
        "what somebody else has registered counts as ours",
        "gpu_io/registration.py",
        "                continue\n",
        "                self._ours.add(chunk)\n                continue\n",
        BATCHES,
    ),
    Mutant(
        "the host finishes a copy that has failed",
        "gpu_io/bounced_ticket.py",
        "if self._is_offload and not self.failed:",
        "if self._is_offload:",
        BOUNCE,
    ),
    Mutant(
        "a round begins after the ticket has failed",
        "gpu_io/bounced_ticket.py",
        "if self._rounds and not self.failed:",
        "if self._rounds:",
        BOUNCE,
    ),
    Mutant(
        "a slow disk is waited for",
        "kvstore/promotion.py",
        "return num_tried if lane.reads.take_trial(self._mover.clock(), num_tried * layout.block_bytes) else 0",
        "return count",
    ),
    Mutant(
        "what others wait for costs nothing",
        "kvstore/promotion.py",
        "lane.reads.seconds(ahead_bytes + count * layout.block_bytes)",
        "lane.reads.seconds(count * layout.block_bytes)",
    ),
    Mutant(
        "copies at the same time count one after another",
        "kvstore/placement.py",
        "max(0.0, ended_s - max(began_s, self._read_until_s))",
        "ended_s - began_s",
        ("tests/unit/test_placement.py",),
    ),
    Mutant(
        "a pinned block may be evicted",
        "kvstore/pool.py",
        "if slot in self._pins or self._children[slot]:",
        "if self._children[slot]:",
    ),
    Mutant(
        "a parent may be evicted before its child",
        "kvstore/pool.py",
        "if slot in self._pins or self._children[slot]:",
        "if slot in self._pins:",
    ),
    Mutant(
        "a slot under a copy is handed out again",
        "kvstore/pool.py",
        "if slot in self._pins or slot in self._holds:\n            self._move(slot, SlotState.QUARANTINED)",
        "if slot in self._pins:\n            self._move(slot, SlotState.QUARANTINED)",
    ),
    Mutant(
        "a quarantined slot never comes back",
        "kvstore/pool.py",
        "if self._state[slot] == SlotState.QUARANTINED and slot not in self._pins",
        "if False and slot not in self._pins",
    ),
    Mutant(
        "orphans are not linked again",
        "kvstore/pool.py",
        "for child in self._orphans.pop(key):",
        "for child in ():",
    ),
    Mutant(
        "a second commit of a key takes a second slot",
        "kvstore/pool.py",
        "if existing is not None:\n            self._give_back(slot)\n            return existing",
        "if False:\n            return slot",
    ),
    Mutant(
        "quarantine has no bound",
        "kvstore/pool.py",
        "return slot not in self._holds or self._counts[SlotState.QUARANTINED] < self._quarantine_bound",
        "return True",
    ),
    Mutant(
        "blocks past their age are served",
        "kvstore/pool.py",
        "if slot is None or (oldest_unix_s and self._created_unix_s[slot] < oldest_unix_s):",
        "if slot is None:",
    ),
    Mutant(
        "a promotion commits although the read failed",
        "kvstore/promotion.py",
        "if outcome is Outcome.OK:\n                    memory.commit_write",
        "if True:\n                    memory.commit_write",
    ),
    Mutant(
        "an abandoned read's slot goes straight back",
        "kvstore/promotion.py",
        "memory.quarantine_write(ns, slot_of[move.key])",
        "memory.abort_write(ns, slot_of[move.key])",
    ),
    Mutant(
        "a prefetch lets go of its prefix while it waits",
        "kvstore/promotion.py",
        "            pool.pin(slot)\n",
        "            pool.pin(slot)\n            pool.unpin(slot)\n            pool.pin(slot) if False else None\n",
    ),
    Mutant(
        "joined blocks are read twice",
        "kvstore/promotion.py",
        "if key in self._arriving or key in pool or (level.name, key) in prefetch.refused:",
        "if key in pool or (level.name, key) in prefetch.refused:",
    ),
    Mutant(
        "copy-down does not pin",
        "kvstore/copydown.py",
        "            pool.pin(slot)\n            pool.hold(slot)",
        "            pool.pin(slot)\n            pool.hold(slot)\n            pool.unpin(slot)",
    ),
    Mutant(
        "a write counts although it failed",
        "kvstore/copies.py",
        "if outcome is Outcome.OK:\n                        level.commit_write",
        "if True:\n                        level.commit_write",
    ),
    Mutant(
        "clear forgets the copies in flight",
        "kvstore/copies.py",
        "self._disownments[ns.digest] = self._disownments.get(ns.digest, 0) + 1",
        "pass",
    ),
    Mutant(
        "what a tier no longer has stays in the table",
        "kvstore/copies.py",
        "if outcome in (Outcome.ABSENT, Outcome.DAMAGED, Outcome.FOREIGN):",
        "if outcome is Outcome.DAMAGED:",
    ),
    Mutant(
        "damaged blocks are not erased",
        "kvstore/copies.py",
        "if damaged and self._mover.clock() < deadline_s:",
        "if False:",
    ),
    Mutant(
        "a late copy is never given up",
        "kvstore/mover.py",
        "stuck = [t for t in lane.in_flight if not t.overdue and now_s >= t.deadline_s + OVERDUE_GRACE_S]",
        "stuck: list[Ticket] = []",
    ),
    Mutant(
        "a prefetch waits in line behind what is copied down",
        "kvstore/mover.py",
        "(self._urgent if urgent else self._others).append(run)",
        "self._others.append(run)",
    ),
    Mutant(
        "copy-down waits for ever behind prefetches",
        "kvstore/mover.py",
        "if self._num_urgent_in_a_row >= MAX_URGENT_IN_A_ROW:",
        "if False:",
    ),
    Mutant(
        "a stream that ended is left to the interpreter's exit",
        "kvstore/client/stream.py",
        "error.__traceback__ = None",
        "pass",
        ("tests/integration/test_sidecar.py",),
    ),
    Mutant(
        "a ticket past its deadline runs all the same",
        "kvstore/mover.py",
        "if began_s >= ticket.deadline_s:",
        "if False:",
    ),
    Mutant(
        "a failing tier is asked for ever",
        "kvstore/breaker.py",
        "if self.state is BreakerState.HALF_OPEN or self._failures >= FAILURES_TO_OPEN:",
        "if False:",
        (*SUITE, "tests/unit/test_breaker.py"),
    ),
    Mutant(
        "a lent transfer counts blocks after a gap",
        "kvstore/lending.py",
        "if outcome is not Outcome.OK:\n                return index",
        "if outcome is None:\n                return index",
    ),
    Mutant(
        "a pin has its blocks in another order",
        "kvstore/leases.py",
        "return ReadLease(ns, chain[: len(slots)], slots,",
        "return ReadLease(ns, chain[: len(slots)], slots[::-1],",
        ENGINES,
    ),
    Mutant(
        "what an aborted reserve has is lost for good",
        "kvstore/leases.py",
        "                self._memory.abort_write(lease.ns, slot)",
        "                pass",
        ENGINES,
    ),
    Mutant(
        "groups of a model share their keys",
        "kvstore/namespace.py",
        "return namespace_digest(self.identity, self.layout)",
        'return namespace_digest(Identity("", b""), self.layout)',
        ENGINES,
    ),
    Mutant(
        "a lease can be released twice",
        "kvstore/leases.py",
        'lease.require(LeaseState.HELD, "release")\n        lease.state = LeaseState.ENDED',
        'lease.require(LeaseState.HELD, "release")',
    ),
    Mutant(
        "keys do not depend on their parents",
        "kvstore/hashing.py",
        "make(link + row)",
        "make(row)",
        ("tests/unit/test_hashing.py",),
    ),
    Mutant(
        "the header's own checksum checks nothing",
        "kvstore/header.py",
        "if trailer != xxhash.xxh3_64_intdigest(data[:_BODY_BYTES]):",
        "if False:",
        ("tests/unit/test_header.py",),
    ),
    Mutant(
        "a header of another layout is admitted",
        "kvstore/header.py",
        "if header.fingerprint != fingerprint:",
        "if False:",
        ("tests/unit/test_header.py",),
    ),
    Mutant(
        "slots of a lost client are handed out at once",
        "kvstore/server/session.py",
        "self.host.store.quarantine(write)\n            self.client.quarantined.append(",
        "self.host.store.abort(write)\n            list[Quarantined]().append(",
        (CLIENTS,),
    ),
    Mutant(
        "pins outlive their session",
        "kvstore/server/session.py",
        "for read in self.reads.values():\n            self.host.store.release(read)",
        "pass",
        (CLIENTS,),
    ),
    Mutant(
        "a silent client keeps everything",
        "kvstore/server/clients.py",
        "if session.idle_ticks > LEASE_TICKS:",
        "if False:",
        (CLIENTS,),
    ),
    Mutant(
        "a reader's lease never ends",
        "kvstore/client/session.py",
        "return not self.is_over and time.monotonic() < self.held_until_s",
        "return True",
        (CLIENTS,),
    ),
    Mutant(
        "a reader believes in a pong that nobody has seen",
        "kvstore/client/session.py",
        "sent_s = self._pongs_s.get(ping.last_pong)",
        "sent_s = now_s",
        ("tests/unit/test_client_session.py",),
    ),
    Mutant(
        "a client takes back its slots before it has stopped writing",
        "kvstore/client/store_client.py",
        "if newcomer is not None and all(",
        "if newcomer is not None or all(",
        (CLIENTS,),
    ),
    Mutant(
        "a commit takes the slots of one that failed",
        "kvstore/server/session.py",
        "if lease.num_named != commit.num_named:",
        "if False:",
        ("tests/unit/test_server_session.py",),
    ),
    Mutant(
        "what was pinned too late stays pinned",
        "kvstore/client/store_client.py",
        "session.tell(api.SessionRequest(end_leases=api.EndLeases(leases=[call])))  # in case it is only late",
        "pass",
        ("tests/integration/test_sidecar.py",),
    ),
    Mutant(
        "any token will do",
        "kvstore/server/tenants.py",
        "if hmac.compare_digest(tenant.token_digest, digest):",
        "if True:",
        (TENANTS,),
    ),
    Mutant(
        "tenants share their keys",
        "kvstore/server/tenants.py",
        "        if self.name:\n",
        "        if False:\n",
        (TENANTS,),
    ),
    Mutant(
        "tenants share their memory",
        "kvstore/server/handshake.py",
        "self._arenas.domains[tenant.domain].fd",
        "self._arenas.domains[0].fd",
        (TENANTS,),
    ),
    Mutant(
        "an extent takes its bytes along",
        "kvstore/tiers/domains.py",
        "if move.origin is not None and move.origin != move.to:",
        "if False:",
        ("tests/contract/test_memory_tier.py",),
    ),
    Mutant(
        "quotas bind nobody",
        "kvstore/slot_level.py",
        "return max(0, min(num_blocks, room_bytes() // share.slot_bytes))",
        "return num_blocks",
        (TENANTS,),
    ),
    Mutant(
        "a block is READY when one rank has come",
        "kvstore/server/ranks.py",
        "len(gathering.arrived) == gathering.num_ranks",
        "len(gathering.arrived) > 0",
        (RANKS,),
    ),
    Mutant(
        "a block's slot is free although a rank still writes to it",
        "kvstore/server/ranks.py",
        "        if not gathering.writers:\n            self._store.reclaim(gathering.lease)\n\n    def _leave",
        "        self._store.reclaim(gathering.lease)\n        gathering.writers.clear()\n\n    def _leave",
        (RANKS,),
    ),
    Mutant(
        "ranks are told different things",
        "kvstore/server/ranks.py",
        "lease = self._store.pin(joint.lease.keys)",
        "lease = self._store.pin(chain)",
        (RANKS,),
    ),
    Mutant(
        "a block from another host is not verified",
        "kvstore/server/remote.py",
        "if checksum(view) != wanted:",
        "if False:",
        ("tests/integration/test_sidecar_remote.py",),
    ),
)


def fails(suite: tuple[str, ...], folder: Path) -> str:
    """What pytest says of the first test in ``suite`` that fails; empty if none does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *suite]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    return "" if result.returncode == 0 else result.stdout + result.stderr


def survives(mutant: Mutant, folder: Path) -> bool:
    """Whether the suite passes with the fault in place."""
    path = folder / mutant.path
    sound = path.read_text()
    path.write_text(sound.replace(mutant.old, mutant.new))
    survived = not fails(mutant.suite, folder)
    path.write_text(sound)
    return survived


def main() -> None:
    chosen = [mutant for mutant in MUTANTS if all(word in mutant.path for word in sys.argv[1:])]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("kvstore", "gpu_io", "connectors", "bench", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for suite in dict.fromkeys(mutant.suite for mutant in chosen):
            if said := fails(suite, folder):
                sys.exit(f"{said}\n{', '.join(suite)} fails without any fault, so that it kills nothing")
        survivors = []
        for mutant in chosen:
            survived = survives(mutant, folder)
            print(f"{'SURVIVED' if survived else 'killed':9} {mutant.name}", flush=True)  # noqa: T201 - a script's report
            survivors += [mutant.name] if survived else []
    sys.exit(f"{len(survivors)} of {len(chosen)} mutants survived" if survivors else 0)


if __name__ == "__main__":
    main()
