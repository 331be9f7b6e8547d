"""Seconds to write 256 MB of float32 variables: ours, tf.train.Checkpoint.write and a bare SaveV2, in turn.

    python benchmarks/checkpoint.py [--rounds 9] [--dir DIR]

Ours fsyncs, writes the manifest and moves the state file; the peer does none of these. Both read the variables
themselves. The page cache of the machine decides the slow rounds: look at the median and the minimum.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

from runner import manifest
from runner.checkpoints import CheckpointWriter, Reader, Snapshot


def build_cases(directory: Path) -> dict[str, Callable[[], object]]:
    variables = {f"layer_{i}/kernel": tf.Variable(tf.random.normal([1024, 2048])) for i in range(32)}
    peer = tf.train.Checkpoint(**{name.replace("/", "_"): variable for name, variable in variables.items()})
    writer = CheckpointWriter(directory / "ours", keep_max=2)
    step = 0

    def ours() -> None:
        nonlocal step
        step += 1
        writer.save(Snapshot(step, {name: variable.read_value() for name, variable in variables.items()}))

    def save_v2() -> None:
        tf.raw_ops.SaveV2(
            prefix=str(directory / "raw"),
            tensor_names=list(variables),
            shape_and_slices=[""] * len(variables),
            tensors=[variable.read_value() for variable in variables.values()],
        )

    def crc32_of_the_data() -> None:
        value = 0
        with open(directory / "raw.data-00000-of-00001", "rb", buffering=0) as file:
            while block := file.read(1 << 20):
                value = zlib.crc32(block, value)

    def read_ours() -> None:
        path = manifest.latest_checkpoint(directory / "ours")
        assert path is not None
        Reader(path).get_many(variables)

    return {
        "tf.train.Checkpoint.write": lambda: peer.write(str(directory / "peer")),
        "ours: CheckpointWriter.save": ours,
        "bare SaveV2": save_v2,
        "zlib.crc32 of the data file (not done)": crc32_of_the_data,
        "ours: Reader.get_many": read_ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dir", help="where to write; default: a temporary directory")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(dir=arguments.dir))
    try:
        cases = build_cases(directory)
        secs: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(arguments.rounds):
            for name, run in cases.items():
                start = time.perf_counter()
                run()
                secs[name].append(time.perf_counter() - start)
    finally:
        shutil.rmtree(directory)
    base = statistics.median(secs["tf.train.Checkpoint.write"])
    print(f"{'':40} {'median s':>9} {'min':>7} {'max':>7} {'ratio':>7}")
    for name, values in secs.items():
        median = statistics.median(values)
        print(f"{name:40} {median:9.3f} {min(values):7.3f} {max(values):7.3f} {median / base:7.2f}")


if __name__ == "__main__":
    main()
