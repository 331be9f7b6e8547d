"""tf.contrib as modules: what is imported, how it is written, and what is said of a name that is not served."""

from __future__ import annotations

import importlib

import pytest
import tensorflow.compat.v1 as tf

import runner.classic  # noqa: F401
from runner.classic.compat.old_modules import NotServed
from runner.classic.contrib import names

pytest.importorskip("tf_slim", reason="the extra 'classic' brings it")


def test_every_name_of_the_table_is_there() -> None:
    for name in names.NAMES:
        part, _, last = name.rpartition(".")
        assert getattr(importlib.import_module(f"tensorflow.contrib.{part}"), last) is not None, name


def test_every_way_to_write_a_name_gives_the_same_object() -> None:
    import tensorflow
    import tensorflow.contrib.slim as slim
    from tensorflow.contrib import layers
    from tensorflow.contrib.layers import batch_norm
    from tensorflow.contrib.layers.python.layers import batch_norm as private
    from tensorflow.contrib.rnn.python.ops import core_rnn_cell

    assert layers is tf.contrib.layers is tensorflow.contrib.layers
    assert batch_norm is private is slim.batch_norm is tf.contrib.slim.batch_norm is layers.batch_norm
    assert core_rnn_cell.GRUCell is tf.contrib.rnn.GRUCell is tf.nn.rnn_cell.GRUCell
    assert tf.contrib.keras.layers.Dense is tf.keras.layers.Dense
    assert importlib.import_module("tensorflow.contrib.slim.nets").resnet_v1.resnet_v1_50
    assert {"fully_connected", "l2_regularizer"} <= set(dir(layers)) and "slim" in dir(tf.contrib)


def test_a_name_that_is_not_served_says_what_to_use() -> None:
    with pytest.raises(NotServed) as wrong:
        _ = tf.contrib.learn.Experiment
    assert str(wrong.value) == (
        "tf.contrib.learn.Experiment is not available: use tf.estimator.train_and_evaluate with TrainSpec and EvalSpec."
    )
    with pytest.raises(AttributeError, match=r"^tf.contrib.layers.fully_conected .* Did you mean 'fully_connected'\?$"):
        _ = tf.contrib.layers.fully_conected
    with pytest.raises(AttributeError, match="^tf.contrib.gan is not available: use the package tensorflow_gan.$"):
        _ = tf.contrib.gan
    assert not hasattr(tf.contrib.rnn, "NASCell")


def test_an_import_of_what_is_not_served_is_refused_where_it_is_used() -> None:
    import tensorflow.contrib.gan.python.losses as losses
    from tensorflow.contrib import gan
    from tensorflow.contrib.layers import nothing
    from tensorflow.contrib.learn import Experiment
    from tensorflow.contrib.learn.python.learn import learn_runner

    says = "^tf.contrib.learn.python.learn.learn_runner is not available: use tf.estimator.train_and_evaluate.$"
    with pytest.raises(NotServed, match=says):
        learn_runner.run(None)
    with pytest.raises(NotServed, match="^tf.contrib.gan is not available: use the package tensorflow_gan.$"):
        gan.GANModel()
    with pytest.raises(NotServed, match="gan.python.losses is not available: use the package tensorflow_gan.$"):
        losses.wasserstein_generator_loss(None)
    with pytest.raises(NotServed, match="^tf.contrib.layers.nothing is not available: the runner does not"):
        nothing()
    with pytest.raises(NotServed, match=r"^tf.contrib.learn.Experiment is not available: use .* EvalSpec\.$"):
        Experiment(None)
    with pytest.raises(NotServed, match="^tf.contrib.learn.Experiment is not available"):

        class _Mine(Experiment):
            pass

    assert not hasattr(tf.contrib.learn, "Experiment") and not hasattr(tf.contrib, "gan")


def test_an_import_that_is_tried_fails_at_once() -> None:
    from tensorflow.contrib.framework import nothing  # which another module has imported, and never uses

    try:
        from tensorflow.contrib.framework import nothing
    except ImportError as error:
        nothing = str(error)
    assert nothing == "tf.contrib.framework.nothing is not available: the runner does not have it."


@pytest.mark.parametrize(("name", "is_served"), [
    ("layers.fully_connected", True), ("layers", True), ("layers.python.layers.utils", True), ("slim.nets.vgg.x", True),
    ("keras.layers.Dense", True), ("training.HParams.parse", True), ("layers.nothing", False), ("gan.x", False),
    ("rnn.python.ops.rnn_cell.NASCell", False),
])  # fmt: skip
def test_the_table_answers_without_tensorflow(name: str, is_served: bool) -> None:
    assert names.SPACE.serves(name) == is_served


def test_what_is_served_is_not_said_to_be_gone() -> None:
    for beginning, _ in names.GONE:
        assert not names.SPACE.find(beginning), beginning  # of a whole part: what it does not have
