"""The page that says what a directory is: which part of which store, in which format. Pure.

The id tells directories of different stores apart. It changes whenever a store goes on without one of its directories,
so that the lost one, with blocks that were erased meanwhile, is not taken back.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from kvstore.errors import ConfigError, FormatError

SUPERBLOCK_BYTES = 4096
STORE_ID_BYTES = 16
FORMAT_VERSION = 1

_MAGIC = b"TKVFILES"
_VERSIONED = struct.Struct("<8sH")  # of every version, past and future
_FIELDS = struct.Struct("<8sHHH2x16sQ")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Superblock:
    """One directory of a store."""

    store_id: bytes
    directory: int
    num_directories: int
    stride_bytes: int

    def pack(self) -> bytes:
        """The page."""
        fields = _FIELDS.pack(
            _MAGIC, FORMAT_VERSION, self.directory, self.num_directories, self.store_id, self.stride_bytes
        )
        body = fields.ljust(SUPERBLOCK_BYTES - _CHECKSUM.size, b"\0")
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def parse(page: bytes, where: str) -> Superblock | None:
    """The superblock; None where it is older, damaged or empty, so that the directory starts afresh.

    Raises ``FormatError`` for one that is newer or not ours.
    """
    if len(page) < SUPERBLOCK_BYTES or not any(page):
        return None  # it never reached the disk
    magic, version = _VERSIONED.unpack_from(page)
    if magic != _MAGIC:
        raise FormatError(f"{where} is not of a kvstore: give file.directories a directory of its own")
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{where} has format {version}, newer than {FORMAT_VERSION}, which is what this release reads:"
            " use the newer release, or another directory"
        )
    body, checksum = page[: -_CHECKSUM.size], page[-_CHECKSUM.size :]
    if version < FORMAT_VERSION or checksum != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)):
        return None
    _, _, directory, num_directories, store_id, stride_bytes = _FIELDS.unpack_from(page)
    return Superblock(store_id, directory, num_directories, stride_bytes)


def complete(
    found: Sequence[Superblock | None], names: Sequence[str], stride_bytes: int, new_id: bytes
) -> list[Superblock]:
    """The superblock that each directory shall have, in the order of ``found``; fresh ones take the free places.

    ``stride_bytes`` and ``new_id`` are for a store that has to be made, ``new_id`` also for one that lost a directory.
    Raises ``ConfigError`` where the directories do not belong together.
    """
    known = [(block, name) for block, name in zip(found, names, strict=True) if block is not None]
    for block, name in known:
        _check_membership(block, name, known[0], len(found))
    taken = [block.directory for block, _ in known]
    if len(set(taken)) != len(taken):
        raise ConfigError(f"{' and '.join(name for _, name in known)} are copies of one directory: empty one of them")
    free = iter(sorted(set(range(len(found))) - set(taken)))
    if not known:
        return [Superblock(new_id, place, len(found), stride_bytes) for place in free]
    is_whole = len(known) == len(found)
    model = known[0][0] if is_whole else replace(known[0][0], store_id=new_id)
    return [replace(model, directory=next(free) if block is None else block.directory) for block in found]


def _check_membership(block: Superblock, name: str, first: tuple[Superblock, str], num_directories: int) -> None:
    first_block, first_name = first
    if block.store_id != first_block.store_id:
        raise ConfigError(
            f"{name} and {first_name} belong to different stores: name the directories of one store in"
            " file.directories, or empty those that shall join"
        )
    if block.num_directories != num_directories:
        raise ConfigError(
            f"{name} is one of {block.num_directories} directories of its store, but file.directories names"
            f" {num_directories}: name all of them, or empty them to start afresh"
        )
