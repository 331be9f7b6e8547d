"""A user's own project: a CNN, its data in files, one experiment. `write_project` puts it into an empty folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

MODEL = '''
"""A small CNN for images of 8x8."""

import keras
import tensorflow as tf

import runner
from runner import EstimatorSpec


def model_fn(features, labels, mode, params):
    images = features["image"]
    x = keras.layers.Conv2D(params.filters, 3, padding="same", activation="relu", name="conv")(images)
    x = keras.layers.MaxPooling2D(2)(x)
    logits = keras.layers.Dense(10, name="logits")(keras.layers.Flatten()(x))
    probabilities = tf.nn.softmax(logits)
    digit = tf.argmax(logits, axis=1)
    if mode == "infer":
        return EstimatorSpec(mode, predictions={"digit": digit, "probabilities": probabilities})
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    runner.log({"confidence": tf.reduce_max(probabilities, axis=1)}, on_progress=True)
    if mode == "train":
        tf.summary.image("digits", tf.image.resize(images, [96, 96], "nearest"), max_outputs=3)
    rate = keras.optimizers.schedules.CosineDecay(params.learning_rate, params.decay_steps)
    accuracy = tf.cast(tf.equal(digit, labels), tf.float32)
    optimizer = keras.optimizers.Adam(rate)
    return EstimatorSpec(mode, loss=losses, optimizer=optimizer, eval_metric_ops={"accuracy": accuracy})
'''
INPUT = '''
"""Images and their digits, of an .npz file."""

import numpy as np
import tensorflow as tf


def input_fn(mode, params):
    with np.load(params.path) as file:
        images, labels = file["images"], file["labels"]
    features = {"image": images}
    data = tf.data.Dataset.from_tensor_slices(features if mode == "infer" else (features, labels))
    if mode == "train":
        data = data.shuffle(len(labels), seed=params.shuffle_seed).repeat()
    return data.batch(params.batch_size)
'''
EXPERIMENT = """
# @package _global_
# My network, on my files.
defaults:
  - override /model: custom
  - override /input: custom

model:
  fn: model_fns.cnn
  params: {filters: 8, learning_rate: 0.01, decay_steps: 300}

input:
  train: {fn: input_fns.digit_files, batch_size: 32, params: {path: data/train.npz, shuffle_seed: 1}}
  eval: {fn: input_fns.digit_files, batch_size: 100, params: {path: data/valid.npz}}
  predict: {fn: input_fns.digit_files, batch_size: 100, params: {path: data/test.npz}}

train: {max_steps: 300, log_steps: 20, summary_steps: 100}
checkpoint:
  save_steps: 100
  keep_best: {metric: eval/accuracy}
"""


def write_project(home: Path) -> None:
    """Write model, input, experiment and data; `home` is empty before."""
    for path, text in (
        ("model_fns/cnn.py", MODEL),
        ("input_fns/digit_files.py", INPUT),
        ("conf/experiment/cnn.yaml", EXPERIMENT),
    ):
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(text.lstrip())
    (home / "data").mkdir()
    digits = load_digits()
    order = np.random.RandomState(0).permutation(len(digits.target))
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int64)
    for name, rows in (("train", order[:1100]), ("valid", order[1100:1400]), ("test", order[1400:])):
        np.savez(home / "data" / f"{name}.npz", images=images[rows], labels=labels[rows])
