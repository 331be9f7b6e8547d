"""What goes to a machine with a GPU in parts: they are put together unharmed, and CUDA's libraries get their names."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from types import ModuleType

import pytest


def test_libraries_of_another_cuda_get_the_names_that_tensorflow_opens(
    gpu_bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is there under its own name is not linked, and the driver's never are."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(gpu_bundle, "LINKS", tmp_path / "links")
    monkeypatch.setattr(gpu_bundle, "LIBRARY_FOLDERS", (f"{tmp_path}/cuda*/lib",))
    monkeypatch.setattr(gpu_bundle, "OTHERS_PACKAGES", [tmp_path / "packages"])
    cuda = tmp_path / "cuda-13.0" / "lib"
    others = tmp_path / "packages" / "nvidia" / "cudnn" / "lib"
    shipped = tmp_path / "site" / "nvidia" / "cuda_runtime" / "lib"
    for folder in (cuda, others, shipped):
        folder.mkdir(parents=True)
    for name in ("libcublas.so.13", "libcublas.so.13.0.2", "libcublasLt.so.13", "libcudart.so.13", "libcuda.so.2"):
        (cuda / name).touch()
    (others / "libcudnn.so.9").touch()
    (shipped / "libcudart.so.12").touch()
    folders = gpu_bundle.link_libraries(tmp_path / "site")
    links = {path.name: path.resolve().name for path in (tmp_path / "links").iterdir()}
    assert links == {"libcublas.so.12": "libcublas.so.13", "libcublasLt.so.12": "libcublasLt.so.13"}
    assert folders[0] == str(tmp_path / "links")
    assert sorted(folders[1:]) == sorted(map(str, (cuda, others, shipped)))


def test_parts_are_read_as_one_file_and_a_damaged_one_is_named(
    gpu_bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_bundle, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_bundle, "LIST", tmp_path / "parts.txt")
    parts = {"00": b"one " * 1000, "01": b"two"}
    lines = []
    for name, data in parts.items():
        (tmp_path / name).write_bytes(data)
        lines.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
    (tmp_path / "parts.txt").write_text("".join(lines))
    assert io.BufferedReader(gpu_bundle.Joined(), 64).read() == b"".join(parts.values())
    (tmp_path / "01").write_bytes(b"tw0")
    with pytest.raises(ValueError, match="01 is not what was packed"):
        io.BufferedReader(gpu_bundle.Joined(), 64).read()
    (tmp_path / "01").unlink()
    with pytest.raises(ValueError, match="01 is missing"):
        io.BufferedReader(gpu_bundle.Joined(), 64).read()
