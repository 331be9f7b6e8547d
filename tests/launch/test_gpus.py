"""The GPUs of a machine, by the variable, the driver's folder, or nvidia-smi."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.launch.environment.gpus import visible_gpus

NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,1", ["0", "1"]),
        (" 3 , GPU-8932f937 ,MIG-GPU-8932f937/1/0", ["3", "GPU-8932f937", "MIG-GPU-8932f937/1/0"]),
        ("0,-1,2", ["0"]),
        ("-1", []),
        ("", []),
        ("none", []),
    ],
)
def test_the_variable_names_them(value: str, expected: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, NOWHERE) == expected


def test_else_they_are_those_of_the_driver(tmp_path: Path) -> None:
    for name in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / name).mkdir()
    assert visible_gpus({}, tmp_path) == ["0", "1"]


def test_else_those_that_nvidia_smi_lists(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    smi.chmod(0o700)
    assert visible_gpus({"PATH": str(tmp_path)}, NOWHERE) == ["0", "1"]
    assert visible_gpus({"PATH": "/nowhere"}, NOWHERE) == []
