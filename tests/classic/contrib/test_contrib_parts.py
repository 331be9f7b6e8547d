"""The parts of tf.contrib that are the runner's own: their numbers are computed by numpy from the formulas of 1.15."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import runner.classic  # noqa: F401
from tests.support.messages import Messages

pytest.importorskip("tf_slim", reason="the extra 'classic' brings it")

RANDOM = np.random.RandomState(0)


def in_a_graph(build: Any) -> Any:
    """Return what the tensors of `build()` are, with all variables initialized."""
    with tf.Graph().as_default(), tf.Session() as session:
        made = build()
        session.run([tf.global_variables_initializer(), tf.tables_initializer()])
        return session.run(made)


# --- training ---------------------------------------------------------------------------------------------------------


def test_hparams_are_parsed_and_keep_their_types(messages: Messages) -> None:
    hparams = tf.contrib.training.HParams(rate=0.1, units=[8, 4], name="a", on=False)
    assert hparams.parse("rate=1,units=[16,32],units[1]=7,name=b,on=true") is hparams
    assert hparams.values() == {"rate": 1.0, "units": [16, 7], "name": "b", "on": True}
    assert isinstance(hparams.rate, float) and "rate" in hparams and hparams.get("other", 3) == 3
    assert tf.contrib.training.HParams(**hparams.values()).to_json() == hparams.to_json()
    hparams.override_from_dict({"rate": 2})
    hparams.add_hparam("more", 1)
    hparams.del_hparam("name")
    assert str(hparams) == "[('more', 1), ('on', True), ('rate', 2.0), ('units', [16, 7])]"
    for text in ("rate=x", "no=1", "a b"):
        with messages.raised(ValueError):
            hparams.parse(text)
    with messages.raised(ValueError):
        hparams.set_hparam("more", 1.5)
    with pytest.raises(ValueError, match="rate"):
        hparams.parse("rate[0]=1")


def test_values_of_a_text_are_those_of_tensorflow_1() -> None:
    kinds = {"a": int, "b": float}
    parse_values = tf.contrib.training.parse_values
    assert parse_values("a=1,b=[2,3]", kinds) == {"a": 1, "b": [2.0, 3.0]}
    assert parse_values("a[1]=3,a[0]=2", kinds) == {"a": {1: 3, 0: 2}}
    for text in ("a=1,a=2", "a[0]=1,a[0]=2", "a=1,a[0]=2", "a[0]=1,a=2", "a[0]=[1,2]", "c=1"):
        with pytest.raises(ValueError):
            parse_values(text, kinds)


def test_create_train_op_runs_update_ops_before_the_gradient() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        weight, count = tf.get_variable("w", initializer=2.0), tf.get_variable("n", initializer=0.0, trainable=False)
        tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, count.assign_add(1.0))
        optimizer = tf.train.GradientDescentOptimizer(0.5)
        train_op = tf.contrib.training.create_train_op(weight * weight, optimizer)
        session.run(tf.global_variables_initializer())
        assert session.run(train_op) == 4.0
        assert session.run([weight, count, tf.train.get_global_step()]) == [0.0, 1.0, 1]


# --- estimator, lookup, data, framework, learn ------------------------------------------------------------------------


def test_gradients_are_clipped_by_their_common_norm(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        a, b = tf.get_variable("a", initializer=[0.0, 0.0]), tf.get_variable("b", initializer=0.0)
        loss = tf.reduce_sum(a * [3.0, 4.0]) + 12.0 * b + 0.0 * tf.reduce_sum(features)
        optimizer = tf.contrib.estimator.clip_gradients_by_norm(tf.train.MomentumOptimizer(1.0, 0.5), 1.3)
        train_op = optimizer.minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(lambda: tf.data.Dataset.from_tensors([[1.0]]).repeat(), steps=1)
    assert estimator.get_variable_names() == ["a", "a/Momentum", "b", "b/Momentum", "global_step"]
    np.testing.assert_allclose(estimator.get_variable_value("a"), [-0.3, -0.4], rtol=1e-6)
    np.testing.assert_allclose(estimator.get_variable_value("b"), -1.2, rtol=1e-6)


def test_heads_are_those_of_tf_estimator() -> None:
    contrib = tf.contrib.estimator
    one, other = contrib.binary_classification_head(name="a"), contrib.multi_class_head(3, name="b")
    assert isinstance(one, tf.estimator.BinaryClassHead) and isinstance(other, tf.estimator.MultiClassHead)
    assert contrib.multi_head([one, other]).logits_dimension == 4
    assert contrib.regression_head(label_dimension=2).logits_dimension == 2
    assert (
        contrib.poisson_regression_head().logits_dimension == contrib.logistic_regression_head().logits_dimension == 1
    )
    assert contrib.multi_label_head(3, weight_column="w").logits_dimension == 3
    assert contrib.stop_if_no_decrease_hook is tf.estimator.experimental.stop_if_no_decrease_hook
    assert tf.contrib.learn.ModeKeys.INFER == tf.estimator.ModeKeys.PREDICT
    assert tf.contrib.learn.RunConfig(gpu_memory_fraction=0.5, save_checkpoints_steps=3).save_checkpoints_steps == 3


def test_export_all_saved_models_has_the_parameters_of_1_15(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        y = tf.get_variable("w", initializer=2.0) * features["x"]
        train_op = tf.train.GradientDescentOptimizer(0.0).minimize(tf.reduce_sum(y), tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, predictions={"y": y}, loss=tf.reduce_sum(y), train_op=train_op)

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path / "run"))
    estimator.train(lambda: tf.data.Dataset.from_tensors({"x": [1.0]}), steps=1)
    (tmp_path / "words").touch()
    path = tf.contrib.estimator.export_all_saved_models(
        estimator=estimator,
        export_dir_base=str(tmp_path / "exported"),
        input_receiver_fn_map={
            "infer": tf.estimator.export.build_raw_serving_input_receiver_fn({"x": tf.TensorSpec([None])})
        },
        assets_extra={"words": str(tmp_path / "words")},
        as_text=True,
        checkpoint_path=estimator.latest_checkpoint(),
    )
    exported = Path(path.decode())
    assert (exported / "saved_model.pbtxt").exists() and (exported / "assets.extra" / "words").exists()


def test_tables_of_words() -> None:
    def build() -> Any:
        lookup = tf.contrib.lookup
        table = lookup.index_table_from_tensor(mapping=["a", "b"], num_oov_buckets=2)
        words = lookup.index_to_string_table_from_tensor(mapping=["a", "b"], default_value="?")
        pairs = lookup.HashTable(lookup.KeyValueTensorInitializer(["x"], [5], value_dtype=tf.int64), -1)
        return (
            table.lookup(tf.constant(["b", "a"])),
            table.lookup(tf.constant(["other"])),
            tf.strings.to_hash_bucket_fast(["other"], 2) + 2,
            words.lookup(tf.constant([1, 7], tf.int64)),
            pairs.lookup(tf.constant(["x", "y"])),
        )

    ids, outside, hashed, words, pairs = in_a_graph(build)
    assert ids.tolist() == [1, 0] and outside == hashed and words.tolist() == [b"b", b"?"] and pairs.tolist() == [5, -1]


def test_functions_of_datasets() -> None:
    data, numbers = tf.contrib.data, tf.data.Dataset.range(5)
    whole = numbers.apply(data.batch_and_drop_remainder(2)).apply(data.unbatch())
    assert [int(one) for one in whole] == [0, 1, 2, 3]
    doubled = numbers.apply(data.map_and_batch(lambda one: one * 2, 5))
    assert next(iter(doubled)).numpy().tolist() == [0, 2, 4, 6, 8]
    assert sorted(int(one) for one in numbers.apply(data.shuffle_and_repeat(5, 2))) == sorted([*range(5)] * 2)
    checked = numbers.batch(5).apply(data.assert_element_shape(tf.TensorShape([5])))
    assert tf.data.get_output_shapes(checked) == tf.TensorShape([5])


def test_a_checkpoint_is_assigned_by_the_scaffold(tmp_path: Path, messages: Messages) -> None:
    framework, kept, said = tf.contrib.framework, str(tmp_path / "model.ckpt"), list[str]()
    with tf.Graph().as_default(), tf.Session() as session:
        tf.get_variable("old/w", initializer=3.0), tf.get_variable("b", initializer=4.0)
        session.run(tf.global_variables_initializer())
        tf.train.Saver().save(session, kept, write_meta_graph=False)

    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        w, b, new = (tf.get_variable(name, initializer=0.0) for name in ("w", "b", "new"))
        restore = framework.assign_from_checkpoint_fn(kept, {"old/w": w})
        also, feed = framework.assign_from_checkpoint(kept, [b, new], ignore_missing_vars=True)
        with pytest.raises(ValueError) as caught:
            framework.assign_from_checkpoint(kept, framework.get_variables("new"))
        said.append(str(caught.value))

        def init(scaffold: Any, session: Any) -> None:
            restore(session)
            session.run(also, feed)

        loss = 0.0 * (w + b + new + tf.reduce_sum(features))
        train_op = tf.train.GradientDescentOptimizer(0.1).minimize(loss, framework.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, scaffold=tf.train.Scaffold(init_fn=init))

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path / "run"))
    estimator.train(lambda: tf.data.Dataset.from_tensors([[1.0]]).repeat(), steps=1)
    assert [estimator.get_variable_value(name) for name in ("w", "b", "new")] == [3.0, 4.0, 0.0]
    messages.same("ValueError", said[0])


def test_feature_columns_are_those_of_tf_feature_column(messages: Messages) -> None:
    layers, columns = tf.contrib.layers, tf.feature_column
    words = layers.sparse_column_with_keys("word", ["a", "b"])
    assert words == columns.categorical_column_with_vocabulary_list("word", ["a", "b"])
    assert layers.one_hot_column(words) == columns.indicator_column(words)
    number = layers.real_valued_column("x", dimension=2)
    assert number == columns.numeric_column("x", (2,))
    hashed = layers.sparse_column_with_hash_bucket("h", 5)
    assert layers.crossed_column([words, hashed], 7) == columns.crossed_column(["word", "h"], 7)
    assert layers.embedding_column(words, 3).dimension == 3
    assert set(layers.create_feature_spec_for_parsing([number, hashed])) == {"x", "h"}
    with messages.raised(ValueError):
        layers.sparse_column_with_hash_bucket("h", 5, combiner="mean")


def test_summaries_of_a_host_call_are_written(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        summary, weight = tf.contrib.summary, tf.get_variable("w", initializer=2.0)
        loss = weight * tf.reduce_sum(features)
        step = tf.train.get_global_step()
        optimizer = tf.contrib.tpu.CrossShardOptimizer(tf.train.GradientDescentOptimizer(1.0))

        def host_call(steps: Any, losses: Any) -> Any:
            writer = summary.create_file_writer(str(tmp_path / "host"))
            with writer.as_default(), summary.record_summaries_every_n_global_steps(2, steps[0]):
                summary.scalar("size", losses[0], family="loss", step=steps[0])
            return summary.all_summary_ops()

        return tf.contrib.tpu.TPUEstimatorSpec(
            mode, loss=loss, train_op=optimizer.minimize(loss, step),
            host_call=(host_call, [tf.reshape(step, [1]), tf.reshape(loss, [1])]),
        )  # fmt: skip

    config = tf.contrib.tpu.RunConfig(model_dir=str(tmp_path / "model"))
    estimator = tf.contrib.tpu.TPUEstimator(model_fn, config=config, use_tpu=False, train_batch_size=1)
    estimator.train(lambda params: tf.data.Dataset.from_tensors([[1.0]]).repeat(), steps=4)
    tf.contrib.summary.create_file_writer(str(tmp_path / "host")).flush()
    (path,) = (tmp_path / "host").glob("events*")
    events = [event for event in tf.train.summary_iterator(str(path)) if event.summary.value]
    assert [event.step % 2 for event in events] == [0, 0]
    assert {value.tag for event in events for value in event.summary.value} == {"loss/size"}


# --- opt --------------------------------------------------------------------------------------------------------------

GRADIENTS = (np.array([0.1, -0.2, 0.3]), np.array([0.4, 0.1, -0.2]))
START = np.array([1.0, 2.0, -3.0])


def adam(weight: Any, *, decay: float = 0.0, ahead: bool = False) -> Any:
    m, v = np.zeros(3), np.zeros(3)
    for step, gradient in enumerate(GRADIENTS, 1):
        weight = weight - decay * weight
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        weight = weight - rate * (0.9 * m + 0.1 * gradient if ahead else m) / (np.sqrt(v) + 1e-8)
    return weight


def momentum_w(weight: Any) -> Any:
    gathered = np.zeros(3)
    for gradient in GRADIENTS:
        gathered, weight = 0.9 * gathered + gradient, weight * 0.99
        weight = weight - 0.1 * gathered
    return weight


def lars(weight: Any) -> Any:
    """ApplyMomentum: the rate of a step multiplies all that is gathered."""
    gathered = np.zeros(3)
    for gradient in GRADIENTS:
        norms = np.linalg.norm(weight), np.linalg.norm(gradient)
        rate = 0.1 * 0.001 * norms[0] / (norms[1] + 0.0001 * norms[0])
        gathered = 0.9 * gathered + gradient + 0.0001 * weight
        weight = weight - rate * gathered
    return weight


def adamax(weight: Any) -> Any:
    m, v = np.zeros(3), np.zeros(3)
    for step, gradient in enumerate(GRADIENTS, 1):
        m, v = 0.9 * m + 0.1 * gradient, np.maximum(0.999 * v, np.abs(gradient))
        weight = weight - 0.1 / (1 - 0.9**step) * m / (v + 1e-8)
    return weight


@pytest.mark.parametrize(("name", "arguments", "expected", "state"), [
    ("AdamWOptimizer", {"weight_decay": 0.01, "learning_rate": 0.1}, adam(START, decay=0.01),
     ["beta1_power", "beta2_power", "w/AdamW", "w/AdamW_1"]),
    ("MomentumWOptimizer", {"weight_decay": 0.01, "learning_rate": 0.1, "momentum": 0.9}, momentum_w(START),
     ["w/MomentumW"]),
    ("LazyAdamOptimizer", {"learning_rate": 0.1}, adam(START), ["beta1_power", "beta2_power", "w/Adam", "w/Adam_1"]),
    ("NadamOptimizer", {"learning_rate": 0.1}, adam(START, ahead=True),
     ["beta1_power", "beta2_power", "w/Adam", "w/Adam_1"]),
    ("LARSOptimizer", {"learning_rate": 0.1}, lars(START), ["w/LARSOptimizer"]),
    ("AdaMaxOptimizer", {"learning_rate": 0.1}, adamax(START), ["beta1_power", "w/AdaMax", "w/AdaMax_1"]),
])  # fmt: skip
def test_optimizers_take_the_steps_of_their_formulas(
    name: str, arguments: dict[str, Any], expected: Any, state: list[str], tmp_path: Path
) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        weight = tf.get_variable("w", initializer=START.astype(np.float32))
        loss = tf.reduce_sum(weight * features[0])
        train_op = getattr(tf.contrib.opt, name)(**arguments).minimize(loss, tf.train.get_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = tf.estimator.Estimator(model_fn, str(tmp_path))
    estimator.train(lambda: tf.data.Dataset.from_tensor_slices(np.stack(GRADIENTS).astype(np.float32)).batch(1))
    assert estimator.get_variable_names() == sorted([*state, "global_step", "w"])
    np.testing.assert_allclose(estimator.get_variable_value("w"), expected, rtol=1e-5)


def test_lazy_adam_leaves_the_rows_that_a_batch_has_not() -> None:
    def build(optimizer: Any) -> Any:
        rows = tf.get_variable("rows", initializer=np.ones([3, 1], np.float32))
        step = optimizer.minimize(tf.reduce_sum(tf.nn.embedding_lookup(rows, [1])))
        with tf.control_dependencies([step]):
            return rows.read_value()

    lazy = in_a_graph(lambda: build(tf.contrib.opt.LazyAdamOptimizer(0.1)))
    decayed = in_a_graph(lambda: build(tf.contrib.opt.MomentumWOptimizer(0.5, 0.1, 0.9)))
    np.testing.assert_allclose(lazy[:, 0], [1, 0.9, 1], rtol=1e-5)
    np.testing.assert_allclose(decayed[:, 0], [1, 0.4, 1], rtol=1e-5)


# --- rnn --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "h", "c"), [
    (True, [-0.38079708, 0.38079708], [-1.0, 1.0]),
    (False, [0.64121795, 0.68166804], [0.88477188, 0.98103917]),
])  # fmt: skip
def test_layer_norm_lstm_gives_the_values_of_1_15(norm: bool, h: list[float], c: list[float]) -> None:
    """The values stand in its test, contrib/rnn/python/kernel_tests/rnn_cell_test.py, LayerNormBasicLSTMCellTest."""

    def build() -> Any:
        cell = tf.contrib.rnn.LayerNormBasicLSTMCell(2, layer_norm=norm)
        state = tf.contrib.rnn.LSTMStateTuple(tf.constant([[0.0, 0.1]]), tf.constant([[0.2, 0.3]]))
        with tf.variable_scope("other", initializer=tf.constant_initializer(0.5)):
            made = cell(tf.ones([1, 3]), state)
        scope = "other/layer_norm_basic_lstm_cell"
        gates = ("forget", "input", "output", "state", "transform")
        variables = [f"{gate}/{of}" for gate in gates for of in ("beta", "gamma")] if norm else ["bias"]
        named = sorted(one.op.name for one in tf.global_variables())
        assert named == sorted(f"{scope}/{one}" for one in [*variables, "kernel"])
        return made

    output, state = in_a_graph(build)
    np.testing.assert_allclose(output[0], h, rtol=1e-5)
    np.testing.assert_allclose(state.c[0], c, rtol=1e-5)


def lstm(inputs: Any, kernel: Any, lengths: Any) -> Any:
    """[time, batch, in] -> outputs, c, h at the end of each sequence; gates i, j, f, o."""

    def sigmoid(x: Any) -> Any:
        return 1 / (1 + np.exp(-x))

    units = kernel.shape[1] // 4
    c = h = np.zeros([inputs.shape[1], units])
    outputs = []
    for time, one in enumerate(inputs):
        i, j, f, o = np.split(np.concatenate([one, h], 1) @ kernel, 4, axis=1)
        new_c = c * sigmoid(f + 1) + sigmoid(i) * np.tanh(j)
        new_h = np.tanh(new_c) * sigmoid(o)
        goes_on = (time < lengths)[:, None]
        c, h = np.where(goes_on, new_c, c), np.where(goes_on, new_h, h)
        outputs.append(np.where(goes_on, new_h, 0))
    return np.stack(outputs), c, h


def test_block_cells_are_an_lstm() -> None:
    inputs, lengths = RANDOM.rand(4, 2, 3).astype(np.float32), np.array([2, 4])
    kernel = RANDOM.randn(5, 8).astype(np.float32)

    def build() -> Any:
        rnn, named = tf.contrib.rnn, {"initializer": tf.constant_initializer(kernel)}
        with tf.variable_scope("a", **named):
            fused = rnn.LSTMBlockFusedCell(2)(tf.constant(inputs), dtype=tf.float32, sequence_length=lengths)
        with tf.variable_scope("b", **named):
            cell = rnn.FusedRNNCellAdaptor(rnn.LSTMBlockCell(2), use_dynamic_rnn=True)
            stepped = cell(tf.constant(inputs), dtype=tf.float32, sequence_length=lengths)
        with tf.variable_scope("c", **named):
            backwards = rnn.TimeReversedFusedRNN(rnn.LSTMBlockFusedCell(2))(tf.constant(inputs), dtype=tf.float32)
        assert [one.op.name for one in tf.global_variables()] == [
            "a/lstm_fused_cell/kernel", "a/lstm_fused_cell/bias", "b/rnn/lstm_cell/kernel", "b/rnn/lstm_cell/bias",
            "c/lstm_fused_cell/kernel", "c/lstm_fused_cell/bias",
        ]  # fmt: skip
        slope = tf.gradients(tf.reduce_sum(fused[0]), tf.global_variables()[0])
        return fused, stepped, backwards, slope

    fused, stepped, backwards, slope = in_a_graph(build)
    outputs, c, h = lstm(inputs, kernel, lengths)
    for made in (fused, stepped):
        np.testing.assert_allclose(made[0], outputs, atol=1e-5)
        np.testing.assert_allclose(made[1].c, c, atol=1e-5)
        np.testing.assert_allclose(made[1].h, h, atol=1e-5)
    np.testing.assert_allclose(backwards[0][::-1], lstm(inputs[::-1], kernel, np.array([4, 4]))[0], atol=1e-5)
    assert np.abs(slope[0]).max() > 0


class OfPairs(tf.nn.rnn_cell.RNNCell):
    """Its inputs and outputs are pairs of tensors of different sizes."""

    state_size, output_size = 1, (1, 2)

    def call(self, inputs: Any, state: Any) -> Any:
        one, two = inputs
        return (one + state, two * state), state + 1.0


def test_a_list_of_steps_goes_to_static_rnn_as_it_is() -> None:
    def build() -> Any:
        steps = [(tf.fill([1, 1], float(time)), tf.fill([1, 2], 10.0)) for time in range(3)]
        return tf.contrib.rnn.FusedRNNCellAdaptor(OfPairs())(steps, dtype=tf.float32)

    outputs, state = in_a_graph(build)
    assert [(one.tolist(), two.tolist()) for one, two in outputs] == [
        ([[0.0]], [[0.0, 0.0]]), ([[2.0]], [[10.0, 10.0]]), ([[4.0]], [[20.0, 20.0]]),
    ]  # fmt: skip
    assert type(outputs) is list and type(outputs[0]) is tuple and state.tolist() == [[3.0]]


def test_stacked_bidirectional_networks_name_their_layers() -> None:
    def build() -> Any:
        def cells() -> list[Any]:
            return [tf.contrib.rnn.GRUCell(2) for _ in range(2)]

        inputs = tf.constant(RANDOM.rand(2, 3, 4).astype(np.float32))
        whole = tf.contrib.rnn.stack_bidirectional_dynamic_rnn(cells(), cells(), inputs, dtype=tf.float32)
        scopes = {one.op.name.rpartition("/gru_cell/")[0] for one in tf.global_variables()}
        assert scopes == {
            f"stack_bidirectional_rnn/cell_{layer}/bidirectional_rnn/{way}" for layer in (0, 1) for way in ("fw", "bw")
        }
        return whole

    outputs, forward, backward = in_a_graph(build)
    assert outputs.shape == (2, 3, 4)
    np.testing.assert_allclose(outputs[:, -1, :2], forward[1], rtol=1e-6)
    np.testing.assert_allclose(outputs[:, 0, 2:], backward[1], rtol=1e-6)


# --- crf, seq2seq -----------------------------------------------------------------------------------------------------


def test_crf_is_what_all_paths_say() -> None:
    scores, transitions = RANDOM.randn(2, 3, 2).astype(np.float32), RANDOM.randn(2, 2).astype(np.float32)
    lengths, tags = [3, 1], np.array([[1, 0, 1], [0, 1, 1]], np.int32)

    def score(row: int, path: Any) -> Any:
        of_tags = sum(scores[row, step, tag] for step, tag in enumerate(path))
        return of_tags + sum(transitions[one, two] for one, two in itertools.pairwise(path))

    expected, best = [], []
    for row, length in enumerate(lengths):
        paths = {path: score(row, path) for path in itertools.product(range(2), repeat=length)}
        expected.append(score(row, tags[row, :length]) - np.log(np.sum(np.exp([*paths.values()]))))
        best.append(max(paths, key=paths.__getitem__))

    def build() -> Any:
        named = tf.constant_initializer(transitions)
        with tf.variable_scope("crf", initializer=named):
            likelihood, made = tf.contrib.crf.crf_log_likelihood(tf.constant(scores), tags, tf.constant(lengths))
        assert [one.op.name for one in tf.global_variables()] == ["crf/transitions"]
        slope = tf.gradients(tf.reduce_sum(likelihood), made)[0]
        return likelihood, tf.contrib.crf.crf_decode(tf.constant(scores), made, tf.constant(lengths)), slope

    likelihood, (decoded, best_score), slope = in_a_graph(build)
    np.testing.assert_allclose(likelihood, expected, rtol=1e-5)
    assert decoded.tolist() == [[*best[0]], [*best[1], 0, 0]]
    np.testing.assert_allclose(best_score, [score(row, path) for row, path in enumerate(best)], rtol=1e-5)
    found, of_first = tf.contrib.crf.viterbi_decode(scores[0], transitions)
    assert found == [*best[0]] and of_first == pytest.approx(score(0, best[0]), rel=1e-5)
    assert np.abs(slope).max() > 0


def test_sequence_loss_is_a_weighted_mean() -> None:
    logits, targets = RANDOM.randn(2, 3, 4).astype(np.float32), RANDOM.randint(0, 4, [2, 3])
    weights = np.array([[1, 1, 0], [0.5, 0, 0]], np.float32)
    every = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]

    def build() -> Any:
        loss = tf.contrib.seq2seq.sequence_loss
        given = (tf.constant(logits), tf.constant(targets), tf.constant(weights))
        return (
            loss(*given),
            loss(*given, average_across_batch=False),
            loss(*given, average_across_timesteps=False, average_across_batch=False, sum_over_timesteps=True,
                 sum_over_batch=True),
        )  # fmt: skip

    mean, by_example, summed = in_a_graph(build)
    np.testing.assert_allclose(mean, (every * weights).sum() / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(by_example, (every * weights).sum(1) / weights.sum(1), rtol=1e-5)
    np.testing.assert_allclose(summed, (every * weights).sum() / 3, rtol=1e-5)


def test_a_decoder_trains_on_its_inputs_and_then_on_its_own_outputs() -> None:
    inputs = RANDOM.rand(2, 3, 2).astype(np.float32)

    def build() -> Any:
        seq2seq, cell = tf.contrib.seq2seq, tf.contrib.rnn.GRUCell(2)
        layer, state = tf.layers.Dense(2, use_bias=False, name="words"), tf.zeros([2, 2])
        helper = seq2seq.TrainingHelper(tf.constant(inputs), tf.constant([3, 1]))
        trained = seq2seq.dynamic_decode(
            seq2seq.BasicDecoder(cell, helper, state, layer), impute_finished=True, maximum_iterations=5
        )
        whole, _ = tf.nn.dynamic_rnn(cell, tf.constant(inputs), [3, 1], dtype=tf.float32, scope="decoder")
        names = [one.op.name for one in tf.global_variables()]
        greedy = seq2seq.GreedyEmbeddingHelper(tf.constant(inputs[0, :2]), tf.constant([0, 1]), -1)
        own = seq2seq.dynamic_decode(
            seq2seq.BasicDecoder(cell, greedy, state, layer), maximum_iterations=4, scope="decoder"
        )
        assert [one.op.name for one in tf.global_variables()] == names
        assert names[0].startswith("decoder/gru_cell/") and "decoder/words/kernel" in names
        tiled = seq2seq.tile_batch((tf.constant([[1], [2]]), tf.constant(3)), 2)
        return trained, tf.tensordot(whole, layer.kernel, 1), own, tiled

    (outputs, _, lengths), expected, (own, _, own_lengths), tiled = in_a_graph(build)
    assert lengths.tolist() == [3, 1] and own_lengths.tolist() == [4, 4] and own.sample_id.shape == (2, 4)
    np.testing.assert_allclose(outputs.rnn_output, expected, atol=1e-6)
    np.testing.assert_array_equal(own.sample_id, own.rnn_output.argmax(-1))
    assert tiled[0][:, 0].tolist() == [1, 1, 2, 2] and tiled[1] == 3


def test_the_last_activations_are_those_at_the_ends() -> None:
    rnn_common = importlib.import_module("tensorflow.contrib.learn.python.learn.estimators.rnn_common")
    given = np.arange(12.0).reshape(2, 3, 2)
    ends = in_a_graph(lambda: rnn_common.select_last_activations(tf.constant(given), tf.constant([1, 3], tf.int64)))
    np.testing.assert_array_equal(ends, [given[0, 0], given[1, 2]])
    whole = in_a_graph(lambda: rnn_common.select_last_activations(tf.constant(given), None))
    np.testing.assert_array_equal(whole, given[:, -1])
