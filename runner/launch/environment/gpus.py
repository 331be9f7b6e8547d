"""The GPUs of this machine, found without TensorFlow."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process may use: numbers, or names such as GPU-8932f937 and MIG-...."""

_DRIVER = Path("/proc/driver/nvidia/gpus")
_ENDS = ("", "-1", "none", "NoDevFiles")
"""Entries of the variable that name no GPU. CUDA ignores all that follow one."""
_SMI_SECS = 20


def visible_gpus(env: Mapping[str, str], driver: Path = _DRIVER) -> list[str]:
    """Return the GPUs that a process may use, by the names that CUDA_VISIBLE_DEVICES gives or would give them.

    Args:
      env: the process's environment.
      driver: the folder in which NVIDIA's driver lists the GPUs of this machine.
    """
    if VISIBLE in env:
        return _named(env[VISIBLE])
    if driver.is_dir():
        number = len(list(driver.iterdir()))
    else:
        number = _number_by_smi(env)
    return [str(index) for index in range(number)]


def _named(value: str) -> list[str]:
    names = []
    for entry in value.split(","):
        name = entry.strip()
        if name in _ENDS:
            break
        names.append(name)
    return names


def _number_by_smi(env: Mapping[str, str]) -> int:
    """Return the number of GPUs that `nvidia-smi -L` lists; 0 without that command."""
    command = shutil.which("nvidia-smi", path=env.get("PATH"))
    if command is None:
        return 0
    try:
        listed = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=_SMI_SECS)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
