"""Runs in a bucket, compared from their small files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.config.schema import Config, DiffConfig
from runner.launch.environment import diff_runs
from runner.remote.store import Store
from tests.launch.test_diff_runs import write_run


def test_a_run_in_a_bucket_is_compared_without_its_checkpoints(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "here", {10: 0.5})
    write_run(tmp_path / "there", {10: 0.25})
    for file in (tmp_path / "there").iterdir():
        store.fs.pipe_file(file.name, file.read_bytes())
    store.fs.pipe_file("model.ckpt-10.data-00000-of-00001", bytes(1000))
    before = store.objects()
    fetched = []
    memory = type(store.fs.fs)
    read = memory.cat_file

    def noted(fs: Any, path: str, *args: Any, **settings: Any) -> Any:
        fetched.append(path)
        return read(fs, path, *args, **settings)

    monkeypatch.setattr(memory, "cat_file", noted)
    runs = DiffConfig(runs=[str(tmp_path / "here"), store.url])
    answer = diff_runs.show(Config(command="diff", diff=runs), {})
    assert answer["results"]["eval/loss"] == [0.5, 0.25]
    assert fetched
    assert not [path for path in fetched if "model.ckpt" in path]
    assert store.objects() == before, "nothing is written there"
