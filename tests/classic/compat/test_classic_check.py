"""`python -m runner.classic check` reports what is unchanged, changed and unsupported in each line, and is right."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.classic.compat import check, install, names, packages, python2
from runner.classic.compat.check import Finding, check_source
from runner.classic.compat.differences import REMOVED, RULES, RUN_CONFIG, WITHOUT_EFFECT
from runner.classic.compat.installed_names import Installed
from runner.classic.compat.source import SCRIPT
from runner.classic.contrib.names import GONE
from runner.config.source_names import canonical
from tests.support.messages import Messages

ROOT = Path(__file__).parents[3]
INSTALLED = Installed()
VERSION = r"(?<=TensorFlow )2\.\d+(?= has )"
"""Of the TensorFlow that is installed."""


def found(source: str) -> list[Finding]:
    return check_source(textwrap.dedent(source), "code.py", INSTALLED)


def verdicts(source: str) -> dict[str, str]:
    return {one.name: one.verdict for one in found(source)}


def text_of(source: str, name: str) -> str:
    return next(one.text for one in found(source) if one.name == name)


# --- what it finds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [
    "import tensorflow.compat.v1 as tf\ntf.layers.dense",
    "from tensorflow.compat import v1\nv1.layers.dense",
    "from tensorflow.compat.v1 import layers as l\nl.dense",
    "import tensorflow as tf\ntf = tf.compat.v1\ntf.layers.dense",
    "import tensorflow\ntensorflow.compat.v1.layers.dense",
    "import tensorflow as tf\ndense = tf.compat.v1.layers.dense\ndense(1, 2)",
    "try:\n  import tensorflow.compat.v1 as tf\nexcept ImportError:\n  import tensorflow as tf\ntf.layers.dense",
    "import tensorflow as tf\ntf.compat.v2.compat.v1.layers.dense",
])  # fmt: skip
def test_names_are_followed_from_their_import(source: str) -> None:
    assert verdicts(source)["tf.compat.v1.layers.dense"] == "unchanged"
    assert "unsupported" not in verdicts(source).values()


def test_a_file_of_tensorflow_1_is_judged_as_such(messages: Messages) -> None:
    source = "import tensorflow as tf\ntf.layers.dense(x, 2)\ntf.contrib.gan.x(x, 2)\ntf.nn.relux(x)"
    assert [(one.line, one.verdict) for one in found(source)] == [
        (2, "changed"), (2, "unchanged"), (3, "unsupported"), (4, "unsupported"),
    ]  # fmt: skip
    assert verdicts(source)["tf.compat.v1.layers.dense"] == "unchanged"
    for name in ("tf.layers.dense", "tf.compat.v1.contrib.gan.x", "tf.compat.v1.nn.relux"):
        messages.same(name, text_of(source, name), hide=VERSION)


def test_what_tensorflow_1_had_is_told_from_what_nobody_has(messages: Messages) -> None:
    source = "import tensorflow as tf\ntf.layers.dense(x, 2)\ntf.optimizers.Adam()\ntf.nn.relux(x)"
    assert [one.line for one in found(source) if one.verdict == "unsupported"] == [2, 4]
    for name in ("tf.layers.dense", "tf.nn.relux"):
        messages.same(name, text_of(source, name), hide=VERSION)


def test_weights_of_losses_differ_only_on_several_replicas(messages: Messages) -> None:
    source = "import tensorflow.compat.v1 as tf\ntf.losses.log_loss(a, b, weights=w)\ntf.losses.huber_loss(a, b)"
    name = "tf.compat.v1.losses.log_loss(weights=)"
    assert verdicts(source) == {name: "changed", "tf.compat.v1.losses.huber_loss": "unchanged"}
    messages.same(name, text_of(source, name))


def test_modules_of_tf_estimator_that_were_not_public_are_known() -> None:
    source = """
        from tensorflow.python.estimator.model_fn import ModeKeys
        from tensorflow_estimator.python.estimator import estimator as lib
        from tensorflow_estimator.python.estimator import gc
        lib.Estimator(model_fn)
        lib.maybe_overwrite_model_dir
    """
    assert [(one.line, one.verdict) for one in found(source)] == [
        (2, "changed"), (3, "changed"), (4, "changed"), (5, "changed"), (6, "unsupported"),
    ]  # fmt: skip


def test_what_a_class_has_is_not_looked_at() -> None:
    source = "import tensorflow as tf\ntf.estimator.ModeKeys.TRAIN\ntf.float32.as_numpy_dtype\ntf.GradientTape.x"
    assert set(verdicts(source).values()) == {"unchanged"}


MODEL_FN = """
import tensorflow.compat.v1 as tf

def model_fn(features, labels, mode, params):
    image = tf.placeholder(tf.float32)
    optimizer = tf.keras.optimizers.SGD(0.1)
    gradients, _ = tf.clip_by_global_norm(tf.gradients(image, image), 1.0)
    with tf.Session() as session:
        pass
    tf.contrib.layers.optimize_loss(image, None, 0.1, "SGD", clip_gradients=1.0)
    tf.contrib.layers.optimize_loss(image, None, 0.1, "SGD", clip_gradients=None)
    return tf.estimator.EstimatorSpec(mode, train_op=tf.no_op(), loss=tf.reduce_mean(image))

def serving():
    return tf.placeholder(tf.string), tf.Session()
"""


def test_a_model_fn_has_rules_of_its_own(messages: Messages) -> None:
    lines = {(one.line, one.verdict) for one in found(MODEL_FN) if one.verdict != "unchanged"}
    assert lines == {(5, "changed"), (6, "changed"), (7, "changed"), (8, "unsupported"), (10, "changed")}
    name = "tf.compat.v1.keras.optimizers.SGD"
    messages.same(name, text_of(MODEL_FN, name))


OUTSIDE = """
import tensorflow.compat.v1 as tf
x = tf.placeholder(tf.float32)

def main(_):
    loss, _ = tf.metrics.mean(x)
    tf.train.Saver()
    tf.train.Saver([])
    session = tf.Session()
    with tf.Session() as session:
        x = tf.placeholder(tf.float32)
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32)
        tf.gradients(x, x)
    tf.gradients(x, x)
    graph = tf.Graph()
    tf.Session(graph=graph)
    receive = lambda: tf.placeholder(tf.string)
    iterator = dataset.make_initializable_iterator()

def input_fn():
    return dataset.make_initializable_iterator()
"""


def test_what_is_made_outside_of_functions_and_graphs_is_eager(messages: Messages) -> None:
    lines = [(one.line, one.verdict) for one in found(OUTSIDE) if one.verdict != "unchanged"]
    assert lines == [
        (3, "changed"), (6, "unsupported"), (7, "unsupported"), (9, "changed"), (10, "changed"), (15, "unsupported"),
        (19, "unsupported"),
    ]  # fmt: skip
    name = "tf.compat.v1.metrics.mean"
    messages.same(name, text_of(OUTSIDE, name))


def test_a_session_of_a_hook_feeds_what_model_fn_made(messages: Messages) -> None:
    source = """
        import tensorflow.compat.v1 as tf
        class Reset(tf.train.SessionRunHook):
            def after_create_session(self, session, coordinator):
                session.run(self.op)
                session.run(self.op, feed_dict={"rate:0": 0.1})
                session.run(self.op, {"rate:0": 0.1})
        def own(session):
            session.run(op, feed_dict={"rate:0": 0.1})
    """
    assert [(one.line, one.name) for one in found(source) if one.name == ".run"] == [(6, ".run"), (7, ".run")]
    messages.same(".run", text_of(source, ".run"))


def test_a_sum_of_a_thousand_terms_is_read_to_its_end() -> None:
    source = f"import tensorflow as tf\nx = {' + '.join(['tf.one(1)'] * 1000)} + tf.zeros(1)\n"
    assert verdicts(source)["tf.zeros"] == "unchanged"


def test_what_every_module_has_is_there() -> None:
    source = "import os\nimport tensorflow as tf\nos.path.dirname(tf.__file__)\ntf.estimator.__name__\ntf.__foo__\n"
    assert verdicts(source) == {
        "tf.__file__": "unchanged", "tf.estimator.__name__": "unchanged", "tf.__foo__": "unsupported",
    }  # fmt: skip


def test_arguments_of_a_call_count() -> None:
    source = """
        import tensorflow as tf
        tf.estimator.RunConfig(session_config=tf.compat.v1.ConfigProto(), device_fn=None, save_summary_steps=3)
        tf.estimator.EvalSpec(input_fn, steps=None)
        tf.estimator.EvalSpec(input_fn, 10)
        tf.estimator.EvalSpec(input_fn)
    """
    said = [(one.line, one.name) for one in found(source) if one.verdict == "changed"]
    assert said == [(3, "tf.estimator.RunConfig(session_config=)"), (6, "tf.estimator.EvalSpec")]


def test_methods_of_estimators_are_found_by_where_the_estimator_was_made() -> None:
    source = """
        import tensorflow as tf
        class Trainer:
            def __init__(self):
                self.estimator = tf.estimator.LinearRegressor([])
            def run(self, keras_model):
                self.estimator.evaluate(f, 3)
                keras_model.evaluate(x, y)
                self.estimator.train(f)
                given.predict(input_fn=f)
    """
    assert [(one.line, one.name) for one in found(source) if one.verdict == "changed"] == [
        (7, ".evaluate"),
        (10, ".predict"),
    ]


def test_a_hook_of_the_users_own_costs_the_loop() -> None:
    source = (
        "import tensorflow as tf\nclass H(tf.estimator.SessionRunHook):\n  pass\nh = tf.estimator.StopAtStepHook(3)"
    )
    assert verdicts(source) == {"tf.estimator.SessionRunHook": "changed", "tf.estimator.StopAtStepHook": "unchanged"}


def test_private_modules_are_looked_for() -> None:
    source = """
        from tensorflow.python.framework import ops
        from tensorflow.python.framework.ops import Graph
        from tensorflow.python.estimator import gc
        import tensorflow_estimator.api as tfe
    """
    assert list(verdicts(source).items()) == [
        ("tensorflow.python.framework.ops", "changed"),
        ("tensorflow.python.framework.ops.Graph", "changed"),
        ("tensorflow.python.estimator.gc", "changed"),
        ("tensorflow_estimator.api", "unsupported"),
    ]


def test_the_copy_of_keras_in_tensorflow_is_told_from_other_private_modules() -> None:
    source = """
        from tensorflow.python.keras.layers import Dense
        from tensorflow.python.framework import ops
    """
    assert [(one.verdict, "model_to_estimator" in one.text) for one in found(source)] == [
        ("changed", True), ("changed", False),
    ]  # fmt: skip


def test_messages_of_protos_are_looked_for() -> None:
    source = """
        from tensorflow.core.protobuf import rewriter_config_pb2
        from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig, Rewriter
        rewriter_config_pb2.RewriterConfig.OFF
    """
    assert [(one.line, one.verdict) for one in found(source)] == [
        (2, "changed"), (3, "changed"), (3, "unsupported"), (4, "changed"),
    ]  # fmt: skip


def test_packages_that_are_missing_are_no_fault_of_tensorflow(tmp_path: Path, messages: Messages) -> None:
    (tmp_path / "mine.py").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data.py").touch()
    source = """
        import mine, os, numpy, tensorflow_datasets as tfds
        from sub import data
        from tensorflow_addons.optimizers import AdamW
        import tensorflow as tf
        tfds.load("mnist")
    """
    said = check_source(textwrap.dedent(source), str(tmp_path / "sub" / "train.py"), INSTALLED)
    assert [(one.line, one.name, one.verdict) for one in said if one.text] == [
        (2, "tensorflow_datasets", "unsupported"), (4, "tensorflow_addons", "unsupported"),
    ]  # fmt: skip
    for one in said[:2]:
        messages.same(one.name, one.text)


def test_a_folder_that_stands_for_tensorflow_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    (tmp_path / "tensorflow" / "models").mkdir(parents=True)
    (tmp_path / "tensorflow" / "models" / "cnn.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = "import tensorflow as tf\nfrom tensorflow.models import cnn\ntf.zeros([])\n"
    (said,) = [one for one in check_source(source, "train.py", Installed()) if one.text]
    assert (said.line, said.verdict) == (2, "unsupported")
    messages.same(said.name, said.text)
    (tmp_path / "tensorflow" / "__init__.py").touch()
    said, *_ = check_source(source, "train.py", Installed())
    assert (said.line, said.verdict, said.name) == (1, "unsupported", "tensorflow")
    messages.same(said.name, said.text)


def test_idioms_of_python_2_are_named_with_their_fix(messages: Messages) -> None:
    source = """
        import urllib2, string
        import six
        xrange(3), unicode("x"), string.letters, print >>f
        d.has_key(1), iterator.next(), six.iteritems(d)
        names = filter(None, x)
        names.sort(), d.items() + d.keys(), sorted(d.items())[0], list(map(f, x))[0]
        def next_one(long, range): return long + range(len(x) / 2)
    """
    said = {(one.line, one.name): one.text for one in found(source)}
    assert set(said) == {
        (2, "urllib2"), (4, "xrange"), (4, "unicode"), (4, "string.letters"), (4, "print >>"), (5, ".has_key"),
        (5, ".next"), (7, "filter"), (7, ".items"), (7, ".keys"), (8, "range"),
    }  # fmt: skip
    for (_, name), text in said.items():
        messages.same(name, text)


def test_idioms_of_one_kind_are_told_once_with_their_lines() -> None:
    (said,) = found("xrange(1)\nd.keys()\nxrange(2)\nif big:\n  pass\nxrange(3)")
    assert (said.line, said.name) == (1, "xrange") and said.text.endswith("(also in lines 3, 6)")


def test_names_that_numpy_removed_are_gone_and_what_is_written_instead_is_there() -> None:
    import numpy as np

    removed = {name: instead for name, instead in python2._OF_MODULES.items() if name.startswith("numpy.")}
    for name, instead in removed.items():
        with pytest.raises(AttributeError), warnings.catch_warnings(action="ignore"):
            getattr(np, name.removeprefix("numpy."))
        for used in re.findall(r"numpy\.(\w+)", instead):
            assert hasattr(np, used), instead
    methods = [name for name, (owner, _, _) in python2._METHODS.items() if "NumPy" in owner]
    assert len(removed) > 20 and methods and not [name for name in methods if hasattr(np.zeros(1), name)]


def test_a_use_in_a_branch_is_told_with_its_condition() -> None:
    source = """
        import tensorflow as tf
        flags.DEFINE_bool("tpu", False, "")
        flags.DEFINE_bool("gpu", True, "")
        if FLAGS.tpu:
            tf.contrib.foo
        elif not FLAGS.gpu:
            tf.contrib.foo
        else:
            tf.contrib.foo
        if FLAGS.gpu:
            tf.contrib.foo
        def model_fn(features, mode):
            if mode == PREDICT:
                tf.contrib.foo
    """
    told = {one.line: one for one in found(source) if one.text}
    assert {line: one.verdict for line, one in told.items()} == {
        6: "changed", 8: "changed", 10: "unsupported", 12: "unsupported", 15: "unsupported",
    }  # fmt: skip
    assert [told[line].text.split(":")[0] for line in (6, 8)] == ["only if FLAGS.tpu", "only if not FLAGS.gpu"]


def test_without_keras_2_what_needs_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = next(Path(one) for one in sys.path if (Path(one) / "tensorflow" / "_api").is_dir())
    for package in ("tensorflow", "keras"):
        (tmp_path / package).symlink_to(site / package)
    monkeypatch.syspath_prepend(tmp_path)
    source = "import tensorflow.compat.v1 as tf\ntf.layers.dense(x, 2)\ntf.layers.dens(x, 2)\ntf.keras.layers.Dense(1)"
    monkeypatch.setattr(packages, "_is_installed", lambda package: package != "tf_slim")
    told = check_source(f"{source}\nimport tf_slim", "code.py", Installed())
    assert [(one.line, "'estimator-runner[classic]'" in one.text) for one in told if one.text] == [
        (5, True), (2, True), (3, True),
    ]  # fmt: skip


# --- how it is told ---------------------------------------------------------------------------------------------------


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['-m', 'check', *{list(arguments)!r}]\n"
        "try:\n    runpy.run_module('runner.classic', run_name='__main__')\n"
        "finally:\n    assert not {'tensorflow', 'keras', 'numpy', 'mlflow'} & set(sys.modules), 'it is slow'\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


@pytest.mark.processes
def test_it_prints_as_compilers_do_and_imports_no_tensorflow(tmp_path: Path, messages: Messages) -> None:
    (tmp_path / "good.py").write_text("import tensorflow as tf\ntf.estimator.TrainSpec(tf.zeros, tf.ones)\n")
    (tmp_path / "bad.py").write_text("import tensorflow as tf\ntf.contrib.x\nestimator = tf.estimator.Estimator(f)\n")
    good = command("good.py", cwd=tmp_path)
    assert good.stdout.startswith("good.py:2: ") and good.stdout.count("\n") == 2
    messages.same(f"exit {good.returncode}", good.stdout)
    bad = command("bad.py", cwd=tmp_path)
    messages.same(f"exit {bad.returncode}", bad.stdout.splitlines()[1])
    cut = f"{sys.executable} -m runner.classic check good.py bad.py | head -1; echo ${{PIPESTATUS[0]}}"
    shell = ["bash", "-c", cut]
    piped = subprocess.run(shell, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert piped.stdout.splitlines()[1] in ("0", "1", "141") and piped.stderr == ""
    whole = command("--json", ".", cwd=tmp_path)
    assert whole.returncode == 1
    assert [(one["file"], one["line"], one["verdict"]) for one in json.loads(whole.stdout)] == [
        ("bad.py", 2, "changed"), ("bad.py", 2, "unsupported"), ("bad.py", 3, "unchanged"),
        *[("good.py", 2, "unchanged")] * 3,
    ]  # fmt: skip


@pytest.mark.parametrize(("sources", "code", "said"), [
    ({"train.py": "import tensorflow as tf\ntf.zeros"}, 0, "train.py: runs ("),
    ({"train.py": "import mine", "mine.py": "import tensorflow as tf\nif x:\n  tf.contrib.foo"}, 0,
     "train.py: runs, unless it comes to one of the 1 uses"),
    ({"train.py": "from lib import mine", "lib/mine.py": "import tensorflow as tf\ntf.contrib.learn.run_n"}, 1,
     "train.py: runs after the changes"),
    ({"train.py": "import lib.mine", "lib/__init__.py": "", "lib/mine.py": "from . import deep",
      "lib/deep.py": "import tensorflow.compat.v1 as tf\ntf.contrib.foo"}, 1,
     "train.py: cannot run here, for tf.compat.v1.contrib.foo in lib/deep.py, line 2: "),
    ({"train.py": "import mine", "mine.py": "print 1"}, 2, "train.py: not judged"),
    ({"train.py": "import tensorflow as tf\nimport run\ns.run(f, input_fn=f)\ntf.zeros"}, 1, "train.py: runs after"),
], ids=["runs", "branch", "import", "cannot", "python 2", "no package /run"])  # fmt: skip
def test_a_program_has_one_verdict_with_the_files_that_it_imports(
    sources: dict[str, str], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in sources.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    assert check.main(["train.py"]) == code
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith(said) and "your /" not in printed


@pytest.mark.parametrize(("name", "text", "place"), [
    ("old.py", "print 'x'\n", "old.py:1: "),
    pytest.param("old.py", "try: pass\nexcept E, e: pass\n", "old.py:2: ", marks=pytest.mark.skipif(
        sys.version_info >= (3, 14), reason="Python 3.14 can parse it: the next test")),
    ("none.py", None, "runner.classic check: "),
], ids=["print", "except", "no file"])  # fmt: skip
def test_what_is_no_python_is_exit_code_2(
    name: str, text: str | None, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any,
    messages: Messages,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    Path("good.py").write_text("import tensorflow as tf\ntf.zeros\n")
    code = check.main([name, "good.py"])
    printed = capsys.readouterr()
    assert printed.err.startswith(place)
    messages.same(f"exit {code}", printed.err, hide=r"(?<=old\.py:#: ).*(?= \(Python 2)")  # the words of Python
    messages.same("stdout", printed.out)  # the other files are read all the same


@pytest.mark.skipif(sys.version_info < (3, 14), reason="is no Python: the test before")
def test_an_error_after_a_comma_is_an_idiom_of_python_2_where_python_can_parse_it() -> None:
    two_errors = "try: pass\nexcept {}: pass\n"
    for caught, is_old in (("E, e", True), ("(E, F), e", True), ("(E, e)", False), ("E, F", False), ("E as e", False)):
        found = list(python2.idioms(ast.parse(two_errors.format(caught))))
        assert [(line, name) for line, _, name, _ in found] == [(2, "except")] * is_old, caught


# --- that it is true: every name of its tables, against TensorFlow itself -------------------------------------------


@functools.cache
def tensorflow() -> Any:
    import tensorflow

    import runner.classic  # noqa: F401  # what it puts there counts

    return tensorflow


def resolves(name: str) -> bool:
    """Whether `tf.name` is there: also as an attribute of a class."""
    target = tensorflow()
    for part in name.split("."):
        try:
            target = getattr(target, part)
        except (AttributeError, ImportError):
            return False
    return True


def is_folder(module: Any, name: str) -> bool:
    """Whether it is there because somebody has imported a package in the folder of TensorFlow."""
    return getattr(getattr(module, name), "__name__", "") == f"tensorflow.{name}"


def test_what_it_reads_from_files_is_what_tensorflow_has() -> None:
    """Every public name of every module, found by importing them, is found in the files, and no others."""
    tf = tensorflow()
    modules = {"tensorflow": tf, "tensorflow.compat.v1": tf.compat.v1}
    for where in ("train", "nn", "data", "data.experimental", "distribute", "distribute.experimental", "summary", "io"):
        for top in ("tensorflow", "tensorflow.compat.v1"):
            if resolves(f"{top}.{where}".removeprefix("tensorflow.")):
                modules[f"{top}.{where}"] = functools.reduce(getattr, where.split("."), modules[top])
    installed = Installed()
    for name, module in modules.items():
        there = {one for one in dir(module) if not one.startswith("_") and not is_folder(module, one)}
        missing = {one for one in there - {"keras", "estimator"} if not installed.has(f"{name}.{one}")}
        assert not missing, f"{name} has more than its files say"
        too_many = [one for one in installed._names(name) if not one.startswith("_") and not hasattr(module, one)]
        assert not too_many, f"{name} has less than its files say"


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if not rule.names[0].startswith(".")], ids=lambda rule: rule.names[0]
)
def test_what_a_rule_is_about_is_there(rule: Any) -> None:
    for name in rule.names:
        name = name.removesuffix(".*")
        if name.startswith("estimator."):
            assert name.removeprefix("estimator.") in {**names.NAMES, **names.V1_NAMES}, name
        else:
            assert resolves(name) or resolves(f"compat.v1.{name}"), f"{name} is not in TensorFlow: it needs no rule"


EAGER: dict[str, Callable[[Any], Any]] = {
    "sparse_placeholder": lambda v1: v1.sparse_placeholder("float32"),
    "gradients": lambda v1: v1.gradients(v1.ones([]), v1.ones([])),
    "hessians": lambda v1: v1.hessians(v1.ones([]), v1.ones([])),
    "compat.v1.metrics.*": lambda v1: v1.metrics.mean([1.0]),
    "summary.merge": lambda v1: v1.summary.merge([]),
    "summary.merge_all": lambda v1: v1.summary.merge_all(),
    "summary.FileWriter": lambda v1: v1.summary.FileWriter("nowhere"),
    "train.import_meta_graph": lambda v1: v1.train.import_meta_graph("nowhere"),
    "train.export_meta_graph": lambda v1: v1.train.export_meta_graph("nowhere"),
    "data.make_initializable_iterator": lambda v1: v1.data.make_initializable_iterator(v1.data.Dataset.range(1)),
    ".make_initializable_iterator": lambda v1: v1.data.Dataset.range(1).make_initializable_iterator(),
    "train.Saver": lambda v1: v1.train.Saver(),
    "Session": lambda v1: v1.Session().run(v1.ones([]) + 1),
    ".run": lambda v1: v1.Session().run(v1.ones([])),
    ".eval": lambda v1: v1.ones([]).eval(),
}


def test_what_cannot_be_made_outside_of_graphs_raises_there(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorflow()
    monkeypatch.setattr(install, "called", set())  # by tests before this one
    named = {name for rule in RULES if rule.only_in == SCRIPT for name in rule.names}
    assert named == {*EAGER, "InteractiveSession", "placeholder"}
    for name, call in EAGER.items():
        with pytest.raises(RuntimeError):
            raise AssertionError(f"{name} gives {call(tensorflow().compat.v1)}")


@pytest.mark.parametrize("beginning", REMOVED)
def test_what_is_called_removed_is_not_there(beginning: str) -> None:
    assert not resolves(beginning) and not resolves(f"compat.v1.{beginning}")


def test_what_is_recommended_is_there() -> None:
    texts = [rule.text for rule in RULES] + [text for table in (REMOVED, GONE, RUN_CONFIG) for text in table.values()]
    recommended = {name for text in texts for name in re.findall(r"\btf\.([\w.]*\w)", text)}
    assert len(recommended) > 15
    estimator = {
        f"{module}.{name}"
        for module in ("estimator", "compat.v1.estimator")
        for name in (*names.NAMES, *names.V1_NAMES)
    }
    for name in recommended:
        known = name == "estimator" or any(one == name or one.startswith(f"{name}.") for one in estimator)
        assert known or resolves(name), f"tf.{name} is recommended and is not there"


@pytest.mark.parametrize(("source", "name", "verdict"), [
    ("import tensorflow as tf\ntf.contrib.layers.fully_connected(x, 2)", "tf.compat.v1.contrib.layers.fully_connected",
     "unchanged"),
    ("from tensorflow.contrib.rnn.python.ops import rnn_cell\nrnn_cell.GRUCell(2)",
     "tf.contrib.rnn.python.ops.rnn_cell.GRUCell", "unchanged"),
    ("import tensorflow as tf\ntf.contrib.opt.ScipyOptimizerInterface(x)",
     "tf.compat.v1.contrib.opt.ScipyOptimizerInterface", "unsupported"),
])  # fmt: skip
def test_names_of_contrib_are_known(source: str, name: str, verdict: str) -> None:
    assert verdicts(source)[name] == verdict


TABLES = {
    "tensorflow.estimator": names.NAMES, "tensorflow.compat.v1.estimator": names.V1_NAMES,
    "tensorflow.keras.estimator": names.KERAS_NAMES, "tensorflow.compat.v1.keras.estimator": names.KERAS_NAMES,
}  # fmt: skip


def test_it_agrees_with_the_names_that_are_put_on_tensorflow() -> None:
    for module, table in TABLES.items():
        said = found("import tensorflow\n" + "".join(f"{module}.{name}\n" for name in table))
        assert len({one.line for one in said}) == len(table)
        assert not [one.name for one in said if one.verdict == "unsupported"]
    for name, text in names.GONE.items():
        if name not in names.OF_PACKAGE:
            assert text_of(f"import tensorflow as tf\ntf.estimator.{name}", f"tf.estimator.{name}") == text


def test_arguments_of_run_config_without_effect_are_those_that_it_logs(caplog: pytest.LogCaptureFixture) -> None:
    import tensorflow as tf

    from runner.classic.run_config import RunConfig

    given: dict[str, Any] = {
        "session_config": tf.compat.v1.ConfigProto(), "device_fn": lambda op: "", "protocol": "grpc",
        "experimental_max_worker_delay_secs": 1, "session_creation_timeout_secs": 1,
    }  # fmt: skip
    RunConfig(**given).say_without_effect()
    assert [re.findall(r"RunConfig\((\w+)=", text)[0] for text in caplog.messages] == list(WITHOUT_EFFECT)
    assert {*given} == {*WITHOUT_EFFECT} == {*RUN_CONFIG} - {"experimental_distribute"}


def test_switches_without_effect_are_those_that_are_taken_over() -> None:
    (rule,) = (rule for rule in RULES if "disable_v2_behavior" in rule.names)
    assert {*rule.names} == {*install.SWITCHES}


def test_one_name_for_one_thing() -> None:
    assert canonical("tensorflow.compat.v2.compat.v1.train.Saver") == "tensorflow.compat.v1.train.Saver"
    assert canonical("tensorflow.compat.v1.compat.v2.train.Checkpoint") == "tensorflow.train.Checkpoint"
    assert canonical("tensorflow.compat.v1") == "tensorflow.compat.v1"


def test_a_write_by_hand_depends_on_what_it_writes() -> None:
    source = """
        import tensorflow.compat.v1 as tf

        class Own(tf.train.Optimizer):
            def apply_gradients(self, pairs, global_step=None, name=None):
                return tf.group(*[v.assign_sub(0.1 * g) for g, v in pairs])

        def model_fn(features, labels, mode):
            seen = tf.get_variable("seen", [])
            step = tf.assign_add(tf.train.get_global_step(), 1)
            return seen.assign(1.0), step

        def main():
            table.assign(x=1)
        """
    changed = {(one.line, one.name) for one in found(source) if "dry_run" in one.text}
    names = {".assign_sub", "tf.compat.v1.assign_add", ".assign", "tf.compat.v1.train.Optimizer"}
    assert {name for _, name in changed} == names
    assert not any(line > 12 for line, _ in changed)
