"""An exported model gives what `predict` gives, in a process that knows nothing of this package."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from runner import (
    Estimator,
    EstimatorSpec,
    Input,
    PredictOutput,
    RunConfig,
    ServingInputReceiver,
    build_parsing_serving_input_receiver_fn,
    build_raw_serving_input_receiver_fn,
    build_raw_supervised_input_receiver_fn,
)
from runner.checkpoint.reader import Reader
from runner.export import outputs as outputs_of_exports
from runner.export.receivers import receiver_fn_of_spec
from runner.export.saved_model import exports_in
from runner.run_config import WarmStart
from runner.tf_private import tensor_bundle
from runner.tf_private.tensor_bundle import write_bundle
from runner.tf_private.v1 import export_outputs
from tests.support import export_models
from tests.support.export_models import (
    FEATURE_SPEC,
    NUMBERS,
    WORDS,
    examples,
    predicted,
    trained_words,
    words_input,
    words_once,
)
from tests.support.line import points
from tests.support.messages import Messages
from tests.support.models import STYLES, data, train_input
from tests.tracing.test_graph_variables import in_parts

v1 = tf.compat.v1
SERVED = Path(__file__).parents[1] / "support" / "served.py"
X = data(7)[0]
RAW_X = receiver_fn_of_spec(tf.TensorSpec([None, 4]))
PARSING = build_parsing_serving_input_receiver_fn(FEATURE_SPEC)


def x_once() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(X)


def decoded(path: bytes) -> str:
    return path.decode()


def exported_words(words: Estimator, folder: Path, **options: Any) -> str:
    return decoded(words.export_saved_model(folder, PARSING, **options))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Estimator:
    """A trained model with tables."""
    return trained_words(tmp_path_factory.mktemp("words"))


def encoded(text: bytes) -> str:
    return base64.b64encode(text).decode()


def cases_of_words(path: str) -> list[dict[str, Any]]:
    """The model of words: asked for each signature as it is, and in the messages of TensorFlow Serving."""
    serialized = [one.SerializeToString() for one in examples()]
    signatures = {"predict": "examples", "serving_default": "inputs", "regress": "inputs"}
    cases: list[dict[str, Any]] = [
        {"path": path, "signature": name, "inputs": {given: ([encoded(one) for one in serialized], "bytes")}}
        for name, given in signatures.items()
    ]
    try:
        from tensorflow_serving.apis import classification_pb2, predict_pb2
    except ImportError:
        return cases
    predict = predict_pb2.PredictRequest()
    predict.model_spec.signature_name = "predict"
    predict.inputs["examples"].CopyFrom(tf.make_tensor_proto(serialized, dtype=tf.string))
    classify = classification_pb2.ClassificationRequest()
    classify.input.example_list.examples.extend(examples())
    at = {"path": path, "sys_path": [str(Path(predict_pb2.__file__).parents[2])]}
    return [
        *cases,
        {**at, "signature": "predict", "predict": encoded(predict.SerializeToString())},
        {**at, "signature": "serving_default", "classify": encoded(classify.SerializeToString())},
    ]


@pytest.fixture(scope="module")
def answers(words: Estimator, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], np.ndarray]]:
    """Model -> (what a process without this package answers, what `predict` says).

    The file that fills a table is gone by then.
    """
    cases, wanted = {}, {}
    for style, model_fn in STYLES.items():
        folder = tmp_path_factory.mktemp(style)
        estimator = Estimator(model_fn, folder, RunConfig(tensorboard=False)).train(train_input(10), steps=3)
        path = decoded(estimator.export_saved_model(folder / "export", RAW_X))
        cases[style] = {"path": path, "signature": "serving_default", "inputs": {"input": (X.tolist(), "float32")}}
        wanted[style] = predicted(estimator, x_once, None if style == "keras_model" else "y")
    vocabulary = Path(words.params["vocabulary"])
    for case in cases_of_words(exported_words(words, tmp_path_factory.mktemp("export"))):
        kind = "inputs" if "inputs" in case else "request"
        cases[f"{case['signature']}/{kind}"] = case
        wanted[f"{case['signature']}/{kind}"] = predicted(words, words_once)
    vocabulary.rename(vocabulary.with_suffix(".gone"))
    command = [sys.executable, "-I", str(SERVED)]
    given = json.dumps(list(cases.values()))
    result = subprocess.run(command, input=given, capture_output=True, text=True, timeout=240)
    vocabulary.with_suffix(".gone").rename(vocabulary)
    assert result.returncode == 0, result.stderr
    return {name: (answer, wanted[name]) for name, answer in zip(cases, json.loads(result.stdout), strict=True)}


@pytest.mark.processes
@pytest.mark.parametrize("style", STYLES)
def test_a_fresh_process_with_tensorflow_alone_predicts_the_same(style: str, answers: Any) -> None:
    answer, wanted = answers[style]
    assert answer["same"] and answer["method"] == "tensorflow/serving/predict"
    (name,) = set(answer["outputs"]) & {"y", "output"}
    np.testing.assert_array_equal(np.array(answer["outputs"][name], "float32"), wanted)
    assert f"outputs['{name}'] tensor_info:" in answer["shown"] and "inputs['input'] tensor_info:" in answer["shown"]


@pytest.mark.processes
@pytest.mark.parametrize("asked", ["inputs", "request"])
def test_tables_answer_without_the_file_that_filled_them(asked: str, answers: Any) -> None:
    if f"predict/{asked}" not in answers:
        pytest.skip("tensorflow-serving-api, which has TensorFlow Serving's messages, is not installed")
    answer, wanted = answers[f"predict/{asked}"]
    assert answer["same"]
    np.testing.assert_array_equal(np.array(answer["outputs"]["y"], "float32"), wanted)
    answer, _ = answers[f"serving_default/{asked}"]
    assert answer["method"] == "tensorflow/serving/classify" and answer["outputs"]["classes"] == [["no", "yes"]] * 4
    scores = np.array(answer["outputs"]["scores"])
    np.testing.assert_allclose(scores[:, 1:], 1 / (1 + np.exp(-wanted)), rtol=1e-5)
    answer, _ = answers["regress/inputs"]
    assert answer["method"] == "tensorflow/serving/regress" and answer["same"]
    np.testing.assert_array_equal(np.array(answer["outputs"]["outputs"], "float32"), wanted)


@pytest.mark.processes
def test_only_what_a_signature_needs_is_exported(answers: Any) -> None:
    """`words_model` builds Adam in every mode."""
    answer, _ = answers["predict/inputs"]
    assert answer["variables"] == ["global_step", "embedding", "kernel"]
    assert not [kind for kind in answer["operations"] if "Adam" in kind or "Grad" in kind]
    # Neither in the functions that the graph calls.
    assert answers["native"][0]["variables"] == [
        "global_step", "dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias",
    ]  # fmt: skip


def test_files_of_an_export(words: Estimator, tmp_path: Path) -> None:
    more = tmp_path / "more.txt"
    more.write_text("what goes with it")
    first = exported_words(words, tmp_path / "base", assets_extra={"notes/more.txt": str(more)}, as_text=True)
    second = exported_words(words, tmp_path / "base")
    assert exports_in(str(tmp_path / "base")) == [first, second] and int(Path(first).name) < int(Path(second).name)
    files = {str(file.relative_to(first)) for file in Path(first).rglob("*") if file.is_file()}
    assert files == {
        "saved_model.pbtxt", "assets/words.txt", "assets.extra/notes/more.txt", "variables/variables.index",
        "variables/variables.data-00000-of-00001", "README.md",
    }  # fmt: skip
    assert (Path(second) / "saved_model.pb").exists() and len(list((tmp_path / "base").iterdir())) == 2


def test_the_checkpoint_that_is_named_is_exported(tmp_path: Path) -> None:
    estimator = Estimator(STYLES["classic"], tmp_path, RunConfig(save_checkpoints_steps=2, tensorboard=False))
    estimator.train(train_input(10), steps=4)
    older = str(tmp_path / "model.ckpt-2")
    path = decoded(estimator.export_saved_model(tmp_path / "export", RAW_X, checkpoint_path=older))
    there, newest = Reader(f"{path}/variables/variables"), Reader(str(tmp_path / "model.ckpt-4"))
    assert there.get("global_step") == 2
    np.testing.assert_array_equal(there.get("out/kernel"), Reader(older).get("out/kernel"))
    assert not np.array_equal(there.get("out/kernel"), newest.get("out/kernel"))


def test_variables_of_servers_and_replicas_are_exported_whole(tmp_path: Path) -> None:
    """A checkpoint holds replicas collapsed, and the parts of one variable as slices of it."""
    mirrored = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    config = RunConfig(train_distribute=mirrored, tensorboard=False)
    estimator = Estimator(STYLES["classic"], tmp_path / "m", config).train(train_input(10), steps=2)
    checkpoint = estimator.latest_checkpoint()
    assert checkpoint is not None
    reader = Reader(checkpoint)
    values: dict[str, Any] = {name: reader.get(name) for name in reader.names()}
    kernel = tf.constant(values["hidden/kernel"])
    divided = tmp_path / "divided" / "model.ckpt-2"
    divided.parent.mkdir()
    write_bundle(divided, {**values, "hidden/kernel": (kernel[:3], kernel[3:])})
    for path in (checkpoint, str(divided)):
        model = tf.saved_model.load(
            decoded(estimator.export_saved_model(tmp_path / "export", RAW_X, checkpoint_path=path))
        )
        y = model.signatures["serving_default"](tf.constant(X))["y"]
        np.testing.assert_allclose(y, predicted(estimator, x_once), rtol=1e-6)


def test_what_a_v1_partitioner_divides_is_exported_whole(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        return in_parts(features, features if labels is None else labels, mode)

    estimator = Estimator(model_fn, tmp_path / "model", RunConfig(tensorboard=False))
    estimator.train(Input(points(repeat=True), batch_size=2), steps=2)
    receiver = receiver_fn_of_spec(tf.TensorSpec([None]))
    path = decoded(estimator.export_saved_model(tmp_path / "export", receiver))
    there = Reader(f"{path}/variables/variables").names()
    assert {name: shape for name, (shape, _) in there.items()} == {
        "columns": (4, 5), "global_step": (), "table": (7, 4), "whole": (5, 1),
    }  # fmt: skip
    x = np.arange(7, dtype="float32")
    wanted = predicted(estimator, lambda: tf.data.Dataset.from_tensors(x))
    y = tf.saved_model.load(path).signatures["serving_default"](tf.constant(x))["y"]
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
    new = RunConfig(warm_start=WarmStart(str(estimator.latest_checkpoint()), include=["whole"]), tensorboard=False)
    begun = decoded(Estimator(model_fn, tmp_path / "new", new).export_saved_model(tmp_path / "begun", receiver))
    assert np.abs(Reader(f"{begun}/variables/variables").get("columns")).min() > 0


def test_moving_averages_are_exported_where_the_run_keeps_them(tmp_path: Path) -> None:
    config = RunConfig(ema_decay=0.5, tensorboard=False)
    estimator = Estimator(STYLES["native"], tmp_path, config).train(train_input(10), steps=3)
    model = tf.saved_model.load(decoded(estimator.export_saved_model(tmp_path / "export", RAW_X)))
    y = model.signatures["serving_default"](tf.constant(X))["y"].numpy()
    np.testing.assert_array_equal(y, predicted(estimator, x_once))
    raw = Estimator(STYLES["native"], tmp_path, RunConfig(tensorboard=False))
    assert not np.allclose(y, predicted(raw, x_once))


def test_a_new_model_is_exported_with_what_it_begins_with(words: Estimator, tmp_path: Path) -> None:
    """From a checkpoint, and from the variables of a SavedModel; tf.estimator's test_export_from_warm_start."""
    saved = exported_words(words, tmp_path / "first")
    for source in (str(words.latest_checkpoint()), f"{saved}/variables/variables"):
        config = RunConfig(warm_start=WarmStart(source, include=["kernel"]), tensorboard=False)
        new = Estimator(export_models.words_model, tmp_path / "new", config, params=words.params)
        there = Reader(f"{exported_words(new, tmp_path / 'export')}/variables/variables")
        np.testing.assert_array_equal(there.get("kernel"), words.get_variable_value("kernel"))
        assert np.abs(there.get("embedding")).sum() > 0 and there.get("global_step") == 0


@pytest.mark.parametrize("begins_with", ["a warm start", "restore of the saver's own"])
def test_values_that_no_checkpoint_has_are_written_in_parts(
    begins_with: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubling(tf.compat.v1.train.Saver):
        def restore(self, sess: Any, save_path: str) -> None:
            super().restore(sess, save_path)
            first = next(one for one in v1.global_variables() if one.op.name == "kernel_0")
            sess.run(v1.assign(first, 2 * first))

    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        divided = v1.get_variable("divided", [4, 6], partitioner=v1.fixed_size_partitioner(2, axis=1))
        kernels = [tf.convert_to_tensor(divided), *(v1.get_variable(f"kernel_{i}", [4, 8]) for i in range(5))]
        y = tf.add_n([tf.reduce_sum(features @ kernel) for kernel in kernels])
        step = v1.train.get_or_create_global_step().assign_add(1)
        scaffold = None if mode == "train" or "saver" not in begins_with else v1.train.Scaffold(saver=Doubling())
        return EstimatorSpec(mode, {"y": y[None]}, y, step, scaffold=scaffold)

    trained = Estimator(model_fn, tmp_path / "trained", RunConfig(tf_random_seed=5, tensorboard=False))
    trained.train(train_input(10), steps=1)
    estimator = trained
    if "saver" not in begins_with:
        source = WarmStart(str(trained.latest_checkpoint()), include=["kernel_[01]", "divided"])
        config = RunConfig(tf_random_seed=6, tensorboard=False, warm_start=source)
        estimator = Estimator(model_fn, tmp_path / "new", config)

    def values(folder: str) -> dict[str, np.ndarray]:
        there = Reader(f"{decoded(estimator.export_saved_model(tmp_path / folder, RAW_X))}/variables/variables")
        return there.get_many(there.names())

    whole, sizes, write = values("whole"), [], tensor_bundle._write
    monkeypatch.setattr(tensor_bundle, "PART_BYTES", 300)

    def counted(place: str, entries: Any, prefix: Path) -> Path:
        sizes.append(sum(np.asarray(entry.value).nbytes for entry in entries))
        return write(place, entries, prefix)

    monkeypatch.setattr(tensor_bundle, "_write", counted)
    parts = values("parts")
    assert len(sizes) >= 3 and max(sizes) <= 300 and sum(sizes) == 5 * 128 + 96 + 8
    assert sorted(parts) == sorted(whole)
    for name, value in whole.items():
        np.testing.assert_array_equal(parts[name], value)
        if name.startswith("kernel_") or name == "divided":
            is_loaded = "saver" in begins_with or (
                "warm" in begins_with and name in ("kernel_0", "kernel_1", "divided")
            )
            times = 2 if name == "kernel_0" and "saver" in begins_with else 1
            assert np.array_equal(value, times * trained.get_variable_value(name)) == is_loaded, name


@pytest.mark.slow
def test_keras_layers_with_state_tables_and_random_numbers_are_exported(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        ids = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(features["w"])
        net = keras.layers.Embedding(5, 3)(ids)
        which = keras.layers.StringLookup(vocabulary=["b", "c"], output_mode="one_hot")(features["w"])
        net = keras.layers.BatchNormalization()(net, training=mode == "train")
        net = keras.layers.Dropout(0.5)(net, training=mode == "train")
        numbers = keras.layers.Normalization(mean=2.0, variance=1.0)(features["n"][:, None])
        y = keras.layers.Dense(1)(tf.concat([net, tf.cast(which, tf.float32), numbers], 1))
        if mode == "infer":
            return EstimatorSpec(mode, predictions={"y": y}, export_outputs={"only": PredictOutput(y)})
        metric = keras.metrics.MeanAbsoluteError(name="mae")
        metric.update_state(labels, y)
        loss = tf.square(y - labels)[:, 0]
        metrics = {"mae": metric, "bias": (y - labels)[:, 0]}
        return EstimatorSpec(mode, loss=loss, optimizer=keras.optimizers.Adam(0.1), eval_metric_ops=metrics)

    estimator = Estimator(model_fn, tmp_path, RunConfig(tensorboard=False)).train(words_input, steps=3)
    specs = {"w": tf.TensorSpec([None], tf.string), "n": tf.TensorSpec([None])}
    path = decoded(estimator.export_saved_model(tmp_path / "e", build_raw_serving_input_receiver_fn(specs)))
    model = tf.saved_model.load(path)
    assert set(model.signatures) == {"only", "serving_default"}
    y = model.signatures["only"](w=tf.constant(WORDS), n=tf.constant(NUMBERS))["output"]
    np.testing.assert_array_equal(y, predicted(estimator, words_once))
    supervised = build_raw_supervised_input_receiver_fn(specs, tf.TensorSpec([None, 1]))
    both = {"train": supervised, "eval": supervised}
    path = decoded(estimator.experimental_export_all_saved_models(tmp_path / "a", both))
    with tf.Graph().as_default(), v1.Session() as session:
        signature = v1.saved_model.load(session, ["eval"], path).signature_def["eval"]
        session.run(signature.outputs["metrics/mae/update_op"].name, fed(signature))
        error = session.run(signature.outputs["metrics/mae/value"].name)
    np.testing.assert_allclose(error, np.abs(y - np.array(NUMBERS)[:, None]).mean(), rtol=1e-5)
    with tf.Graph().as_default() as graph, v1.Session() as session:
        loaded = v1.saved_model.load(session, ["train"], path)
        feeds = fed(loaded.signature_def["train"])
        mean = next(one for one in v1.global_variables() if one.op.name == "batch_normalization/moving_mean")
        before = session.run(mean)
        session.run(graph.get_collection("train_op"), feeds)
        assert session.run(v1.train.get_global_step(graph)) == 4 and not np.array_equal(session.run(mean), before)


def fed(signature: Any, shift: float = 0.0) -> dict[str, Any]:
    """The examples of `words_input`, for a signature with labels; `shift` is added to these."""
    values = {"w": WORDS, "n": NUMBERS, "label": [[number + shift] for number in NUMBERS]}
    return {signature.inputs[name].name: value for name, value in values.items()}


def test_all_modes_are_graphs_of_one_model(words: Estimator, tmp_path: Path) -> None:
    specs = {"w": tf.TensorSpec([None], tf.string), "n": tf.TensorSpec([None])}
    supervised = build_raw_supervised_input_receiver_fn(specs, tf.TensorSpec([None, 1]))
    receivers = {"train": supervised, "eval": supervised, "infer": PARSING}
    path = decoded(words.experimental_export_all_saved_models(tmp_path, receivers))
    difference = predicted(words, words_once) - np.array(NUMBERS)[:, None]

    def run(tag: str) -> Iterator[tuple[Any, Any, Any]]:
        with tf.Graph().as_default() as graph, v1.Session() as session:
            yield graph, session, v1.saved_model.load(session, [tag], path)

    for graph, session, loaded in run("train"):
        signature = loaded.signature_def["train"]
        metrics = {f"metrics/{name}/{what}" for name in ("mae", "bias") for what in ("value", "update_op")}
        assert set(signature.outputs) == {"loss", "predictions/y", *metrics}  # as of tf.estimator 2.15
        losses = []
        for _ in range(3):
            losses.append(session.run(signature.outputs["loss"].name, fed(signature, 9)))
            session.run(graph.get_collection("train_op"), fed(signature, 9))
        assert losses[0] > losses[1] > losses[2] and session.run(v1.train.get_global_step(graph)) == 7
    for _, session, loaded in run("eval"):
        outputs = {name: info.name for name, info in loaded.signature_def["eval"].outputs.items()}
        feeds = fed(loaded.signature_def["eval"])
        session.run([outputs["metrics/mae/update_op"], outputs["metrics/bias/update_op"]], feeds)
        found = session.run({name: outputs[f"metrics/{name}/value"] for name in ("mae", "bias")})
        np.testing.assert_allclose(found["mae"], np.abs(difference).mean(), rtol=1e-5)
        np.testing.assert_allclose(found["bias"], difference.mean(), rtol=1e-5)
    for _, _, loaded in run("serve"):
        assert set(loaded.signature_def) >= {"serving_default", "regress", "predict"}
        assert loaded.signature_def["predict"].outputs.keys() == {"y", "class"}


def test_names_of_features_may_be_numbers_and_there_may_be_other_inputs(tmp_path: Path) -> None:
    def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
        y = features[1] * v1.get_variable("w", [], initializer=v1.ones_initializer())
        loss = tf.reduce_mean(y**2)
        return EstimatorSpec(
            mode, predictions=y, loss=loss,
            train_op=v1.train.GradientDescentOptimizer(0.0).minimize(loss, v1.train.get_global_step()),
        )  # fmt: skip

    def receiver() -> ServingInputReceiver:
        text = v1.placeholder(tf.string, [None], "text")
        number = tf.strings.to_number(text)
        return ServingInputReceiver({1: number}, {"text": text}, {"numbers": {"n": number}})

    estimator = Estimator(model_fn, tmp_path, RunConfig(tensorboard=False))
    estimator.train(lambda: tf.data.Dataset.from_tensors({1: [1.0]}), steps=1)
    model = tf.saved_model.load(decoded(estimator.export_saved_model(tmp_path / "export", receiver)))
    assert model.signatures["serving_default"](tf.constant(["3"]))["output"].numpy().tolist() == [3.0]
    assert model.signatures["numbers:serving_default"](n=tf.constant([4.0]))["output"].numpy().tolist() == [4.0]


def test_a_receiver_may_ask_a_saved_model_of_tensorflow_2_that_has_a_table(words: Estimator, tmp_path: Path) -> None:
    """As the graph of TensorFlow Transform: its vocabulary is a file, which goes into the export."""

    class Lookup(tf.Module):
        def __init__(self) -> None:
            file = tf.saved_model.Asset(str(vocabulary))
            self.file, key = file, tf.lookup.TextFileIndex.WHOLE_LINE
            table = (file.asset_path, tf.string, key, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER)
            self.table = tf.lookup.StaticHashTable(tf.lookup.TextFileInitializer(*table), -1)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
        def __call__(self, words: tf.Tensor) -> tf.Tensor:
            return self.table.lookup(words)

    def receiver() -> ServingInputReceiver:
        words = v1.placeholder(tf.string, [None], "words")
        numbers = tf.saved_model.load(str(tmp_path / "lookup"))(words)
        return ServingInputReceiver({"w": words, "n": tf.cast(numbers, tf.float32)}, {"words": words})

    vocabulary = tmp_path / "ranks.txt"
    vocabulary.write_text("z\nb\nc\n")
    tf.saved_model.save(Lookup(), str(tmp_path / "lookup"))
    path = decoded(words.export_saved_model(tmp_path / "export", receiver))
    for folder in (tmp_path / "lookup" / "assets").iterdir():
        folder.unlink()
    vocabulary.unlink()
    assert "ranks.txt" in {one.name for one in (Path(path) / "assets").iterdir()}
    y = tf.saved_model.load(path).signatures["predict"](words=tf.constant(WORDS))["y"]
    asked = {"w": WORDS, "n": [-1.0, 1.0, 0.0, 2.0]}
    np.testing.assert_array_equal(y, predicted(words, lambda: tf.data.Dataset.from_tensors(asked)))


def test_what_a_receiver_collects_is_exported_with_its_values(tmp_path: Path) -> None:
    """TensorFlow 2.15: the same files, collections and, where the checkpoint has the table, keys."""
    paths = {name: tmp_path / name for name in ("used.txt", "unused.txt", "asset.txt")}
    for path in paths.values():
        path.write_text("a\nb\n")

    def table(name: str) -> Any:
        lines = v1.lookup.TextFileInitializer(
            str(paths[name]), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER,
        )  # fmt: skip
        return v1.lookup.StaticHashTable(lines, -1)

    def receiver_fn() -> ServingInputReceiver:
        words = v1.placeholder(tf.string, [None], "words")
        table("unused.txt")
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, tf.constant(str(paths["asset.txt"])))
        scale = v1.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0, name="scale")
        filled = scale.insert(tf.constant(["x"]), tf.constant([3.0]))
        v1.add_to_collection(v1.GraphKeys.TABLE_INITIALIZERS, filled)
        ids = tf.cast(table("used.txt").lookup(words), tf.float32)
        return ServingInputReceiver({"x": ids * scale.lookup(tf.constant("x"))}, {"words": words})

    def model_fn(features: Any, mode: str) -> EstimatorSpec:
        weight = v1.get_variable("w", [], initializer=v1.ones_initializer())
        y = features["x"] * weight
        step = v1.train.get_or_create_global_step()
        return EstimatorSpec(mode, {"y": y}, tf.reduce_sum(y), step.assign_add(1))

    estimator = Estimator(model_fn, tmp_path / "model")
    estimator.train(lambda: tf.data.Dataset.from_tensors({"x": [1.0]}))
    exported = estimator.export_saved_model(tmp_path / "export", receiver_fn).decode()
    assert sorted(file.name for file in Path(exported, "assets").iterdir()) == sorted(paths)
    names = dict(tf.train.list_variables(f"{exported}/variables/variables"))
    assert set(names) == {"w", "global_step", "scale-keys", "scale-values"}
    for file in paths.values():  # the export has its own
        file.unlink()
    with tf.Graph().as_default() as graph, v1.Session() as session:
        loaded = v1.saved_model.load(session, ["serve"], exported)
        assert len(graph.get_collection(v1.GraphKeys.ASSET_FILEPATHS)) == 3
        assert len(graph.get_collection(v1.GraphKeys.TABLE_INITIALIZERS)) == 3
        signature = loaded.signature_def["serving_default"]
        found = session.run(signature.outputs["y"].name, {signature.inputs["words"].name: ["b", "a", "c"]})
    assert found.tolist() == [3, 0, -3]
    served = tf.saved_model.load(exported).signatures["serving_default"]
    assert served(words=tf.constant(["b"]))["y"].numpy().tolist() == [3]


def test_outputs_of_tensorflows_own_classes_are_exported(tmp_path: Path) -> None:
    def model_fn(features: Any, mode: str) -> EstimatorSpec:
        weight = v1.get_variable("w", [], initializer=v1.ones_initializer())
        y = features["x"] * weight
        outputs = {"serving_default": export_outputs.PredictOutput(y), "value": export_outputs.RegressionOutput(y)}
        step = v1.train.get_or_create_global_step()
        return EstimatorSpec(mode, {"y": y}, tf.reduce_sum(y), step.assign_add(1), export_outputs=outputs)

    estimator = Estimator(model_fn, tmp_path / "model")
    estimator.train(lambda: tf.data.Dataset.from_tensors({"x": [1.0]}))
    spec = {"x": tf.io.FixedLenFeature([], tf.float32)}
    path = estimator.export_saved_model(tmp_path / "export", build_parsing_serving_input_receiver_fn(spec)).decode()
    assert set(tf.saved_model.load(path).signatures) == {"serving_default", "value"}
    for name in (
        "ExportOutput",
        "PredictOutput",
        "ClassificationOutput",
        "RegressionOutput",
        "TrainOutput",
        "EvalOutput",
    ):
        assert issubclass(getattr(outputs_of_exports, name), getattr(export_outputs, name))


def test_what_cannot_be_exported_is_said_and_leaves_nothing(
    words: Estimator, tmp_path: Path, messages: Messages
) -> None:
    new = Estimator(STYLES["classic"], tmp_path / "new", RunConfig(tensorboard=False))
    base = tmp_path / "base"
    with messages.raised(ValueError):
        new.export_saved_model(base, RAW_X)
    with messages.raised(ValueError):
        words.export_saved_model(base, None)  # type: ignore[arg-type]
    with messages.raised(ValueError):
        words.export_saved_model(base, lambda: {})  # type: ignore[arg-type, return-value]
    with messages.raised(ValueError):
        words.experimental_export_all_saved_models(base, {"other": PARSING})
    with messages.raised(ValueError):
        words.export_saved_model(base, PARSING, assets_extra={"a": str(tmp_path / "none")})

    def larger(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        v1.get_variable("not_in_checkpoint", [2])
        return export_models.words_model(features, labels, mode, params)

    other = Estimator(larger, words.model_dir, RunConfig(tensorboard=False), params=words.params)
    with messages.raised(ValueError, hide=rf"{re.escape(words.model_dir)}|(?<=a model with: ).*?(?=\. )") as raised:
        other.export_saved_model(base, PARSING)
    assert "kernel" in str(raised.value)
    outside = tf.Variable(1.0)

    def with_outside(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
        return EstimatorSpec(mode, predictions=features["n"] * outside)

    other = Estimator(with_outside, words.model_dir, RunConfig(tensorboard=False), params=words.params)
    with messages.raised(ValueError, hide="^.*(?=model_fn uses)"):
        other.export_saved_model(base, PARSING)
    assert not base.exists() or not os.listdir(base)
