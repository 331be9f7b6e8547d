"""Writes the runs of this folder: `python write_runs.py`, with the runner of revision b5fe916.

Each run is stopped at step 9, in the middle of its second epoch of six batches. `expected/<CPU>/<run>.npz` is what the
same command came to at step 20 without a stop, and what its evaluation said at step 9. The last bits of a float32
depend on the instructions of the CPU: what another CPU came to, from the same runs, lies beside it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
COMMON = [
    "model=custom", "model.params.learning_rate=0.05", "input=custom",
    "input.train.batch_size=4", "input.eval.batch_size=5", "tracking=none", "train.log_steps=1",
    "checkpoint.save_steps=9", "checkpoint.asynchronous=false", "run.seed=3",
]  # fmt: skip
RUNS = {
    "default": ["model.fn=small_model.model_fn", "input.train.fn=small_model.input_fn",
                "input.eval.fn=small_model.input_fn"],
    "default_counted": ["model.fn=small_model.model_fn", "input.train.fn=small_model.uneven_input_fn",
                        "input.eval.fn=small_model.uneven_input_fn"],
    "mirrored": ["model.fn=small_model.model_fn", "input.train.fn=small_model.uneven_input_fn",
                 "input.eval.fn=small_model.uneven_input_fn", "strategy=mirrored", "strategy.virtual_devices=2"],
    "classic": ["model.fn=small_model.classic_model_fn", "input.train.fn=small_model.uneven_input_fn",
                "input.eval.fn=small_model.uneven_input_fn"],
}  # fmt: skip


def cpu() -> str:
    """Return what TensorFlow's kernels are chosen by: the vendor and the widest vector instructions of this CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = set(facts.get("flags", "").split())
    widest = [flag for flag in ("amx_tile", "avx512_fp16", "avx512_bf16", "avx512f", "avx2") if flag in flags]
    return "-".join([facts.get("vendor_id", "unknown"), *widest[:1]])


def values(checkpoint: Path) -> dict[str, Any]:
    """Every variable of a checkpoint but the state of iterators, by name."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(checkpoint))
    found = {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray | np.generic)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(HERE / "small_model.py", folder)
        for name, overrides in RUNS.items():

            def run(steps: int, model_dir: str, more: list[str]) -> None:
                command = [sys.executable, "-m", "runner", *COMMON, *more, f"train.max_steps={steps}"]
                subprocess.run([*command, f"model_dir={model_dir}"], cwd=folder, check=True)

            run(9, name, overrides)
            run(20, f"{name}-20", overrides)
            summary = json.loads(Path(folder, name, "summary.json").read_text())
            metrics = {f"metrics/{key}": np.float64(value) for key, value in summary["metrics"].items()}
            target = HERE / name
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(Path(folder, name), target, ignore=shutil.ignore_patterns("events.out.*", "*.log"))
            (HERE / "expected" / cpu()).mkdir(parents=True, exist_ok=True)
            recorded = {**metrics, **values(Path(folder, f"{name}-20", "model.ckpt-20"))}
            np.savez(HERE / "expected" / cpu() / f"{name}.npz", **recorded)


if __name__ == "__main__":
    main()
