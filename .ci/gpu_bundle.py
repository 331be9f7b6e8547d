"""Takes TensorFlow to a machine with a GPU and without a network, in parts. CONTRIBUTING.md has the commands.

<python> .ci/gpu_bundle.py pack [--also nvidia-cublas-cu12 ...]
<python3.12> .ci/gpu_bundle.py install

`pack` works where packages can be installed: it puts TensorFlow's wheel for Python 3.12 and what the tests and
benchmarks import beside it, without MLflow, into parts in build/gpu. `install` works on that machine, beside the same
checkout: it makes an environment of the parts in build/gpu/venv, without a network. The wheel opens CUDA 12's libraries
by name. Where the machine has those of CUDA 13 only, they are linked to the names of CUDA 12: whether that works is for
the tests to find out. `--also` takes a library of CUDA 12 along, for where it does not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "gpu"
SITE = FOLDER / "site"
VENV = FOLDER / "venv"
LINKS = FOLDER / "links"
PART_BYTES = 55_000_000
"""What is sent at a time is limited to 64 MiB, the checkout included."""
LIST = FOLDER / "parts.txt"

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
BESIDE = (
    "pytest", "pytest-timeout", "nvidia-cuda-nvcc-cu12<13", "nvidia-cuda-runtime-cu12<13",
    "nvidia-cuda-cupti-cu12<13",
)  # fmt: skip
"""Also the small libraries of CUDA 12, and ptxas and libdevice, which XLA compiles with."""
ONLY_AS_SOURCE = "antlr4-python3-runtime"
"""hydra-core needs it, and it has no wheel."""

SONAMES = (
    "libcuda.so.1", "libnvidia-ml.so.1", "libcudart.so.12", "libcublas.so.12", "libcublasLt.so.12", "libcufft.so.11",
    "libcusolver.so.11", "libcusparse.so.12", "libcupti.so.12", "libcudnn.so.9", "libnccl.so.2",
)  # fmt: skip
"""What TensorFlow 2.21 opens: found by calling each tsl::internal::DsoLoader::Get...DsoHandle with LD_DEBUG=libs."""
OF_DRIVER = ("libcuda.so.1", "libnvidia-ml.so.1")
LIBRARY_FOLDERS = (
    "/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/x86_64-linux/lib", "/usr/local/cuda*/extras/CUPTI/lib64",
    "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/opt/*/lib",
)  # fmt: skip
OTHERS_PACKAGES = [Path(path) for path in sys.path if path.endswith("-packages")]
"""Where the Python that runs this, and not the new environment, has its packages."""

# Not loaded: C++ headers (430 MB), tests, the compilers behind nvcc and libclang, what only profilers of kernels open.
LEFT_OUT = re.compile(r"/include/|/tests/|\.(a|h|hpp|lib|pyc)$|/libnvvm\.so|/libnvperf_\w+\.so|^(bin|clang)/")


# --- here -------------------------------------------------------------------------------------------------------------


def read_requirements() -> list[str]:
    """Return what the runner needs, without MLflow."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [one for one in project["dependencies"] if not one.startswith(("mlflow", "tensorflow>"))]


def write_constraints() -> Path:
    """Write the versions of the lock, without hashes: pip would ask for those of all packages."""
    listed = (ROOT / "requirements" / "dev.lock").read_text()
    versions = re.findall(r"(?m)^([\w.-]+==[^\\\n]+?) *\\?$", listed)
    path = FOLDER / "constraints.txt"
    path.write_text("\n".join(versions) + "\n")
    return path


def run_pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    subprocess.run([*command, "--quiet", "--disable-pip-version-check"], check=True)


def install_into_site(also: list[str]) -> None:
    """Unpack the wheels that pip chooses for that machine into SITE."""
    shutil.rmtree(SITE, ignore_errors=True)
    constraints = str(write_constraints())
    wheels = str(FOLDER / "wheels")
    run_pip("wheel", "--no-deps", "--wheel-dir", wheels, "--constraint", constraints, ONLY_AS_SOURCE)
    for_that_machine = ["--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON}"]
    for platform in PLATFORMS:
        for_that_machine += ["--platform", platform]
    run_pip(
        "install", *for_that_machine, "--no-compile", "--target", str(SITE), "--constraint", constraints,
        "--find-links", wheels, "tensorflow==2.21.*", *read_requirements(), *BESIDE, *also,
    )  # fmt: skip


def write_parts() -> int:
    """Pack SITE into parts, and list them with their hashes. Returns: their number."""
    for part in FOLDER.glob("site.tar.xz.*"):
        part.unlink()
    xz = subprocess.Popen(["xz", "-3", "--threads=0"], stdin=subprocess.PIPE, stdout=(FOLDER / "whole").open("wb"))
    assert xz.stdin is not None
    with tarfile.open(fileobj=xz.stdin, mode="w|") as packed:
        for path in sorted(SITE.rglob("*")):
            name = str(path.relative_to(SITE))
            if path.is_file() and not LEFT_OUT.search(name):
                packed.add(path, name)
    xz.stdin.close()
    assert xz.wait() == 0, "xz failed"
    lines = []
    with (FOLDER / "whole").open("rb") as whole:
        while data := whole.read(PART_BYTES):
            name = f"site.tar.xz.{len(lines):02}"
            (FOLDER / name).write_bytes(data)
            lines.append(f"{hashlib.sha256(data).hexdigest()}  {name}")
    (FOLDER / "whole").unlink()
    LIST.write_text("\n".join(lines) + "\n")
    return len(lines)


def pack(also: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with timed("installing"):
        install_into_site(also)
    with timed("packing"):
        number = write_parts()
    shutil.rmtree(SITE)
    size = sum(part.stat().st_size for part in FOLDER.glob("site.tar.xz.*"))
    print(
        f"{number} parts in {FOLDER}, {size / 1e6:.0f} MB. Send each with the checkout and parts.txt; then .ci/gpu_run."
    )


# --- there ------------------------------------------------------------------------------------------------------------


class Joined(io.RawIOBase):
    """The parts, read as one file; each is checked before it is read.

    Raises:
      ValueError: a part is not there, or is not what was packed.
    """

    def __init__(self) -> None:
        self._contents = self._read_parts()
        self._rest = memoryview(b"")

    def _read_parts(self) -> Iterator[bytes]:
        for line in LIST.read_text().splitlines():
            expected, name = line.split()
            path = FOLDER / name
            if not path.exists():
                raise ValueError(f"{path} is missing: send it again.")
            data = path.read_bytes()
            if hashlib.sha256(data).hexdigest() != expected:
                raise ValueError(f"{path} is not what was packed: send it again.")
            yield data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(next(self._contents, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def make_environment() -> Path:
    """Make an environment of the parts, in which this checkout can be imported. Returns: its site-packages."""
    venv.create(VENV, clear=True, with_pip=False)
    (site,) = VENV.glob("lib/python3.*/site-packages")
    with io.BufferedReader(Joined(), 1 << 20) as joined, tarfile.open(fileobj=joined, mode="r|xz") as packed:
        packed.extractall(site, filter="tar")
    (site / "checkout.pth").write_text(f"{ROOT}\n")
    return site


def find_libraries(site: Path) -> dict[str, Path]:
    """Return file name -> path, of the libraries in the folders where CUDA's may be; the first folder comes first."""
    folders = sorted(site.glob("nvidia/*/lib"))
    folders += [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    for pattern in LIBRARY_FOLDERS:
        folders += sorted(Path("/").glob(pattern[1:]), reverse=True)  # of several CUDAs the newest
    for place in OTHERS_PACKAGES:
        folders += sorted(place.glob("nvidia/*/lib"))
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("lib*.so*")):
            found.setdefault(path.name, path)
    return found


def link_libraries(site: Path) -> list[str]:
    """Link what the machine has to the names that TensorFlow opens, where these are missing.

    Returns:
      The folders in which the loader is to look, the links first.
    """
    libraries = find_libraries(site)
    shutil.rmtree(LINKS, ignore_errors=True)
    LINKS.mkdir()
    folders = [str(LINKS)]
    for soname in SONAMES:
        stem = soname.partition(".so")[0]
        of_major = re.compile(rf"{re.escape(stem)}\.so\.\d+$")
        others = sorted(name for name in libraries if of_major.match(name))
        chosen = soname if soname in libraries else next(reversed(others), None)
        if chosen is None or soname in OF_DRIVER:
            continue  # the loader finds the driver by itself
        if chosen != soname:
            (LINKS / soname).symlink_to(libraries[chosen])
            print(f"  {soname} is a link to {libraries[chosen]}")
        folder = str(libraries[chosen].parent)
        if folder not in folders:
            folders.append(folder)
    return folders


OPENED = """
import ctypes, sys
for name in sys.argv[1:]:
    try:
        ctypes.CDLL(name)
        print(f"  {name} opens")
    except OSError as error:
        print(f"  {name} does not open: {error}")
"""
DEVICES = """
import tensorflow as tf
print("TensorFlow", tf.__version__)
for device in tf.config.list_physical_devices():
    print(" ", device.name, tf.config.experimental.get_device_details(device).get("device_name", ""))
"""


def install() -> int:
    """Install the parts, say which libraries open and which devices TensorFlow sees. Returns: an exit code."""
    if sys.version_info[:2] != (3, 12):
        print(f"The parts are for Python {PYTHON}, and this is {sys.version.split()[0]}.", file=sys.stderr)
        return 1
    with timed("unpacking"):
        site = make_environment()
    folders = link_libraries(site)
    # Kernels for compute capability 9.0 are in the wheel as PTX only. The driver compiles each at its first use: all
    # processes share what is compiled, and the default of 1 GB may not hold it.
    (FOLDER / "environment").write_text(
        f"export LD_LIBRARY_PATH={':'.join(folders)}\n"
        f"export CUDA_CACHE_PATH={FOLDER / 'compiled'} CUDA_CACHE_MAXSIZE=4294967296 CUDA_MODULE_LOADING=LAZY\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(folders)}
    python = str(VENV / "bin" / "python")
    subprocess.run([python, "-c", OPENED, *SONAMES], env=environment, check=False)
    with timed("importing TensorFlow"):
        return subprocess.run([python, "-c", DEVICES], env=environment, check=False).returncode


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    begun = time.monotonic()
    yield
    print(f"{what}: {time.monotonic() - begun:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pack", "install"))
    parser.add_argument("--also", nargs="+", default=[], metavar="PACKAGE", help="take these packages along, too")
    parsed = parser.parse_args()
    if parsed.command == "install":
        return install()
    pack(parsed.also)
    return 0


if __name__ == "__main__":
    sys.exit(main())
