"""Errors for operators and bugs. A miss, a full tier and a busy mover are values, never exceptions.

Every message says what happened, to what, and what to do about it.
"""


class KVStoreError(Exception):
    """Base of every error this project raises on purpose; an edge turns it into a miss and a counter."""


class ConfigError(KVStoreError):
    """The configuration cannot be used: an unknown key, a nonsense size, a capacity the machine lacks."""


class LayoutError(KVStoreError):
    """A layout is impossible, does not fit a tier, or is not the one that was registered."""


class IdentityError(KVStoreError):
    """What says whose blocks they are is of the wrong kind, or out of range."""


class TokenError(KVStoreError):
    """Token ids are out of range or not integers."""


class LeaseError(KVStoreError):
    """A lease was used after its end: committed twice, released twice, or after abort."""


class DeadlineError(KVStoreError):
    """A deadline is not a moment in time."""


class OwnershipError(KVStoreError):
    """A directory belongs to another live process, or to another user."""


class FormatError(KVStoreError):
    """Bytes on disk are of a format this version must not touch, such as a newer one."""


class TierUnavailableError(KVStoreError):
    """A tier could not be opened at all."""


class WireError(KVStoreError):
    """A message from another process cannot be used: out of order, out of bounds, or of nothing that is known."""


class SidecarError(KVStoreError):
    """A sidecar that an operator asked something of gave no answer, or refused."""


class ClosedError(KVStoreError):
    """The store was used after ``close``."""
