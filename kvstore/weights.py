"""A digest of a model's weights, to tell one model from another without reading all of it. For ``Identity.weights``.

Of every file it covers the size, the head (16 MiB, which holds the header of a GGUF file; the whole header of a
safetensors file, however long) and 1,024 samples of 4 KiB, evenly spread over the file by its size alone. Of a folder
it also covers ``config.json``, because the rest of a model's numbers, such as its rope scaling, lie there. No path,
name or time enters, so that a copy elsewhere is the same model.

What it cannot see: a change that touches nothing but bytes between the samples, such as one small tensor in a large
file that was edited by hand. Training, merging, quantising and converting change nearly every byte and are always seen.
Whoever edits single tensors in place raises ``Identity.epoch``.
"""

import hashlib
import os
from pathlib import Path

from kvstore.errors import ConfigError

HEAD_BYTES = 16 << 20
SAMPLE_BYTES = 4096
NUM_SAMPLES = 1024
SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")

_FORMAT = b"tkv-weights-1"


def weights_digest(path: Path) -> bytes:
    """32-byte digest of the weights file ``path``, or of all weights files right in the folder ``path``.

    Raises ``ConfigError`` where there are none or they cannot be read.
    """
    try:
        digests = sorted(_file_digest(file) for file in _files(path))
    except OSError as error:
        raise ConfigError(f"cannot read the weights at {path}: {error}") from error
    if not digests:
        raise ConfigError(f"no weights at {path}: expected a file or a folder with *{', *'.join(SUFFIXES)}")
    return hashlib.sha256(_FORMAT + b"".join(digests)).digest()


def _files(path: Path) -> list[Path]:
    """The weights, and config.json if there are any beside it."""
    if not path.is_dir():
        return [path]
    weights = [file for file in path.iterdir() if file.suffix in SUFFIXES and file.is_file()]
    config = path / "config.json"
    return [*weights, config] if weights and config.is_file() else weights


def _file_digest(path: Path) -> bytes:
    """sha256 of size, head and samples."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # read-ahead would read most of the file
        head_bytes = _head_bytes(fd, path)
        digest = hashlib.sha256(size_bytes.to_bytes(8, "little") + head_bytes.to_bytes(8, "little"))
        digest.update(os.pread(fd, head_bytes, 0))
        for offset in _sample_offsets(size_bytes):
            digest.update(os.pread(fd, SAMPLE_BYTES, offset))
        return digest.digest()
    finally:
        os.close(fd)


def _head_bytes(fd: int, path: Path) -> int:
    """A safetensors file begins with the length of its JSON header (8 bytes, little-endian)."""
    if path.suffix != ".safetensors":
        return HEAD_BYTES
    header_bytes = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
    return max(HEAD_BYTES, min(header_bytes, 1 << 30))  # a damaged length must not ask for all memory


def _sample_offsets(size_bytes: int) -> list[int]:
    """Where samples start: the first at the file's start, the last ending at its end."""
    last = size_bytes - SAMPLE_BYTES
    if last <= 0:
        return [0]
    return sorted({last * index // (NUM_SAMPLES - 1) for index in range(NUM_SAMPLES)})
