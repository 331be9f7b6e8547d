"""Scripts that say `import tensorflow as tf` and mean TensorFlow 1 run as they stand."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from runner.classic.compat.installed_names import Installed
from runner.classic.compat.tf1_imports import Signs, as_version_1, signs, with_values_of_dimensions
from tests.support.messages import Messages

INSTALLED = Installed()


def signs_of(source: str) -> Signs:
    return signs(ast.parse(textwrap.dedent(source)), INSTALLED)


@pytest.mark.parametrize("source", [
    "import tensorflow as tf\ntf.layers.dense(x, 2)",
    "import tensorflow as tf\ntf.train.AdamOptimizer(0.1)",
    "import tensorflow as tf\ntf.estimator.inputs.numpy_input_fn(x)",
    "import tensorflow as tf\ntf.contrib.layers.xavier_initializer()",
    "from tensorflow import layers, estimator\nlayers.dense(x, 2)",
    "import tensorflow as tf\nprint(tf.__version__)\ntf.app.run()",
    "import tensorflow as tf\nversion = tf.__version__\nprint(version)\nassert version >= '1.4'\ntf.app.run()",
    "import numpy as np\nimport tensorflow as tf\nassert np.__version__ > '1'\ntf.app.run(FLAGS.VERSION)",
    "import tensorflow as tf\nwith tf.Session() as session: pass",
    "import tensorflow as tf\ntf.data.Dataset.range(3).make_one_shot_iterator()",
])  # fmt: skip
def test_a_name_that_only_tensorflow_1_has_tells_its_source(source: str) -> None:
    assert signs_of(source).are_of_1


@pytest.mark.parametrize("source", [
    "import tensorflow as tf\ntf.nn.relu(x)\ntf.estimator.Estimator(f)\ntf.keras.layers.Dense(1)",
    "import tensorflow.compat.v1 as tf\ntf.layers.dense(x, 2)",
    "import tensorflow as tf\ntf = tf.compat.v1\ntf.layers.dense(x, 2)",
    "import tensorflow as tf\nif tf.__version__ < '2':\n  tf.layers.dense(x, 2)",
    "import tensorflow as tf\nif int(tf.__version__.split('.')[0]) < 2:\n  tf.layers.dense(x, 2)",
    "import tensorflow as tf\nversion = tf.__version__\nassert version\nif version < '2':\n  tf.layers.dense(x, 2)",
    "from tensorflow import __version__, layers\nif __version__ < '2':\n  layers.dense(x, 2)",
    "import tensorflow as tf\ntry:\n  tf.layers.dense(x, 2)\nexcept AttributeError:\n  tf.compat.v1.layers.dense(x, 2)",
    "import tensorflow as tf\ntf.layers.dense(x, 2)\ntf.optimizers.Adam()",
    "import tensorflow as tf\ntf.nn.relux(x)",
    "import tensorflow as tf\ntf.compat.v1.data.Dataset.range(3).make_one_shot_iterator()",
])  # fmt: skip
def test_a_source_that_could_be_of_tensorflow_2_does_not(source: str) -> None:
    assert not signs_of(source).are_of_1


def test_the_first_sign_is_named() -> None:
    sign = signs_of("import tensorflow as tf\ntf.nn.relu(x)\ntf.gfile.Exists(x)\ntf.flags").first_use_of_1
    assert sign is not None and (sign.as_written, sign.line) == ("tf.gfile.Exists", 3)


def test_values_of_dimensions_are_those_of_tensorflow_1() -> None:
    source = '"""Text."""\nfrom __future__ import division\nfound = [Shape()[0].value, Shape()[1].value, Own().value]'
    tree = ast.parse(source)
    with_values_of_dimensions(tree)

    class Shape:
        def __getitem__(self, index: int) -> int | None:
            return (3, None)[index]

    class Own:
        value = "own"

    space: dict[str, object] = {"Shape": Shape, "Own": Own}
    exec(compile(tree, "code.py", "exec"), space)
    assert (space["found"], space["__doc__"]) == ([3, None, "own"], "Text.")


def test_values_of_dimensions_are_seen() -> None:
    assert signs_of("import tensorflow.compat.v1 as tf\nx.shape[-1].value").has_dimensions
    assert signs_of("import tensorflow.compat.v1 as tf\nx.get_shape()[0].value").has_dimensions
    assert not signs_of("import tensorflow.compat.v1 as tf\nx.shape[-1] + y[0].value").has_dimensions


@pytest.mark.parametrize(("written", "meant"), [
    ("import tensorflow as tf", "import tensorflow.compat.v1 as tf"),
    ("import tensorflow", "import tensorflow.compat.v1 as tensorflow"),
    ("import os, tensorflow.layers as l", "import os, tensorflow.compat.v1.layers as l"),
    ("from tensorflow import layers, keras", "from tensorflow.compat.v1 import layers\nfrom tensorflow import keras"),
    ("from tensorflow.estimator import RunConfig", "from tensorflow.compat.v1.estimator import RunConfig"),
    ("from tensorflow.python.ops import x", "from tensorflow.python.ops import x"),
    ("import tensorflow.contrib.slim as slim", "import tensorflow.contrib.slim as slim"),
    ("from . import tensorflow", "from . import tensorflow"),
])  # fmt: skip
def test_imports_mean_tensorflow_1(written: str, meant: str) -> None:
    tree = ast.parse(f"if True:\n  {written}")
    as_version_1(tree)
    assert ast.unparse(tree) == "if True:\n" + textwrap.indent(meant, "    ")


TASK = """
import sys
import tensorflow as tf
from trainer import data
import trainer.modern

def model_fn(features, labels, mode, params):
  net = tf.layers.dense(features, 4, kernel_initializer=tf.zeros_initializer())
  logits = tf.reshape(tf.layers.dense(net, net.shape[-1].value, kernel_initializer=tf.zeros_initializer())[:, 0], [-1])
  loss = tf.losses.mean_squared_error(labels, logits)
  train_op = tf.train.GradientDescentOptimizer(0.5).minimize(loss, tf.train.get_global_step())
  return tf.compat.v1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

def main(argv):
  tf.compat.v1.disable_v2_behavior()
  estimator = tf.estimator.Estimator(model_fn, params={})
  estimator.train(data.input_fn, steps=2)
  print(argv[1:], estimator.evaluate(data.input_fn, steps=1))

if __name__ == "__main__":
  tf.app.run()
"""
DATA = """
import tensorflow as tf

def input_fn():
  dataset = tf.data.Dataset.from_tensors(([1.0], 1.0)).repeat(8).batch(4)
  assert dataset.output_types
  return dataset
"""
MODERN = (
    "import tensorflow as tf\nassert tf.summary.create_file_writer and tf is not __import__('trainer.data').data.tf"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "trainer").mkdir()
    for name, text in (("__init__", ""), ("task", TASK), ("data", DATA), ("modern", MODERN)):
        (tmp_path / "trainer" / f"{name}.py").write_text(text)
    return tmp_path


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "runner.classic", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.processes
@pytest.mark.slow
def test_a_package_of_tensorflow_1_runs_as_a_module_with_its_files_of_other_versions(package: Path) -> None:
    ran = run(["-m", "trainer.task", "--job-dir", "x"], package)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "['--job-dir', 'x'] {'loss': np.float32(0.0), 'global_step': np.int64(2)}\n"
    assert "trainer/task.py, line 8: tf.layers.dense is a name of TensorFlow 1" in ran.stderr
    assert "data.py, line" not in ran.stderr  # it does not tell, and is what task.py is


@pytest.mark.slow
@pytest.mark.processes
def test_what_is_in_no_tensorflow_any_more_leads_to_check(tmp_path: Path, messages: Messages) -> None:
    (tmp_path / "old.py").write_text("import tensorflow as tf\ntf.contrib.gan.gan_model(1)\n")
    ran = run(["old.py"], tmp_path)
    for line in ran.stderr.splitlines()[-2:]:  # the error, and its note
        messages.same(f"exit {ran.returncode}", line)
