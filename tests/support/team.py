"""MLflow as a team runs it, on this machine: PostgreSQL, moto's S3, and a server that asks for passwords.

Its commands and files are those of docs/how_to/mlflow_team.md, with addresses of this machine. PostgreSQL is Debian's,
and runs as the user that the package makes; the libraries of the server are in build/team (`make team`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil

from runner.distribute.local_cluster import free_ports
from tests.docs.test_tutorials import blocks
from tests.support.browser import answers
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]
LIBRARIES = ROOT / "build" / "team"
POSTGRES = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path("/usr/lib/postgresql/none"))
MISSING = ""
if os.geteuid() or not (POSTGRES / "postgres").exists() or not (LIBRARIES / ".installed").exists():
    MISSING = f"needs root, PostgreSQL (apt-get install postgresql) and {LIBRARIES} (make team)"
PAGE = {title: text for _, title, text in blocks("../how_to/mlflow_team") if title}
PROXIED, DIRECT = "--artifacts-destination=", "--no-serve-artifacts --default-artifact-root="

DOWNLOAD = """
import boto3, os, sys
client = boto3.client("s3", endpoint_url=os.environ["MLFLOW_S3_ENDPOINT_URL"])
for page in client.get_paginator("list_objects_v2").paginate(Bucket="team-mlflow"):
    for one in page["Contents"]:
        print(one["Key"], client.get_object(Bucket="team-mlflow", Key=one["Key"])["Body"].read())
"""


class Service:
    """A server that can be stopped and started again.

    Args:
      argv: its command.
      is_up: reports whether it answers.
      log: file for what it says.
      stop: the signal that ends it.
      user: the user that it runs as; None: ours.
    """

    def __init__(
        self, argv: list[str], env: dict[str, str], is_up: Callable[[], bool], log: Path,
        stop: int = signal.SIGTERM, user: str | None = None,
    ) -> None:  # fmt: skip
        self._argv, self._env, self._is_up, self._log, self._stop, self._user = argv, env, is_up, log, stop, user
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._argv, cwd=self._log.parent, env=self._env, stdout=log, stderr=log, start_new_session=True,
                user=self._user, group=self._user, extra_groups=None if self._user is None else [],
            )  # fmt: skip
        wait_until(lambda: self._has_ended() or self._is_up())
        assert not self._has_ended(), self._log.read_text()[-3000:]

    def _has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def stop(self) -> None:
        if self._process is None:
            return
        family = [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]
        self._process.send_signal(self._stop)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._process = None


class Team:
    """The servers of a team, inside its context, with the users of the page.

    Args:
      is_direct: runs write files into the bucket themselves.

    Attributes:
      work: a folder for runs; set by the user of this class.
      env: the environment of a run of ana's.
      bare: a PYTHONPATH with which there is no boto3.
      passwords: all passwords, by whose they are; one is nobody's.
      database, server: can be stopped and started.
    """

    work: Path

    def __init__(self, is_direct: bool) -> None:
        self.is_direct = is_direct
        self.folder = Path(tempfile.mkdtemp(prefix="team-"))
        self.folder.chmod(0o755)  # PostgreSQL's user comes through
        self._db_port, s3_port, self._port = free_ports(3)
        names = ("postgres", "mlflow", "admin", "ana", "guest", "key", "bucket", "nobody")
        self.passwords = {name: f"{name}-{secrets.token_hex(12)}" for name in names}
        self.address, s3 = f"http://127.0.0.1:{self._port}", f"http://127.0.0.1:{s3_port}"
        with_libraries = f"{ROOT}{os.pathsep}{LIBRARIES}"
        self.bare = f"{self.folder}{os.pathsep}{ROOT}"
        (self.folder / "sitecustomize.py").write_text("import sys\nsys.modules['boto3'] = None\n")
        self._s3 = {
            "AWS_ACCESS_KEY_ID": "team", "AWS_SECRET_ACCESS_KEY": self.passwords["bucket"],
            "AWS_DEFAULT_REGION": "us-east-1", "MLFLOW_S3_ENDPOINT_URL": s3, "PYTHONPATH": with_libraries,
        }  # fmt: skip
        path = os.pathsep.join([str(Path(sys.executable).parent), str(POSTGRES), os.environ["PATH"]])
        self._env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        self.env = {**self.env_of("ana"), **(self._s3 if is_direct else {})}
        self._db_env = {
            **self._env, "PGHOST": "127.0.0.1", "PGPORT": str(self._db_port), "PGUSER": "postgres",
            "PGPASSWORD": self.passwords["postgres"], "MLFLOW_DB_PASSWORD": self.passwords["mlflow"],
        }  # fmt: skip
        self._data = self.folder / "data"
        where = ["-h", "127.0.0.1", "-p", str(self._db_port)]
        self.database = Service(
            [f"{POSTGRES}/postgres", "-D", str(self._data), "-k", str(self._data), "-c", "fsync=off", *where],
            self._env,
            lambda: subprocess.run([f"{POSTGRES}/pg_isready", "-q", *where], check=False).returncode == 0,
            self.folder / "postgres.log", signal.SIGINT, "postgres",
        )  # fmt: skip
        self._bucket = Service(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(s3_port)], {**self._env, **self._s3},
            lambda: answers(f"{s3}/moto-api/"), self.folder / "moto.log",
        )  # fmt: skip
        command = self.here(PAGE["server"]).replace("mlflow server", "exec mlflow server --workers=1")
        assert PROXIED in command and DIRECT in (ROOT / "docs" / "how_to" / "mlflow_team.md").read_text()
        self.server = Service(
            ["bash", "-c", command.replace(PROXIED, DIRECT) if is_direct else command],
            {**self._env, **self._s3, "PGPASSWORD": self.passwords["mlflow"],
             "MLFLOW_AUTH_ADMIN_PASSWORD": self.passwords["admin"],
             "MLFLOW_FLASK_SERVER_SECRET_KEY": self.passwords["key"], "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            lambda: answers(f"{self.address}/health"), self.folder / "server.log",
        )  # fmt: skip

    def __enter__(self) -> Team:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for service in (self.server, self._bucket, self.database):
            service.stop()
        shutil.rmtree(self.folder)

    def _start(self) -> None:
        self._data.mkdir()
        secret = self.folder / "secret"
        secret.write_text(self.passwords["postgres"])
        for path in (self._data, secret):
            shutil.chown(path, "postgres", "postgres")
        argv = [f"{POSTGRES}/initdb", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync", "-D", str(self._data)]
        subprocess.run(
            argv,
            user="postgres",
            group="postgres",
            extra_groups=[],
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        secret.unlink()
        self.database.start()
        subprocess.run(["bash", "-ec", PAGE["databases"]], env=self._db_env, check=True, stdout=subprocess.DEVNULL)
        self._bucket.start()
        connect = "import boto3, os; s3 = boto3.client('s3', endpoint_url=os.environ['MLFLOW_S3_ENDPOINT_URL'])"
        self.python(f"{connect}; s3.create_bucket(Bucket='team-mlflow')")
        (self.folder / "auth.ini").write_text(self.here(PAGE["auth.ini"]))
        self.server.start()
        self.python(self.here(PAGE["users.py"]))

    def here(self, text: str) -> str:
        """Return what the page shows with the addresses of this machine."""
        for theirs, ours in {
            "db.example.org:5432": f"127.0.0.1:{self._db_port}", "0.0.0.0": "127.0.0.1",
            "mlflow.example.org:5000": f"127.0.0.1:{self._port}", "--port=5000": f"--port={self._port}",
        }.items():  # fmt: skip
            text = text.replace(theirs, ours)
        return text

    def env_of(self, user: str) -> dict[str, str]:
        """Return the environment in which a user asks the server."""
        named = {"URI": self.address, "USERNAME": user, "PASSWORD": self.passwords[user]}
        return {**self._env, **{f"MLFLOW_TRACKING_{name}": value for name, value in named.items()}}

    def python(self, program: str) -> str:
        """Run a program of the administrator's, who has the keys of the bucket, too. Return what it prints."""
        passwords = {f"PASSWORD_OF_{name.upper()}": self.passwords[name] for name in ("ana", "guest")}
        env = {**self.env_of("admin"), **self._s3, **passwords}
        done = subprocess.run([sys.executable, "-c", program], cwd=self.folder, env=env, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def everything(self) -> str:
        """Return all that is in the database of runs and in the bucket."""
        dump = [f"{POSTGRES}/pg_dump", "mlflow"]
        return subprocess.run(dump, env=self._db_env, check=True, capture_output=True, text=True).stdout + self.python(
            DOWNLOAD
        )
