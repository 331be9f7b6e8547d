"""An S3 server on loopback (moto's), and a proxy before it that is away, fails, is slow, full, or cuts connections.

`python -m tests.support.object_store --kills 20` kills a run and deletes its local folder so often, and compares what
comes of it with an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorflow as tf

from runner.distribute.local_cluster import free_ports
from runner.remote.note import Note, fingerprints, mark_of
from runner.remote.store import Lease, Store
from runner.remote.upload import send_changes
from tests.support import chains
from tests.support.processes import end_all_of, wait_until

if TYPE_CHECKING:
    from tests.support.command_line import Command, CommandLine

ROOT = Path(__file__).parents[2]
BUCKET = "bucket"
FAILURES = {
    "500": (500, "InternalError"), "denied": (403, "InvalidAccessKeyId"),
    "full": (507, "XMinioStorageFull"), "quota": (403, "QuotaExceeded"),
}  # fmt: skip
"""What the proxy answers: the status, and the code of S3 or, for a full store, MinIO and Ceph."""
FULL = ("full", "quota")
"""Of these, what meets only who writes an object."""
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
RUN = (
    "model=custom", "model.fn=tests.support.chains.classic", "model.params={dropout: true}", "input=custom",
    "input.train.fn=tests.support.chains.shipped", f"input.train.batch_size={chains.BATCH_SIZE}",
    "input.train.shard=examples", "input.eval.fn=tests.support.chains.eval_input", "run.seed=5", "run.progress=plain",
    f"train.max_steps={chains.TOTAL}", "train.log_steps=1", "checkpoint.save_steps=4", "tracking.backend=none",
)  # fmt: skip


class Proxy:
    """A proxy before a server on loopback.

    Args:
      behind: host and port of the server.
      host: the address on which it listens.

    Attributes:
      address: its URL.
      refused: an expression; no object whose name it matches is written.
      mode: ok; away (no answer), one of FAILURES, slow (1 MB/s), cut (the connection ends within an answer).
      writes: the number of requests that write or delete an object.
      env: environment of processes that use it.
      scheme: of its URLs.
      command_line: forks the starts of the command; None: they are cold.
      watch: is called with method and path of each request that writes or deletes an object, before it is answered.
    """

    env: dict[str, str]
    scheme = "s3"
    command_line: CommandLine | None = None

    def __init__(self, behind: str, host: str = "127.0.0.1") -> None:
        self.mode, self.writes, self.refused, self._behind = "ok", 0, "", behind
        self.watch: Callable[[str, str], None] = lambda method, path: None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle_one_request()

            def _forward(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if server.mode in ("away", "cut"):
                    self.close_connection = True
                    if server.mode == "cut":
                        server._request(self.command, self.path, data, dict(self.headers))  # it has come, unnoticed
                    return
                server.writes += self.command not in ("GET", "HEAD")
                headers = list[Any]()
                mode = server.mode
                if server.refused and self.command == "PUT" and re.search(server.refused, self.path):
                    mode = "500"
                if mode in FAILURES and (mode not in FULL or self.command in ("PUT", "POST")):
                    status, code = FAILURES[mode]
                    answer = f"<Error><Code>{code}</Code><Message>It is {mode}.</Message></Error>".encode()
                else:
                    status, headers, answer = server._request(self.command, self.path, data, dict(self.headers))
                    if self.command not in ("GET", "HEAD"):
                        server.watch(self.command, self.path)
                    if server.mode == "slow":
                        time.sleep((len(data) + len(answer)) / 1e6)
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                        self.send_header(name, value)
                length = dict((name.lower(), value) for name, value in headers).get("content-length", len(answer))
                self.send_header("Content-Length", str(length if self.command == "HEAD" else len(answer)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else answer)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward

            def log_message(self, *arguments: Any) -> None: ...

        self._proxy = ThreadingHTTPServer((host, 0), Handler)
        self._proxy.daemon_threads = True
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()
        self.address = f"http://{host}:{self._proxy.server_port}"

    def _request(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, list[Any], bytes]:
        connection = http.client.HTTPConnection(self._behind, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def use(self, patch: pytest.MonkeyPatch, **env: str) -> None:
        """Let this process use it, without a fault, and with further variables `env`."""
        import fsspec

        self.mode = "ok"
        fsspec.get_filesystem_class(self.scheme).clear_instance_cache()  # an instance keeps its environment
        for name, value in {**self.env, **env}.items():
            patch.setenv(name, value)

    def close(self) -> None:
        self._proxy.shutdown()
        self._proxy.server_close()


class S3(Proxy):
    """moto's server behind the proxy, which listens on `host`, with the bucket BUCKET."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._written: dict[str, bytes] = {}
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line for each request
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        super().__init__("{}:{}".format(*self._moto.get_host_and_port()), host)
        self._request("PUT", f"/{BUCKET}", b"", {})
        self.env = {**CREDENTIALS, "AWS_ENDPOINT_URL": self.address}

    def _request(self, method: str, path: str, data: bytes, headers: dict[str, str]) -> tuple[int, list[Any], bytes]:
        answer = super()._request(method, path, data, headers)
        if method == "PUT" and answer[0] == 200 and len(data) < 10_000:
            self._written[path] = data
        return answer

    def written(self, url: str, name: str) -> bytes | None:
        """Return what was last written as the object `name` below `url`, if that is small, without a request for it;
        None: it was not written.
        """
        return self._written.get(f"/{url.removeprefix('s3://')}/{name}")

    def wait_for_checkpoint(self, url: str) -> None:
        """Wait until the run at `url` has a checkpoint in its bucket."""
        wait_until(lambda: self.written(url, "checkpoint") is not None)

    def close(self) -> None:
        super().close()
        self._moto.stop()


@contextlib.contextmanager
def served(host: str = "127.0.0.1", command_line: CommandLine | None = None) -> Iterator[S3]:
    server = S3(host)
    server.command_line = command_line
    try:
        yield server
    finally:
        server.close()


class Start:
    """A start of `python -m runner` on a machine of its own, as far as its caches are concerned.

    Args:
      env: None: what `server` needs; else in its place.
      on: what precedes the command, as in `tests.support.networks`.
      is_cold: it is not forked, whatever `server` says.
    """

    popen: subprocess.Popen[bytes] | Command

    def __init__(
        self, server: Proxy, caches: Path, *words: str, env: Mapping[str, str] | None = None, on: Sequence[str] = (),
        is_cold: bool = False,
    ) -> None:  # fmt: skip
        caches.mkdir(parents=True, exist_ok=True)
        self.said = caches / "said.txt"
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", **(env or server.env)}
        env["XDG_CACHE_HOME"] = str(caches)
        with open(self.said, "a") as said:
            if server.command_line is not None and not is_cold:
                self.popen = server.command_line.start(*words, cwd=caches, env=env, out=said, err=said)
            else:
                self.popen = subprocess.Popen(
                    [*on, sys.executable, "-m", "runner", *words],
                    cwd=caches, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=env,
                )  # fmt: skip

    def end(self) -> int:
        """Wait for the end. Return the exit code."""
        return self.popen.wait(300)

    def end_of_the_machine(self) -> None:
        """Kill all processes of this start at once, the uploading one too."""
        end_all_of(self.popen)


def catches_up(server: Proxy, store: Store, folder: Path, secs: float, size: int = 300_000) -> None:
    """Send a checkpoint of `size` bytes to `store` while `server` has its fault for `secs`, and afterwards. Check that
    all is there.
    """
    folder.mkdir()
    for name in ("model.ckpt-1.data-00000-of-00001", "model.ckpt-1.index", "events.chief-0.jsonl"):
        (folder / name).write_bytes(os.urandom(size if ".data" in name else 300_000))
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-1"\n')
    Note(store.url, "mine").save(folder)
    fault, server.mode = server.mode, "ok"
    lease = Lease.take(store, "mine", 60)
    is_last, codes = threading.Event(), list[int]()
    thread = threading.Thread(target=lambda: codes.append(send_changes(folder, lease, is_last)), daemon=True)
    server.mode = fault
    thread.start()
    time.sleep(secs)
    server.mode = "ok"
    is_last.set()
    thread.join(100)
    assert codes == [0]
    lease.end()
    assert set(store.objects()) == {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    note = Note.read(folder)
    assert not note.unsent(fingerprints(folder)) and store.is_current(folder)
    # What a look at an object says of its version is what a listing does.
    marks = {name: mark_of(info) for name, info in store.objects().items()}
    assert all(marks.values()) and {name: version.mark for name, version in note.files.items()} == marks
    assert all(store.fs.cat_file(name) == (folder / name).read_bytes() for name in store.objects())


def folder_in(caches: Path) -> Path:
    (folder,) = (caches / "estimator-runner").iterdir()
    return folder


def own_part(params: Any, input_context: Any) -> tf.data.Dataset:
    """Endless, shuffled by each worker for itself: each has a state of its own."""
    dataset = tf.data.Dataset.from_tensor_slices(chains.arrays())
    mine = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
    return mine.shuffle(9, seed=3).repeat().batch(params["batch_size"])


class Delay(tf.compat.v1.train.SessionRunHook):
    def before_run(self, run_context: Any) -> None:
        time.sleep(float(os.environ.get("STEP_SECS", 0)))


def delayed(features: Any, labels: Any, mode: str, params: Any) -> Any:
    """`chains.classic`, whose steps take $STEP_SECS."""
    spec = chains.classic(features, labels, mode, params)
    return spec._replace(training_hooks=[Delay()]) if mode == "train" else spec


class Hosts:
    """A chief and a worker on machines of their own, which share no folder.

    Args:
      folder: has a folder for each of them.
      words: of both commands, with the URL.
      step_secs: how long a step takes; the model is `delayed`.
    """

    def __init__(self, server: S3, folder: Path, *words: str, step_secs: float = 0) -> None:
        self._server, self._folder, self._words, self._step_secs = server, folder, words, step_secs
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self._cluster = {"chief": addresses[:1], "worker": addresses[1:]}
        self.chief, self.worker = self.start("chief"), self.start("worker")

    def start(self, name: str) -> Start:
        home, task = self._folder / name, {"type": name, "index": 0}
        (home / "tmp").mkdir(parents=True, exist_ok=True)
        return Start(
            self._server, home, *self._words, env={
                **self._server.env, "HOME": str(home), "TMPDIR": str(home / "tmp"), "STEP_SECS": str(self._step_secs),
                "TF_CONFIG": json.dumps({"cluster": self._cluster, "task": task}),
            },
        )  # fmt: skip

    def folder(self, name: str) -> Path:
        return folder_in(self._folder / name)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self.chief, self.worker):
            one.end_of_the_machine()

    def wait(self) -> list[int]:
        """Wait for the end of both, and return their exit codes."""
        return [one.popen.wait(300) for one in (self.chief, self.worker)]


def kills(server: S3, scratch: Path, number: int, seed: int = 1) -> int:
    """Kill a run `number` times, each time at a write to the bucket and deleting its folder, and compare it with one
    that nobody disturbs.

    Returns:
      How many of the kills came after the bucket had a checkpoint.
    """
    rng, before = random.Random(seed), server.writes
    whole = Start(server, scratch / "whole", f"model_dir=s3://{BUCKET}/whole-{seed}", *RUN)
    assert whole.popen.wait(300) == 0, whole.said.read_text()
    expected, writes = chains.variables(folder_in(scratch / "whole")), server.writes - before
    done = late = runs = 0
    while done < number:
        runs += 1
        caches = scratch / f"run-{runs}"
        for attempt in range(8):
            last = server.writes + rng.randrange(writes)
            start = Start(server, caches, f"model_dir=s3://{BUCKET}/run-{seed}-{runs}", *RUN)

            def is_late(url: str = f"s3://{BUCKET}/run-{seed}-{runs}") -> bool:
                return server.written(url, "checkpoint") is not None

            # The first kill is a late one: on a busy machine all others may come before the first checkpoint.
            while start.popen.poll() is None and (server.writes < last or (not done and not is_late())):
                time.sleep(0.001)
            if start.popen.poll() is None and done < number and attempt < 7:
                start.end_of_the_machine()
                done += 1
                late += is_late()
                shutil.rmtree(caches / "estimator-runner", ignore_errors=True)  # not yet there, if it was killed early
                continue
            assert start.popen.wait(300) == 0, start.said.read_text()
            break
        found = chains.variables(folder_in(caches))
        assert set(found) == set(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
    return late


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    with served() as server, tempfile.TemporaryDirectory() as scratch:
        late = kills(server, Path(scratch), arguments.kills, arguments.seed)
    print(f"seed {arguments.seed}: {arguments.kills} kills, {late} of them after a first checkpoint: bitwise the same")


if __name__ == "__main__":
    main()
