"""What `check` says of a source, beside what happens when it runs: scripts of one construct each, the golden models,
and the scripts of the other tests."""

from __future__ import annotations

import ast
import sys
import textwrap
import traceback
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import runner.classic  # noqa: F401
from runner.classic.compat import install, tf1_imports
from runner.classic.compat.check import check_source
from runner.classic.compat.installed_names import Installed
from tests.golden import runs

ROOT = Path(__file__).parents[3]
INSTALLED = Installed()

RUNS, STOPS = "runs", "stops"

BASE = """
import tensorflow as tf
@before
def input_fn():
    @input
    return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat(4)
def model_fn(features, labels, mode, params):
    features = features["x"] if isinstance(features, dict) else features
    w = tf.get_variable("w", [1, 1])
    y = tf.matmul(features, w)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, {"y": y})
    loss = tf.reduce_mean(tf.square(y - labels))
    @model
    train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, {"y": y}, loss, train_op, training_hooks=[@hook])
@script
estimator = tf.estimator.Estimator(model_fn, "model")
estimator.train(input_fn, steps=1)
@after
"""
"""A script of TensorFlow 1, with places for a construct."""


def script(**parts: str) -> str:
    """BASE with `parts` in its places."""
    text = BASE
    for place in ("before", "input", "model", "hook", "script", "after"):
        indent = "\n" + " " * (4 if place in ("input", "model") else 0)
        text = text.replace(f"@{place}", textwrap.dedent(parts.get(place, "")).strip("\n").replace("\n", indent))
    return text


def hook(method: str, body: str) -> str:
    return script(before=f"class H(tf.train.SessionRunHook):\n  def {method}:\n    {body}", hook="H()")


SERVING = """
def serving():
    x = tf.placeholder(tf.float32, [None, 1], name="x")
    return tf.estimator.export.ServingInputReceiver({"x": x}, {"x": x})
"""
PROTO = "from tensorflow.core.protobuf import rewriter_config_pb2 as pb\npb.RewriterConfig.OFF"
OF_2 = "import tensorflow as tf\ntf.data.Dataset.range(3).make_one_shot_iterator()\ntf.optimizers.Adam"

CASES: dict[str, str] = {
    "metrics of NumPy": script(after="estimator.evaluate(input_fn, steps=1)['loss'].item()"),
    "as it stands": script(),
    # hooks
    "a hook fetches by name": hook("before_run(self, context)", "return tf.train.SessionRunArgs({'w': 'w:0'})"),
    "a hook runs what it makes": hook("after_create_session(self, session, c)", "session.run(tf.constant(1.0))"),
    "a hook traces its step": hook(
        "before_run(self, context)",
        "return tf.train.SessionRunArgs('w:0', options=tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE))",
    ),
    "a saver hook": script(hook="tf.train.CheckpointSaverHook('model', save_steps=1)"),
    "a saver hook of one's own": script(
        before="class S(tf.train.CheckpointSaverHook):\n  pass", hook="S('model', save_steps=1)"
    ),
    "summaries of a hook": script(
        model="tf.summary.scalar('a', loss)",
        hook="tf.train.SummarySaverHook(1, output_dir='s', summary_op=tf.summary.merge_all())",
    ),
    # Scaffold
    "a Scaffold's init_fn": script(
        model="""
            p = tf.placeholder(tf.float32, [1, 1])
            assignment = w.assign(p)
            scaffold = tf.train.Scaffold(init_fn=lambda _, session: session.run(assignment, {p: [[3.0]]}))
            if mode == "train":
                train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
                return tf.estimator.EstimatorSpec(mode, {"y": y}, loss, train_op, scaffold=scaffold)
        """
    ),
    "a variable that begins with what is fed": script(
        model="""
            p = tf.placeholder(tf.float32, [1])
            tf.Variable(p, trainable=False)
            scaffold = tf.train.Scaffold(init_feed_dict={p: [3.0]})
            if mode == "train":
                train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, tf.train.get_global_step())
                return tf.estimator.EstimatorSpec(mode, {"y": y}, loss, train_op, scaffold=scaffold)
        """
    ),
    # receivers
    "a receiver function": script(before=SERVING, after="estimator.export_savedmodel('out', serving)"),
    "a receiver of placeholders": script(
        after="""
            x = tf.placeholder(tf.float32, [None, 1], name="x")
            estimator.export_savedmodel("out", tf.estimator.export.build_raw_serving_input_receiver_fn({"x": x}))
        """
    ),
    "a SavedModel in a session": script(
        before=SERVING,
        after="""
            path = estimator.export_savedmodel("out", serving)
            with tf.Session(graph=tf.Graph()) as session:
                tf.saved_model.loader.load(session, ["serve"], path)
        """,
    ),
    # contrib and other names that are gone
    "a name of contrib": script(script="tf.contrib.factorization.KMeansClustering"),
    "a name of contrib that is tried": script(script="try:\n  tf.contrib.foo\nexcept AttributeError:\n  pass"),
    "a name of contrib for another version": script(
        script="if not tf.__version__.startswith('2'):\n  tf.contrib.foo", before="tf = tf.compat.v1"
    ),
    "an import of contrib that is left over": script(
        before="from tensorflow.contrib.learn.python.learn import learn_runner\nimport tensorflow.contrib.gan as gan"
    ),
    "an import of contrib that is used": script(
        before="from tensorflow.contrib.learn.python.learn import learn_runner", script="learn_runner.run(model_fn)"
    ),
    "a class of contrib that is imported": script(
        before="from tensorflow.contrib.learn import Experiment", script="class Mine(Experiment):\n  pass"
    ),
    "an import of contrib that is tried": script(
        before="try:\n  from tensorflow.contrib.framework import nothing\nexcept ImportError:\n  nothing = len",
        script="nothing([])",
    ),
    "the last activations of a network": script(
        before="from tensorflow.contrib.learn.python.learn.estimators import rnn_common",
        model="rnn_common.select_last_activations(tf.ones([1, 2, 3]), tf.constant([2]))",
    ),
    "a version that is asserted": script(before="assert '1.4' <= tf.__version__ and tf.VERSION >= '1.4'"),
    "a version with a name, that is asserted": script(
        before="version = tf.__version__\nprint('TensorFlow {}'.format(version))\nassert version >= '1.4', 'too old'"
    ),
    "a version that decides": script(before="version = tf.__version__\nif version < '2':\n  pass"),
    "a dataset of a private module": script(
        before="from tensorflow.python.data import Dataset",
        input="return Dataset.from_tensors(([[1.0]], [[2.0]])).make_one_shot_iterator().get_next()",
    ),
    "a variable that is made outside of model_fn": script(
        before="table = tf.get_variable('t', [1])", model="loss += table[0]"
    ),
    "a premade model that is gone": script(script="tf.estimator.BoostedTreesClassifier"),
    "an iterator that TensorFlow 2 has not": OF_2,
    "an iterator that TensorFlow 1 had": "import tensorflow as tf\ntf.data.Dataset.range(3).make_one_shot_iterator()",
    # private modules
    "a message of a proto": script(before=PROTO),
    "a message that no proto has": script(before=PROTO.replace("Config.OFF", "Configuration")),
    "a private module": script(before="from tensorflow.python.client import device_lib\ndevice_lib.list_local_devices"),
    "a private name that is gone": script(
        before="from tensorflow.python import pywrap_tensorflow as pt\npt.NewCheckpointReader"
    ),
    # packages
    "a package that is missing": script(before="import tensorflow_datasets as tfds"),
    "a package that is tried": script(before="try:\n  import tensorflow_datasets\nexcept ImportError:\n  pass"),
    # sessions
    "a session under a graph": script(
        script="with tf.Graph().as_default(), tf.Session() as s:\n  x = tf.placeholder('float')\n  s.run(x, {x: 1.0})"
    ),
    "a session that is a context": script(
        script="with tf.Session() as s:\n  x = tf.placeholder(tf.float32)\n  s.run(x, {x: 1.0})"
    ),
    "a session with a graph": script(
        script="g = tf.Graph()\nwith g.as_default():\n  x = tf.constant(1.0)\ns = tf.Session(graph=g)\ns.run(x)"
    ),
    "a session beside a graph": script(script="s = tf.Session()\ns.run(tf.constant(1.0))"),
    "a session in a function": script(
        script="def main():\n  helper()\ndef helper():\n  s = tf.Session()\n  s.run(tf.constant(1.0))\nmain()"
    ),
    "a session as default": script(script="s = tf.Session()\nwith s.as_default():\n  s.run(tf.constant(1.0))"),
    "a session in model_fn": script(model="with tf.Session() as s:\n  s.run(loss)"),
    "eval beside a graph": script(script="tf.constant(1.0).eval()"),
    "a writer beside a graph": script(script="def log():\n  tf.summary.FileWriter('x')\nlog()"),
    "a writer under a graph": script(
        script="def log():\n  tf.summary.FileWriter('x')\nwith tf.Graph().as_default():\n  log()"
    ),
    "layers beside a graph": script(script="tf.layers.dense(tf.ones([1, 1]), 2)"),
    "a monitored session": script(script="with tf.train.MonitoredTrainingSession():\n  pass"),
    "a restored graph of one's own": script(
        after="""
            with tf.Graph().as_default(), tf.Session() as session:
                w = tf.get_variable("w", [1, 1])
                tf.train.Saver().restore(session, tf.train.latest_checkpoint("model"))
        """
    ),
    # inputs
    "a one-shot iterator": script(
        input="return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat().make_one_shot_iterator().get_next()"
    ),
    "an initializable iterator": script(
        input="""
            it = tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).repeat().make_initializable_iterator()
            tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, it.initializer)
            return it.get_next()
        """
    ),
    "an iterator that a hook feeds": script(
        before="""
            class Feed(tf.train.SessionRunHook):
                def after_create_session(self, session, coordinator):
                    session.run(self.iterator.initializer, {self.x: [[1.0], [2.0]]})
            feed = Feed()
        """,
        input="""
            feed.x = tf.placeholder(tf.float32, [None, 1])
            dataset = tf.data.Dataset.from_tensor_slices((feed.x, feed.x)).batch(2)
            feed.iterator = dataset.make_initializable_iterator()
            return feed.iterator.get_next()
        """,
        hook="feed",
    ),
    "types of a dataset": script(script="d = input_fn()\nd.output_types, d.output_shapes, d.output_classes"),
    # what tensors and variables of TensorFlow 1 had
    "dimensions in model_fn": script(
        model="""
            tf.ones([features.shape[1].value, features.get_shape()[-1].value])
            assert [one.value for one in features.shape] == [1, 1] and tf.Dimension(3).value == 3
        """
    ),
    "dimensions in input_fn": script(
        input="""
            shape = tf.ones([2, 1]).get_shape()
            assert shape[0].value == 2 and [one.value for one in shape] == [2, 1]
            return tf.data.Dataset.from_tensors(([[1.0]], [[2.0]])).map(
                lambda x, y: (tf.reshape(x, [1, x.shape[1].value]), y)
            )
        """
    ),
    "dimensions beside a graph": script(script="shape = tf.ones([2, 1]).shape\nassert shape[0].value == 2"),
    "initialized_value": script(model="v = tf.Variable(1.0)\ntf.Variable(v.initialized_value() * 2.0)"),
    # Python 2
    "iteritems": script(script="for key, value in {}.iteritems():\n  pass"),
    "a map with an index": script(script="map(str, [1])[0]"),
    "a map that is a list later": script(script="names = map(str, [1])\nlen(names)"),
    "a map that is only gone through": script(script="names = map(str, [1])\nassert list(names)"),
    "keys with an index": script(script="{1: 2}.keys()[0]"),
    "keys that are counted": script(script="len({1: 2}.keys())"),
    "xrange": script(script="xrange(3)"),
    "xrange of its own": script(script="xrange = range\nxrange(3)"),
    "unicode that is tried": script(script="try:\n  unicode\nexcept NameError:\n  unicode = str"),
    "a module of Python 2": script(before="import cPickle"),
    "range of a quotient": script(script="range(4 / 2)"),
    "an import from a module of Python 2's": script(before="from itertools import izip"),
    "a method of Python 2's iterators": script(script="iter([1]).next()"),
    # NumPy 2
    "a type of NumPy 1": script(before="import numpy as np", script="np.zeros(2, np.float)"),
    "a type that NumPy 2 has again": script(before="import numpy as np", script="np.zeros(2, np.bool)"),
    "a number of NumPy 1": script(before="from numpy import NaN"),
    "bytes of an array": script(before="import numpy as np", script="np.zeros(2).tostring()"),
    # branches
    "a branch of a flag that is off": script(
        script="tf.flags.DEFINE_bool('tpu', False, '')\ntf.flags.FLAGS(['x'])\nif tf.flags.FLAGS.tpu:\n  tf.contrib.foo"
    ),
    "a branch of a flag that is on": script(
        script="tf.flags.DEFINE_bool('gpu', True, '')\ntf.flags.FLAGS(['x'])\nif tf.flags.FLAGS.gpu:\n  tf.contrib.foo"
    ),
    "the other branch of a flag": script(
        script="tf.flags.DEFINE_bool('cpu', True, '')\ntf.flags.FLAGS(['x'])\nif not tf.flags.FLAGS.cpu:\n"
        "  tf.contrib.foo\nelse:\n  tf.zeros([])"
    ),
    "print to a file": script(script="import sys\nprint >>sys.stderr, 'x'"),
}

UNSEEN: dict[str, str] = {
    # It depends on where the tensors are made, which is not followed: check says "changed".
    "a session for what was made before it": script(
        script="x = tf.placeholder(tf.float32)\nwith tf.Session() as s:\n  s.run(x, {x: 1.0})"
    ),
    # What a prediction is, an array of one number, is not followed; NumPy 2.4 makes no number of it.
    "a number in an array of one": script(after="'%.1f' % next(estimator.predict(input_fn))['y']"),
}
"""What stops, and is not called impossible."""


def said(text: str, file: Path) -> str:
    """What `check` says will happen."""
    return STOPS if any(one.verdict == "unsupported" for one in check_source(text, str(file), INSTALLED)) else RUNS


def happens(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What happens when it runs as `python -m runner.classic` runs it."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(install, "called", set())
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    code = tf1_imports.Sources(INSTALLED, "__main__").compiled(text.encode(), str(folder / "script.py"), "__main__")
    try:
        exec(code, module.__dict__)
    except Exception:  # whatever it is, it stops the script; which one it was, a failure of the test shows
        traceback.print_exc()
        return STOPS
    finally:
        tf.compat.v1.reset_default_graph()  # in whose collections are variables that a script made outside of graphs
    return RUNS


@pytest.mark.parametrize("name", CASES)
def test_what_check_says_of_a_construct_happens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert happens(CASES[name], tmp_path, monkeypatch) == said(CASES[name], tmp_path / "script.py")


@pytest.mark.parametrize("name", UNSEEN)
def test_what_check_does_not_see(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is seen by now belongs to CASES."""
    assert happens(UNSEEN[name], tmp_path, monkeypatch) == STOPS
    assert said(UNSEEN[name], tmp_path / "script.py") == RUNS


def test_constructs_of_both_kinds_are_many() -> None:
    verdicts = [said(text, Path("script.py")) for text in CASES.values()]
    assert min(verdicts.count(RUNS), verdicts.count(STOPS)) >= 20
    assert len(UNSEEN) / (len(CASES) + len(UNSEEN)) < 0.05


@pytest.mark.parametrize("name", [*runs.MODELS, runs.OF_KERAS])
def test_golden_models_are_said_to_run(name: str) -> None:
    """tests/integration/test_golden.py runs them."""
    file = ROOT / "tests" / "golden" / f"{name}.py"
    assert said(file.read_text(), file) == RUNS


# --- the scripts of other tests ---------------------------------------------------------------------------------------

SCRIPTS_THAT_STOP = {
    "test_classic_check.py": {"MODEL_FN", "OUTSIDE"},  # to be read only
}


def scripts() -> Iterator[tuple[str, str, str]]:
    """Yield (file, name, text) of each script that a test of the classic API holds: each of them is run there."""
    for folder in ("classic", "docs", "launch", "integration"):
        for file in sorted((ROOT / "tests" / folder).rglob("test_*.py")):
            for node in ast.parse(file.read_text()).body if file.name != Path(__file__).name else ():
                text = getattr(getattr(node, "value", None), "value", None)
                if not isinstance(node, ast.Assign) or not isinstance(text, str) or "tf.estimator" not in text:
                    continue
                try:
                    ast.parse(text)
                except SyntaxError:
                    continue
                yield file.name, ast.unparse(node.targets[0]), text


def test_scripts_of_the_tests_are_said_to_do_what_they_do(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "model.py").touch()  # that of test_classic_tensorflow1.py
    (tmp_path / "raw_input.py").touch()  # that of test_beside.py
    found = list(scripts())
    assert len(found) >= 5
    for file, name, text in found:
        expected = STOPS if name in SCRIPTS_THAT_STOP.get(file, ()) else RUNS
        assert said(text, tmp_path / "script.py") == expected, (file, name)
