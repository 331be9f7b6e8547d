"""A run's files up to and down from an S3 server on loopback, beside plain s3fs; and a training step beside an upload.

    python benchmarks/object_store.py [--rounds 15] [--megabytes 256] [--steps 3000]

The server is moto's, a process of its own, which stands for one elsewhere: it has the lowest priority, so that a step
waits for the uploading process, and not for the server. `make bench ONLY=object_store` runs it, `make
bench` alone does not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
from _rounds import Case, Ratio, Times, arguments, measure, show, timed

from runner.checkpoint_files import manifest
from runner.distribute.local_cluster import free_ports
from runner.remote.note import Note
from runner.remote.store import Lease, Store
from runner.remote.upload import MODULE, Uploader

FILES = 4


def server(scratch: Path) -> subprocess.Popen[bytes]:
    """Start an S3 server with the bucket `bucket`, and name it in this process's environment."""
    (port,) = free_ports(1)
    words = ["nice", "-n", "19", sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(words, cwd=scratch, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ.update(
        AWS_ACCESS_KEY_ID="test", AWS_SECRET_ACCESS_KEY="test", AWS_DEFAULT_REGION="us-east-1",
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
    )  # fmt: skip
    import boto3

    until = time.monotonic() + 60
    while True:
        try:
            boto3.client("s3").create_bucket(Bucket="bucket")
            return process
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def save(folder: Path, size: int) -> None:
    """Write a checkpoint of `size` bytes as a run with a URL does; none of it is read by TensorFlow."""
    folder.mkdir()
    path = folder / "model.ckpt-1"
    for number in range(FILES):
        Path(f"{path}.data-{number:05d}-of-{FILES:05d}").write_bytes(os.urandom(size // FILES))
    Path(f"{path}.index").write_bytes(b"index")
    manifest.write_manifest(path, 1, time.time(), {}, is_mirrored=True)


def up(store: Store, folder: Path) -> Callable[[], None]:
    """Return a function that sends all of `folder`."""
    lease = Lease.take(store, "benchmark", 600)

    def send() -> None:
        Note(store.url, "benchmark").save(folder)
        Uploader(folder, lease).send()

    return send


def down(store: Store, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    store.fetch(folder)


def steps_of(count: int) -> Callable[[], Any]:
    """Return a function that does `count` steps of a small MLP, one call of a tf.function each."""
    rng = np.random.RandomState(0)
    weights = [tf.Variable(rng.randn(256, 256).astype(np.float32) / 16) for _ in range(2)]
    features = tf.constant(rng.randn(32, 256).astype(np.float32))

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            hidden = features
            for weight in weights:
                hidden = tf.nn.relu(hidden @ weight)
            loss = tf.reduce_mean(hidden**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.001 * gradient)
        return loss

    def steps() -> None:
        for _ in range(count):
            step()

    return steps


def beside_an_upload(steps: Callable[[], None], count: int, store: Store, folder: Path) -> Case:
    """Return a case that does the steps while a process sends `folder`, again and again."""
    lease = Lease.take(store, "benchmark", 600)

    def case() -> dict[str, Times]:
        Note(store.url, "benchmark").save(folder)
        words = [sys.executable, "-m", MODULE, str(folder), "--lease", json.dumps([lease.number])]
        sending = subprocess.Popen(words, stdin=subprocess.PIPE)
        while not Note.read(folder).files:  # it has begun
            time.sleep(0.01)
        try:
            return timed("step beside an upload", count, steps)()
        finally:
            sending.kill()
            sending.wait()

    return case


def main() -> None:
    args = arguments(__doc__, 15, megabytes=(256, 1, "size of the files together"), steps=(3000, 5, "steps of a round"))
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        process = server(scratch)
        try:
            folder = scratch / "run"
            save(folder, args.megabytes * 10**6)
            store, plain = Store("s3://bucket/run"), Store("s3://bucket/plain")
            names = sorted(path.name for path in folder.iterdir())
            rows = measure([
                timed("s3fs put", 1, lambda: plain.fs.put([str(folder / name) for name in names], names)),
                timed("up", 1, up(store, folder)),
                timed("s3fs get", 1, lambda: plain.fs.get(names, [str(scratch / "plain" / name) for name in names])),
                timed("down", 1, lambda: down(store, scratch / "fetched")),
            ], args.rounds)  # fmt: skip
            show(f"{args.megabytes} MB", rows, [Ratio("up", "s3fs put"), Ratio("down", "s3fs get")], unit="s")
            steps = steps_of(args.steps)
            rows = measure([
                timed("step", args.steps, steps),
                beside_an_upload(steps, args.steps, Store("s3://bucket/beside"), folder),
            ], args.rounds)  # fmt: skip
            show("step", rows, [Ratio("step beside an upload", "step", 1.03)])
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
