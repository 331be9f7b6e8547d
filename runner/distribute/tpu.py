"""Find the TPU of strategy=tpu, and check that it can be reached; TensorFlow itself would try for minutes."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Mapping

from runner.config.schema import ConfigError
from runner.distribute.cluster import answers

LOCAL = "local"
"""The address that means the TPU attached to this machine (a TPU VM)."""

TIMEOUT_SECS = 5.0
"""How many seconds a TPU, or Google's metadata server, may take to accept a connection."""

_VARIABLES = ("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS", "TPU_NAME")
_METADATA_SERVER = "169.254.169.254"
_PORT = 8470


def find_tpu(env: Mapping[str, str], address: str | None) -> tuple[str, str]:
    """Find the TPU by the same settings, in the same order, as TensorFlow's TPUClusterResolver.

    Args:
      env: the environment.
      address: `strategy.address`; None: taken from the environment.

    Returns:
      (name or address of the TPU, the setting that gave it).

    Raises:
      ConfigError: no setting names a TPU.
    """
    if address:
        return address, "strategy.address"
    for name in _VARIABLES:
        if env.get(name):
            return env[name], name
    with contextlib.suppress(ValueError, AttributeError):
        named = json.loads(env.get("TPU_CONFIG") or "{}").get("tpu_node_name")
        if named:
            return str(named), "TPU_CONFIG"
    raise ConfigError(
        f"strategy=tpu: no TPU is named: strategy.address is null, and none of {', '.join(_VARIABLES)} and TPU_CONFIG "
        "is set in the environment. Set strategy.address=grpc://10.0.0.2:8470, the name of a TPU, or local on a TPU VM."
    )


def check_reachable(address: str, zone: str | None, project: str | None, env: Mapping[str, str]) -> None:
    """Check that the TPU answers; TensorFlow would wait for it forever.

    Raises:
      ConfigError: an address does not accept a connection, or a TPU's name cannot be looked up from this machine.
    """
    if address == LOCAL:
        return
    if address.startswith("grpc://"):
        first = address.removeprefix("grpc://").partition(",")[0]
        host, _, port = first.partition(":")
        if not port.isdecimal():
            port = str(_PORT)
        if not answers(f"{host}:{port}", TIMEOUT_SECS):
            raise ConfigError(
                f"strategy=tpu: nothing accepts a connection at {first} within {TIMEOUT_SECS:g} s. Check that the TPU "
                "runs and that this host is in its network."
            )
        return
    has_client = all(importlib.util.find_spec(module) for module in ("googleapiclient", "oauth2client"))
    if not has_client:
        raise ConfigError(
            f"strategy=tpu: {address!r} is a name, and looking it up needs Google's API client: pip install "
            "cloud-tpu-client. Or set the address: strategy.address=grpc://10.0.0.2:8470."
        )
    if zone and project:
        return
    server = env.get("GCE_METADATA_HOST") or env.get("GCE_METADATA_IP") or _METADATA_SERVER
    if not answers(f"{server}:80", TIMEOUT_SECS):
        raise ConfigError(
            f"strategy=tpu: {address!r} is a name, but its zone and project are unknown outside of a Google Cloud "
            "machine. Set strategy.zone and strategy.project, or the address: strategy.address=grpc://10.0.0.2:8470."
        )
