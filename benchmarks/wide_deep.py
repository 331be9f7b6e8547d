"""Seconds of a recommender's whole job, CSV to SavedModel: ours, tf.estimator on TensorFlow 2.15, and Keras 3.

    make bench ONLY=wide_deep [ROUNDS=3] [ARGS="--steps 3000"]

The job is first_step/wide_deep.py: 300,000 rows of 6 numbers and 8 categories, a DNNLinearCombinedClassifier with
crossed columns; 3,000 steps of 128, an evaluation of 100,000 rows, a prediction of 50,000, an export. Each job is a
process of its own ("whole"); "first 100 steps" is the beginning of "train". The data are CSV (make_csv_dataset) and
TFRecord (make_batched_features_dataset), and ours also reads the CSV by the input function of `input=csv`. The same
script runs on TensorFlow 2.15, that of `make golden`, or of the Python that RUNNER_GOLDEN_PYTHON names; without it that
is left out. first_step/wide_deep_keras.py is today's alternative. Takes minutes, so `make bench` alone leaves it out.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _processes import HERE, environment
from _rounds import Ratio, Times, arguments, show

CATEGORIES = {"c0": 10, "c1": 20, "c2": 50, "c3": 900, "c4": 4_000, "c5": 20_000, "c6": 100_000, "c7": 100}
TOOK = re.compile(r"^(.+) took (\S+) s, (\S+) s of CPU$", re.MULTILINE)
BATCH = 128  # of the scripts
# Another's name and a phase -> the largest ratio, by the clock and of CPU, that we accept.
AIMS = {("2.15", "whole"): 0.75, ("2.15", "first 100 steps"): 0.7, ("2.15", "predict"): 0.9, ("Kera", "whole"): 0.9}
PHASES = ("start", "first 100 steps", "train", "evaluate", "predict", "export")


def write_data(folder: Path, part: str, number: int, seed: int) -> None:
    """Write `number` rows to `folder`, as `<part>.csv` and `<part>.tfrecord`. Few values of a category are frequent."""
    import tensorflow as tf

    rng = np.random.default_rng(seed)
    numbers = rng.normal(size=[number, 6]).astype(np.float32)
    ids = {name: (rng.random(number) ** 3 * size).astype(np.int64) for name, size in CATEGORIES.items()}
    score = numbers[:, 0] + np.sin(numbers[:, 1] * 3) + (ids["c0"] * 7 + ids["c1"] * 3) % 5 / 2 - 1
    labels = (score + np.sin(ids["c4"]) + rng.normal(size=number) > 0.5).astype(np.int64)
    names = [*(f"n{i}" for i in range(6)), *CATEGORIES, "label"]
    with (folder / f"{part}.csv").open("w") as csv, tf.io.TFRecordWriter(str(folder / f"{part}.tfrecord")) as records:
        csv.write(",".join(names) + "\n")
        for row, label in enumerate(labels.tolist()):
            cells = [f"{value:.5f}" for value in numbers[row]]
            cells += [f"{name}_{values[row]}" if name != "c7" else str(values[row]) for name, values in ids.items()]
            csv.write(",".join([*cells, str(label)]) + "\n")
            example = tf.train.Example()
            for name, cell in zip(names, [*cells, str(label)], strict=True):
                feature = example.features.feature[name]
                if name[0] == "n":
                    feature.float_list.value.append(float(cell))
                elif name in ("c7", "label"):
                    feature.int64_list.value.append(int(cell))
                else:
                    feature.bytes_list.value.append(cell.encode())
            records.write(example.SerializeToString())


def ran(command: list[str]) -> dict[str, Times]:
    """Run a script and return the times of its phases, and of the whole process."""

    def now() -> Times:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return Times(time.perf_counter(), used.ru_utime + used.ru_stime)

    with tempfile.TemporaryDirectory() as folder:  # the script leaves its model behind
        variables, started = {**environment(), "TMPDIR": folder}, now()
        done = subprocess.run([*command, str(time.time())], env=variables, capture_output=True, text=True, check=False)
        whole = now() - started
    phases = {name: Times(float(wall), float(cpu)) for name, wall, cpu in TOOK.findall(done.stdout)}
    if set(phases) != set(PHASES):
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-3000:]}")
    return {**phases, "whole": whole}


def main() -> None:
    parsed = arguments(
        __doc__, 3, steps=(3_000, 120, "steps of training"), rows=(300_000, 5_000, "rows of the data of training")
    )
    other = Path(os.environ.get("RUNNER_GOLDEN_PYTHON", HERE.parent / ".venv-2.15" / "bin" / "python"))
    job, keras = (str(HERE / "first_step" / f"wide_deep{name}.py") for name in ("", "_keras"))
    scripts = {"ours": [sys.executable, "-m", "runner.classic", job], "Keras": [sys.executable, keras]}
    if other.exists():
        scripts["2.15"] = [str(other), job]
    else:
        print(f"There is no {other}, so TensorFlow 2.15 is not measured: make golden.")
    commands = {f"{name}, {kind}": [*script, kind] for kind in ("csv", "tfrecord") for name, script in scripts.items()}
    commands["ours, input=csv"] = [*scripts["ours"], "input=csv"]
    rows: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder), "train", parsed.rows, seed=1)
        write_data(Path(folder), "eval", parsed.rows // 3, seed=2)
        counts = [parsed.steps, parsed.rows // 3 // BATCH, parsed.rows // 6 // BATCH]
        for _ in range(parsed.rounds):
            for name, (*script, kind) in commands.items():
                for phase, times in ran([*script, kind, folder, *map(str, counts)]).items():
                    rows.setdefault(f"{name}: {phase}", []).append(times)
    for kind in ("csv", "tfrecord", "input=csv"):
        names = [name for name in commands if name.endswith(f", {kind}")]
        ratios = [
            Ratio(f"ours, {kind}: {phase}", f"{of}: {phase}", AIMS.get((of[:4], phase)))
            for of in (f"{name}, csv" if kind == "input=csv" else f"{name}, {kind}" for name in list(scripts)[1:])
            for phase in (*PHASES, "whole")
        ]
        shown = {f"{name}: {phase}": rows[f"{name}: {phase}"] for name in names for phase in (*PHASES, "whole")}
        show(kind, {**rows, **shown} if kind == "input=csv" else shown, ratios, "s")


if __name__ == "__main__":
    main()
