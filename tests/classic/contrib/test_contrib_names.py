"""tf.contrib as modules: what is imported, how it is written, and what is said of a name that is not served."""

from __future__ import annotations

import importlib

import pytest
import tensorflow.compat.v1 as tf

import runner.classic  # noqa: F401
from runner.classic.compat.old_modules import NotServed
from runner.classic.contrib import names
from tests.support.messages import Messages

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
    assert tf.contrib.framework.deprecated("2018-01-01", "Use g.")(abs)(-1) == 1
    assert importlib.import_module("tensorflow.contrib.slim.nets").resnet_v1.resnet_v1_50
    assert {"fully_connected", "l2_regularizer"} <= set(dir(layers)) and "slim" in dir(tf.contrib)


# The files of TensorFlow 1.15 that define the name.
@pytest.mark.parametrize(("path", "public"), [
    ("slim.python.slim.nets.vgg.vgg_16", "slim.nets.vgg.vgg_16"),
    ("slim.python.slim.nets.inception_v3.inception_v3", "slim.nets.inception.inception_v3"),
    ("slim.python.slim.learning.create_train_op", "slim.learning.create_train_op"),
    ("losses.python.losses.loss_ops.add_loss", "losses.add_loss"),
    ("losses.python.metric_learning.metric_loss_ops.npairs_loss", "losses.metric_learning.npairs_loss"),
    ("metrics.python.ops.set_ops.set_union", "metrics.set_union"),
    ("estimator.python.estimator.multi_head.multi_head", "estimator.multi_head"),
    ("estimator.python.estimator.replicate_model_fn.TowerOptimizer", "estimator.TowerOptimizer"),
    ("framework.python.ops.arg_scope.arg_scope", "framework.arg_scope"),
    ("framework.python.ops.sort_ops.argsort", "framework.argsort"),
    ("data.python.ops.unique.unique", "data.unique"),
    ("data.python.ops.get_single_element.get_single_element", "data.get_single_element"),
    ("distribute.python.one_device_strategy.OneDeviceStrategy", "distribute.OneDeviceStrategy"),
    ("opt.python.training.adamax.AdaMaxOptimizer", "opt.AdaMaxOptimizer"),
    ("seq2seq.python.ops.beam_search_decoder.tile_batch", "seq2seq.tile_batch"),
    ("feature_column.python.feature_column.sequence_feature_column.sequence_numeric_column",
     "feature_column.sequence_numeric_column"),
])  # fmt: skip
def test_private_paths_lead_to_the_public_names(path: str, public: str) -> None:
    module, _, name = path.rpartition(".")
    found = tf.contrib
    for part in public.split("."):
        found = getattr(found, part)
    assert getattr(importlib.import_module(f"tensorflow.contrib.{module}"), name) is found
    assert names.SPACE.serves(path)
    importlib.import_module("tensorflow.contrib.seq2seq.python.ops.beam_search_ops")


def test_a_name_that_is_not_served_says_what_to_use(messages: Messages) -> None:
    with messages.raised(NotServed):
        _ = tf.contrib.learn.Experiment
    with messages.raised(AttributeError):
        _ = tf.contrib.layers.fully_conected
    with messages.raised(AttributeError):
        _ = tf.contrib.gan
    assert not hasattr(tf.contrib.rnn, "NASCell")


def test_an_import_of_what_is_not_served_is_refused_where_it_is_used(messages: Messages) -> None:
    import tensorflow.contrib.gan.python.losses as losses
    from tensorflow.contrib import gan
    from tensorflow.contrib.layers import nothing
    from tensorflow.contrib.learn import Experiment
    from tensorflow.contrib.learn.python.learn import learn_runner

    with messages.raised(NotServed):
        learn_runner.run(None)
    with messages.raised(NotServed):
        gan.GANModel()
    with messages.raised(NotServed):
        losses.wasserstein_generator_loss(None)
    with messages.raised(NotServed):
        nothing()
    with messages.raised(NotServed):
        Experiment(None)
    with messages.raised(NotServed):

        class _Mine(Experiment):
            pass

    assert not hasattr(tf.contrib.learn, "Experiment") and not hasattr(tf.contrib, "gan")


def test_an_import_that_is_tried_fails_at_once(messages: Messages) -> None:
    from tensorflow.contrib.framework import nothing  # which another module has imported, and never uses

    try:
        from tensorflow.contrib.framework import nothing
    except ImportError as error:
        nothing = str(error)
    messages.same("ImportError", nothing)


@pytest.mark.parametrize(("name", "is_served"), [
    ("layers.fully_connected", True), ("layers", True), ("layers.python.layers.utils", True), ("slim.nets.vgg.x", True),
    ("keras.layers.Dense", True), ("training.HParams.parse", True), ("layers.nothing", False), ("gan.x", False),
    ("rnn.python.ops.rnn_cell.NASCell", False),
])  # fmt: skip
def test_the_table_answers_without_tensorflow(name: str, is_served: bool) -> None:
    assert names.SPACE.serves(name) == is_served


def test_what_is_served_is_not_said_to_be_gone() -> None:
    for beginning in names.GONE:
        assert not names.SPACE.find(beginning), beginning  # of a whole part: what it does not have
