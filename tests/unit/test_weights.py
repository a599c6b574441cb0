"""The digest of weights: same content, same digest; any change in a header, a sample, a size or config.json is seen."""

import json
import os
import shutil
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.weights import HEAD_BYTES, NUM_SAMPLES, SAMPLE_BYTES, weights_digest

LARGE_BYTES = HEAD_BYTES + NUM_SAMPLES * SAMPLE_BYTES * 4
LAST = LARGE_BYTES - SAMPLE_BYTES


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    header = json.dumps({"t": {"dtype": "F32", "shape": [64], "data_offsets": [0, 256]}}).encode()
    (folder / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(256))
    (folder / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\x01" * 256)
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    return folder


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def sparse(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(LARGE_BYTES)
    return path


def test_same_content_elsewhere_has_the_same_digest(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    for file in copy.iterdir():
        os.utime(file, (0, 0))
    (copy / "a.safetensors").rename(copy / "renamed.safetensors")
    assert weights_digest(copy) == weights_digest(model)


def test_a_folder_of_links_has_the_digest_of_what_they_lead_to(model: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for file in model.iterdir():
        (links / file.name).symlink_to(file)
    assert weights_digest(links) == weights_digest(model)


@pytest.mark.parametrize("offset", [12, -1])
def test_a_changed_header_or_tensor_is_seen(model: Path, offset: int) -> None:
    before = weights_digest(model)
    path = model / "b.safetensors"
    overwrite(path, offset % path.stat().st_size, b"\xff")
    assert weights_digest(model) != before


def test_a_changed_config_is_seen(model: Path) -> None:
    before = weights_digest(model)
    (model / "config.json").write_text('{"rope_theta": 20000}')
    assert weights_digest(model) != before


def test_a_file_more_is_seen(model: Path) -> None:
    before = weights_digest(model)
    shutil.copy(model / "a.safetensors", model / "c.safetensors")
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    "offset",
    [0, HEAD_BYTES - 1, *(LAST * index // (NUM_SAMPLES - 1) for index in (512, 777, 1022)), LAST, LARGE_BYTES - 1],
)
def test_a_byte_in_the_head_or_a_sample_of_a_large_file_is_seen(tmp_path: Path, offset: int) -> None:
    path = sparse(tmp_path / "model.gguf")
    before = weights_digest(path)
    overwrite(path, offset, b"\xff")
    assert weights_digest(path) != before


def test_a_sample_apart_is_enough_to_see_any_longer_change(tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.gguf")
    before = weights_digest(path)
    between = -(-LAST // (NUM_SAMPLES - 1))  # no gap between samples is longer
    overwrite(path, HEAD_BYTES + 12345, b"\xff" * between)
    assert weights_digest(path) != before


def test_a_changed_size_is_seen(tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.gguf")
    before = weights_digest(path)
    os.truncate(path, LARGE_BYTES - 1)
    assert weights_digest(path) != before


def test_a_safetensors_header_longer_than_the_head_is_covered(tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.safetensors")
    overwrite(path, 0, (HEAD_BYTES + 100_000).to_bytes(8, "little"))
    before = weights_digest(path)
    gap = next(offset for offset in range(HEAD_BYTES, LARGE_BYTES) if offset % (LAST // (NUM_SAMPLES - 1)) > 2 * 4096)
    overwrite(path, gap, b"\xff")
    assert weights_digest(path) != before


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_no_weights_is_an_error_that_names_the_place(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=name):
        weights_digest(tmp_path / name)
