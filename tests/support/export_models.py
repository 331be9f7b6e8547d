"""What tests of exporting export: the models, and what requests of them look like."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from runner import (
    ClassificationOutput,
    Estimator,
    EstimatorSpec,
    PredictOutput,
    RegressionOutput,
    RunConfig,
    build_raw_serving_input_receiver_fn,
)

v1 = tf.compat.v1

WORDS = ["a", "b", "z", "c"]
NUMBERS = [1.0, 2.0, 3.0, 4.0]
FEATURE_SPEC = {"w": tf.io.FixedLenFeature([], tf.string), "n": tf.io.FixedLenFeature([], tf.float32)}
SHIFT = tf.constant([0.5])  # made outside of model_fn


def words_input() -> tf.data.Dataset:
    """Features `w` and `n`, labels `[batch, 1]`."""
    features = {"w": WORDS, "n": NUMBERS}
    return tf.data.Dataset.from_tensor_slices((features, [[number] for number in NUMBERS])).batch(2).repeat()


def words_once() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors({"w": WORDS, "n": NUMBERS})


def words_model(features: Any, labels: Any, mode: str, params: Any) -> EstimatorSpec:
    """Tables from a file and from a list, an embedding, Adam, and everything that Estimator code exports.

    As much of that code does, it builds its training before it looks at the mode.
    """
    from_file = tf.lookup.TextFileInitializer(
        params["vocabulary"],
        tf.string,
        tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64,
        tf.lookup.TextFileIndex.LINE_NUMBER,
    )
    table = tf.lookup.StaticVocabularyTable(from_file, num_oov_buckets=1)
    weights = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [0.1, 0.2]), 0.0)
    embedding = v1.get_variable("embedding", [4, 2])
    kernel = v1.get_variable("kernel", [3, 1])
    net = tf.concat([tf.nn.embedding_lookup(embedding, table.lookup(features["w"])), features["n"][:, None]], 1)
    y = net @ kernel + weights.lookup(features["w"])[:, None] + SHIFT
    loss = tf.reduce_mean(tf.square(y - (0.0 if labels is None else labels)))
    train_op = v1.train.AdamOptimizer(0.1).minimize(loss, v1.train.get_global_step())
    probabilities = tf.concat([1 - tf.sigmoid(y), tf.sigmoid(y)], 1)
    classes = tf.tile([["no", "yes"]], [tf.shape(y)[0], 1])
    outputs = {
        "serving_default": ClassificationOutput(probabilities, classes),
        "regress": RegressionOutput(y),
        "predict": PredictOutput({"y": y, "class": classes[:, 1]}),
    }
    metrics = {} if labels is None else {"mae": v1.metrics.mean_absolute_error(labels, y), "bias": (y - labels)[:, 0]}
    return EstimatorSpec(
        mode, predictions={"y": y}, loss=loss, train_op=train_op, eval_metric_ops=metrics, export_outputs=outputs
    )


def raw_receiver() -> Any:
    """Requests hold the features; what they are answered with is `y`."""
    specs = {"w": tf.TensorSpec([None], tf.string), "n": tf.TensorSpec([None])}
    return build_raw_serving_input_receiver_fn(specs)


def trained_words(folder: Path, journal: Any = None) -> Estimator:
    """`words_model` after four steps, whose vocabulary is a file in `folder`."""
    vocabulary = folder / "words.txt"
    vocabulary.write_text("a\nb\nc\n")
    params = {"vocabulary": str(vocabulary)}
    config = RunConfig(tensorboard=False)
    estimator = Estimator(words_model, folder / "model", config, params, journal=journal)
    return estimator.train(words_input, steps=4)


def examples() -> list[tf.train.Example]:
    """WORDS and NUMBERS."""

    def feature(**value: Any) -> tf.train.Feature:
        return tf.train.Feature(**{kind: getattr(tf.train, name)(value=[one]) for kind, (name, one) in value.items()})

    return [
        tf.train.Example(
            features=tf.train.Features(
                feature={
                    "w": feature(bytes_list=("BytesList", word.encode())),
                    "n": feature(float_list=("FloatList", number)),
                }
            )
        )
        for word, number in zip(WORDS, NUMBERS, strict=True)
    ]


def predicted(estimator: Estimator, input_fn: Any, key: str | None = "y") -> np.ndarray:
    """What `predict` gives, one row an example."""
    return np.stack([one if key is None else one[key] for one in estimator.predict(input_fn)])


def loaded_by(card: Path) -> Any:
    """What the lines of a model card leave in `answer`; the current folder is that of the card."""
    (lines,) = re.findall(r"^```python\n(.*?)^```$", card.read_text(), re.DOTALL | re.MULTILINE)
    assert len(lines.splitlines()) == 3
    found: dict[str, Any] = {}
    exec(lines, found)
    return found["answer"]
