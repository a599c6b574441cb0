"""Faults planted in a copy of the product, one at a time: the suite must kill every one of them. ``make mutants``."""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOUNS = ("pool", "mover", "store", "promotion", "copydown", "lending")
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
        "a ticket past its deadline runs all the same",
        "kvstore/mover.py",
        "if self.clock() >= ticket.deadline_s:",
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
        "a lease can be released twice",
        "kvstore/store.py",
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
        "if trailer != xxhash.xxh3_64_intdigest(body):",
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
)


def survives(mutant: Mutant, folder: Path) -> bool:
    """Whether the suite passes with the fault in place."""
    path = folder / mutant.path
    sound = path.read_text()
    if sound.count(mutant.old) != 1:
        sys.exit(
            f"mutant {mutant.name!r} no longer fits {mutant.path}: its text is there {sound.count(mutant.old)} times"
        )
    path.write_text(sound.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.suite]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    path.write_text(sound)
    return done.returncode == 0


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("kvstore", "gpu_io", "connectors", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        survivors = []
        for mutant in MUTANTS:
            survived = survives(mutant, folder)
            print(f"{'SURVIVED' if survived else 'killed':9} {mutant.name}", flush=True)  # noqa: T201 - a script's report
            survivors += [mutant.name] if survived else []
    sys.exit(f"{len(survivors)} of {len(MUTANTS)} mutants survived" if survivors else 0)


if __name__ == "__main__":
    main()
