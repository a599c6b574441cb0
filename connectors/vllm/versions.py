"""Which releases of vLLM this connector works with: its interface and its tensors' layout change between them."""

from collections.abc import Collection

from kvstore.errors import ConfigError

OLDEST = (0, 32)
NEWEST = (0, 32)
"""The newest that was run. A newer one is taken, with a warning, if it has what is needed."""
NEEDED = ("bind_gpu_block_pool", "get_transfer_results", "has_pending_push_work", "on_new_request")


def parse(version: str) -> tuple[int, int]:
    """``0.32.0+cpu`` to ``(0, 32)``. Raises ``ConfigError`` for what is no release."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        raise ConfigError(f"vLLM says it is version {version!r}, which is no release: install {_wanted()}")
    return int(major), int(minor)


def require_supported(version: str, methods: Collection[str]) -> None:
    """Raises ``ConfigError`` for a release that cannot work. ``methods``: those of its base class for connectors."""
    missing = [name for name in NEEDED if name not in methods]
    if parse(version) < OLDEST:
        raise ConfigError(f"vLLM {version} is too old for this connector: install {_wanted()}")
    if missing:
        raise ConfigError(f"vLLM {version} lacks {', '.join(missing)}, which this connector needs: use {_wanted()}")


def is_unknown(version: str) -> bool:
    """Whether it is newer than any that was run."""
    return parse(version) > NEWEST


def _wanted() -> str:
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"vLLM {oldest}" if oldest == newest else f"vLLM {oldest} to {newest}"
