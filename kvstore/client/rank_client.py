"""The client of one worker process of an engine that has several: each writes its part of every block."""

from collections.abc import Sequence
from pathlib import Path

from kvstore.api.v1 import kvstore_pb2 as api
from kvstore.client.session import no_views
from kvstore.client.store_client import BUDGET_S, Held, StoreClient
from kvstore.lease import LeaseState, ReadLease, StripeLease
from kvstore.namespace import Namespace
from kvstore.types import NAMESPACE_DIGEST_BYTES, BlockKey, Rank
from kvstore.wire import pack_rank


class RankClient(StoreClient):
    """A ``StoreClient`` that speaks for one rank.

    A slot is the whole block; which of its bytes are a rank's stripe is the engine's affair. The sidecar knows who has
    come. Ranks cannot disagree about what is there: its table is the only one, and ``pin_together`` answers all alike.
    """

    def __init__(self, rank: Rank, path: Path | None = None, *, token: str = "", budget_s: float = BUDGET_S) -> None:
        """A client of the sidecar at the socket ``path``, for ``rank``."""
        self.rank = rank
        super().__init__(path, token=token, name=f"{rank.engine} rank {rank.index}", budget_s=budget_s)

    def pin_together(self, chain: Sequence[BlockKey], request_id: str) -> ReadLease:
        """``pin``, but every rank of the engine gets the same blocks for the same request, whenever it asks."""
        return self._pin(chain, rank=pack_rank(self.rank), request_id=request_id)

    def reserve_stripes(self, ns: Namespace, keys: Sequence[BlockKey], parent: BlockKey | None) -> StripeLease:
        """Slots of ``keys`` that every rank writes its own part of; ``parent`` is the key before ``keys[0]``.

        The lease says which keys it is for: those for which there is room and that the rank has not reserved before.
        ``abort``, ``quarantine`` and ``reclaim`` are those of any write lease; they cost the block for all ranks.
        """
        self._require_open()
        opened, session, call = self._require_ours(ns), self._session(), next(self._calls)
        leased = api.Leased()
        if session is not None and keys:
            reserve = api.ReserveStripes(
                chain=self._pack(opened, keys),
                parent=parent[NAMESPACE_DIGEST_BYTES:] if parent is not None else b"",
                rank=pack_rank(self.rank),
            )
            leased = self._lease(session, call, "reserve_stripes", reserve_stripes=reserve)
        lease = StripeLease(
            ns,
            list(leased.offsets_bytes),
            session.views if session else no_views,
            self.abort,
            keys=[keys[index] for index in leased.indices],
        )
        if session is not None and lease.slots and not self._hold(lease, Held(session, call)):
            return StripeLease(ns, [], no_views, self.abort, keys=[])
        return lease

    def commit_stripes(self, lease: StripeLease) -> None:
        """The rank has written its part of every block of ``lease``; blocks that all ranks have written are READY."""
        lease.require(LeaseState.HELD, "commit")
        lease.state = LeaseState.ENDED
        held = self._held.pop(lease, None)
        if held is not None and held.session.holds:
            held.session.tell(api.SessionRequest(commit_stripes=api.CommitStripes(lease=held.call)))
