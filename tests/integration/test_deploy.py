"""The files in deploy/ fit together, as far as that can be told without systemd and containers running."""

import configparser
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvstore.config import Config
from kvstore.quantity import parse_size
from kvstore.testing.sidecar import Sidecar

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    return {found["kind"]: found for found in yaml.safe_load_all((DEPLOY / "daemonset.yaml").read_text())}


def test_the_configuration_can_be_used(tmp_path: Path) -> None:
    config = Config.load(DEPLOY / "kvstore.toml", {})
    assert config.server.socket_mode == 0o660
    everything = tmp_path / "everything.toml"  # with what is only suggested
    lines = (DEPLOY / "kvstore.toml").read_text().splitlines()
    everything.write_text(
        "\n".join(line.removeprefix("# ") if line.startswith(("# [", "# d", "# c", "# u")) else line for line in lines)
    )
    assert Config.load(everything, {}).file is not None
    assert Config.load(everything, {}).redis is not None


def test_the_unit_is_sound(tmp_path: Path) -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.read(DEPLOY / "kvstore.service")
    service = dict(unit["Service"])
    assert service["execstart"].endswith("kvstore serve --config /etc/kvstore/kvstore.toml")
    assert service["type"] == "notify"
    served_at = Config.load(DEPLOY / "kvstore.toml", {}).server.socket
    assert served_at.parent == Path("/run") / service["runtimedirectory"]
    if shutil.which("systemd-analyze"):
        here = tmp_path / "kvstore.service"
        there = service["execstart"].split()[0]
        here.write_text((DEPLOY / "kvstore.service").read_text().replace(there, "/bin/true"))
        checked = subprocess.run(["systemd-analyze", "verify", str(here)], capture_output=True, text=True, check=False)
        assert "kvstore.service" not in checked.stderr, checked.stderr


def test_systemd_is_told_when_it_is_ready_and_when_it_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(20.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with Sidecar() as served:
            assert systemd.recv(100) == b"READY=1"
            served.client().close()
            assert served.terminate() == 0
            assert systemd.recv(100) == b"STOPPING=1"


def test_the_daemon_set_fits_together(objects: dict[str, Any], tmp_path: Path) -> None:
    config_file = tmp_path / "kvstore.toml"
    config_file.write_text(objects["ConfigMap"]["data"]["kvstore.toml"])
    config = Config.load(config_file, {})
    pod = objects["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert config.server.socket.parent == mounts["socket"]
    assert Path(container["args"][-1]).parent == mounts["config"]
    assert container["readinessProbe"]["exec"]["command"][-1] == str(config.server.socket)
    limit_bytes = parse_size(container["resources"]["limits"]["memory"] + "B")
    assert limit_bytes >= config.memory.capacity_bytes + (1 << 30)
    assert config.server.metrics.endswith(f":{container['ports'][0]['containerPort']}")


def test_the_image_runs_what_the_daemon_set_expects(objects: dict[str, Any]) -> None:
    lines = (DEPLOY / "Containerfile").read_text()
    user = objects["DaemonSet"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}:" in lines
    assert 'ENTRYPOINT ["kvstore"]' in lines
    assert "STOPSIGNAL SIGTERM" in lines
