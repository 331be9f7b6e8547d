"""What `check` says of whole programs, of the kinds that were public from 2016 to 2021, beside what happens in them.

Each is a program as people wrote it, not a construct: what stops it is one of the things that Python, NumPy or
TensorFlow removed, or an iterator where a list was.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.classic.compat.test_classic_check_score import RUNS, STOPS, happens, said

HEAD = """
from __future__ import absolute_import, division, print_function
import tensorflow as tf
import numpy as np
tf.logging.set_verbosity(tf.logging.ERROR)
"""

IRIS = (
    HEAD
    + """
NAMES = ["SepalLength", "SepalWidth"]
def train_input_fn(features, labels, batch_size):
    dataset = tf.data.Dataset.from_tensor_slices((dict(features), labels))
    return dataset.shuffle(10).repeat().batch(batch_size)
x = {name: np.array([1.0, 2.0, 3.0, 4.0], np.float32) for name in NAMES}
y = np.array([0, 1, 2, 0])
@columns
@before
classifier = tf.estimator.DNNClassifier(feature_columns=columns, hidden_units=@units, n_classes=3)
classifier.train(input_fn=lambda: train_input_fn(x, y, 2), steps=2)
print("accuracy: {accuracy:0.3f}".format(**classifier.evaluate(lambda: train_input_fn(x, y, 2), steps=1)))
"""
)


def iris(columns: str = "[tf.feature_column.numeric_column(key=key) for key in NAMES]", **parts: str) -> str:
    text = IRIS.replace("@columns", f"columns = {columns}").replace("@units", parts.get("units", "[4, 4]"))
    return text.replace("@before", parts.get("before", ""))


CENSUS = (
    HEAD
    + """
import os
CSV_COLUMNS = ["age", "workclass", "education", "income"]
DEFAULTS = [[0.0], [""], [""], [0.0]]
@names
with open("census.csv", "w") as f:
    f.write("39,Private,Bachelors,0\\n50,State-gov,Masters,1\\n")
def parse_csv(line):
    columns = tf.decode_csv(line, record_defaults=DEFAULTS)
    features = dict(zip(@used, columns))
    label = features.pop("income")
    return features, label
def input_fn(files, epochs):
    return tf.data.TextLineDataset(files).map(parse_csv@map).repeat(epochs).batch(2)
age = tf.feature_column.numeric_column("age")
work = tf.feature_column.categorical_column_with_vocabulary_list("workclass", ["Private", "State-gov"])
education = tf.feature_column.categorical_column_with_hash_bucket("education", 10)
crossed = tf.feature_column.crossed_column(["workclass", "education"], 10)
model = tf.estimator.DNNLinearCombinedClassifier(
    model_dir="census", linear_feature_columns=[work, education, crossed],
    dnn_feature_columns=[age, tf.feature_column.indicator_column(work)], dnn_hidden_units=[4])
for n in range(2):
    model.train(lambda: input_fn("census.csv", 2))
    results = model.evaluate(lambda: input_fn("census.csv", 1))
    for key in sorted(results):
        print("%s: %s" % (key, results[key]))
"""
)


def census(names: str = "", used: str = "CSV_COLUMNS", map: str = "") -> str:
    return CENSUS.replace("@names", names).replace("@used", used).replace("@map", map)


CUSTOM = (
    HEAD
    + """
@imports
class Model(object):
    def __init__(self, hidden):
        self.hidden = hidden
    def logits(self, x):
        for units in self.hidden:
            x = tf.layers.dense(x, units, activation=tf.nn.relu)
        return tf.layers.dense(x, 2)
def model_fn(features, labels, mode, params):
    x = tf.reshape(features["x"], [-1, 4])
    @body
    logits = Model(@hidden).logits(x)
    predictions = {"class": tf.argmax(logits, 1), "probabilities": tf.nn.softmax(logits)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions=predictions)
    loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
    if mode == tf.estimator.ModeKeys.EVAL:
        accuracy = tf.metrics.accuracy(labels, predictions["class"])
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops={"accuracy": accuracy})
    optimizer = tf.train.AdamOptimizer(params["learning_rate"])
    train_op = optimizer.minimize(loss, global_step=tf.train.get_global_step())
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
@data
def main(unused_argv):
    @main
    estimator = tf.estimator.Estimator(model_fn, "custom", params=@params)
    input_fn = @input_fn
    estimator.train(input_fn, steps=3)
    print(estimator.evaluate(input_fn, steps=1))
    print(next(estimator.predict(input_fn))["class"])
main(None)
"""
)
NUMPY_INPUT = "tf.estimator.inputs.numpy_input_fn({'x': images}, labels, batch_size=2, num_epochs=None, shuffle=False)"
IMAGES = "images = np.arange(16).reshape(4, 4).astype(np.float32)\nlabels = np.array([0, 1, 0, 1])"


def custom(**parts: str) -> str:
    text = CUSTOM
    given = {
        "imports": "", "body": "", "hidden": "params['hidden']", "data": IMAGES, "main": "pass",
        "params": "{'hidden': [4], 'learning_rate': 0.1}", "input_fn": NUMPY_INPUT, **parts,
    }  # fmt: skip
    for name, value in given.items():
        indent = "\n" + " " * (4 if name in ("body", "main") else 0)
        text = text.replace(f"@{name}\n", value.replace("\n", indent) + "\n").replace(f"@{name}", value)
    return text


CONTRIB_DATA = (
    HEAD
    + """
@imports
with open("data.txt", "w") as f:
    f.write("x,y\\n1,2\\n3,4\\n")
def input_fn():
    def decode(line):
        x, y = tf.decode_csv(line, [[0.0], [0.0]])
        return {"x": x}, y
    dataset = @dataset
    return dataset.make_one_shot_iterator().get_next()
regressor = tf.estimator.LinearRegressor([tf.feature_column.numeric_column("x")], model_dir="linear")
regressor.train(input_fn, steps=2)
"""
)


def contrib_data(dataset: str, imports: str = "") -> str:
    return CONTRIB_DATA.replace("@imports", imports).replace("@dataset", dataset)


PROGRAMS: dict[str, tuple[str, str]] = {
    # premade estimators
    "iris": (RUNS, iris()),
    "columns of a map": (STOPS, iris("map(tf.feature_column.numeric_column, NAMES)")),
    "columns of a generator": (STOPS, iris("(tf.feature_column.numeric_column(key=key) for key in NAMES)")),
    "columns of a dict's values": (
        RUNS, iris("{key: tf.feature_column.numeric_column(key=key) for key in NAMES}.values()"),
    ),
    "columns that a function makes": (
        STOPS,
        iris(
            "build_columns(NAMES)",
        ).replace("def train_input_fn", "def build_columns(names):\n"
                  "    return filter(None, [tf.feature_column.numeric_column(key) for key in names])\n"
                  "def train_input_fn"),
    ),
    "units of a flag": (STOPS, iris(units="map(int, '8,4'.split(','))")),
    "units of a flag as a list": (RUNS, iris(units="list(map(int, '8,4'.split(',')))")),
    "keys that are shuffled": (STOPS, iris(before="import random\nrandom.shuffle(x.keys())")),
    "a vocabulary of keys": (
        RUNS, iris(before="vocabulary = {'a': 1, 'b': 2}\n"
                   "tf.feature_column.categorical_column_with_vocabulary_list('w', vocabulary.keys())"),
    ),
    "words by their frequency": (
        RUNS, iris(before="import collections\n"
                   "counts = collections.Counter('a b a'.split())\n"
                   "words, _ = zip(*sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])))\n"
                   "ids = dict(zip(words, range(len(words))))"),
    ),
    "words by their frequency in Python 2": (
        STOPS, iris(before="counts = {'a': 2, 'b': 1}\n"
                    "words = counts.items()\nwords.sort(lambda a, b: b[1] - a[1])"),
    ),
    # wide and deep
    "census": (RUNS, census()),
    "names of a list": (RUNS, census("NAMES = [name for name in CSV_COLUMNS if name]", "NAMES")),
    "names that are filtered once": (STOPS, census("NAMES = filter(None, CSV_COLUMNS)", "NAMES")),
    "names of a generator": (STOPS, census("NAMES = (name for name in CSV_COLUMNS)", "NAMES")),
    "threads of contrib's map": (STOPS, census(map=", num_threads=4, output_buffer_size=100")),
    # model functions
    "a model of one's own": (RUNS, custom()),
    "params of a map": (RUNS, custom(params="{'hidden': map(int, ['4']), 'learning_rate': 0.1}")),
    "params of a map that is counted": (
        STOPS, custom(params="{'hidden': map(int, ['4']), 'learning_rate': 0.1}", body="depth = len(params['hidden'])"),
    ),
    "params of a map that is read twice": (
        STOPS,
        custom(
            main="params = {'hidden': map(int, ['4', '4']), 'learning_rate': 0.1}",
            params="params",
            body="sizes = [int(units) for units in params['hidden']]\nassert max(params['hidden']) == 4",
        ),
    ),
    "params of a dict's values": (STOPS, custom(params="{'hidden': {'a': 4}.values(), 'learning_rate': 0.1}")),
    "params of a generator": (STOPS, custom(params="{'hidden': (n for n in [4]), 'learning_rate': 0.1}")),
    "a map of the module": (
        STOPS, custom(data=f"{IMAGES}\nHIDDEN = map(int, '4,4'.split(','))", hidden="HIDDEN",
                      body="assert list(HIDDEN), 'empty'"),
    ),
    "arguments of a function": (STOPS, custom(imports="import inspect", main="inspect.getargspec(model_fn)")),
    "arguments of a function in Python 3": (
        RUNS, custom(imports="import inspect", main="assert 'mode' in inspect.getfullargspec(model_fn).args"),
    ),
    "an ABC of collections": (
        STOPS, custom(imports="import collections", body="assert not isinstance(x, collections.Iterator)"),
    ),
    "an ABC of collections.abc": (
        RUNS, custom(imports="import collections.abc", body="assert not isinstance(x, collections.abc.Iterator)"),
    ),
    "an ABC for two Pythons": (
        RUNS,
        custom(imports="try:\n  from collections import Mapping\nexcept ImportError:\n  Mapping = dict"),
    ),
    "a clock": (STOPS, custom(imports="import time", main="start = time.clock()")),
    "an encoding": (STOPS, custom(imports="import sys\nsys.setdefaultencoding('utf8')")),
    "an encoding for Python 2": (
        RUNS, custom(imports="import sys\nif sys.version_info[0] < 3:\n  sys.setdefaultencoding('utf8')"),
    ),
    "a type of NumPy": (STOPS, custom(data=IMAGES.replace("np.float32", "np.float"))),
    "arrays of a map": (STOPS, custom(main="np.concatenate(map(np.array, [[1.0], [2.0]]))")),
    "a tensor of a map": (STOPS, custom(body="tf.stack(map(tf.to_float, [1, 2]))")),
    "an array of a frame": (
        STOPS, custom(imports="import pandas as pd", main="pd.DataFrame({'x': [1.0]}).as_matrix()"),
    ),
    "rows of a frame": (
        STOPS, custom(imports="import pandas as pd", main="pd.DataFrame({'x': [1.0]}).ix[0]"),
    ),
    "a frame": (
        RUNS,
        custom(
            imports="import pandas as pd",
            data=IMAGES + "\nframe = pd.DataFrame({'x': [1.0] * 16})\n"
            "images = frame['x'].values.reshape(4, 4).astype(np.float32)",
        ),
    ),
    "a module of scikit-learn": (STOPS, custom(imports="from sklearn.cross_validation import train_test_split")),
    "a module of scikit-learn today": (RUNS, custom(imports="from sklearn.model_selection import train_test_split")),
    "an image of SciPy": (STOPS, custom(imports="import scipy.misc", main="scipy.misc.imresize(images, (2, 2))")),
    "a binary file of csv": (
        STOPS,
        custom(imports="import csv", main="open('a.csv', 'w').write('1,2')\nlist(csv.reader(open('a.csv', 'rb')))"),
    ),
    "a text file of csv": (
        RUNS, custom(imports="import csv", main="open('a.csv', 'w').write('1,2')\nlist(csv.reader(open('a.csv')))"),
    ),
    "a pickle in a text file": (
        STOPS, custom(imports="import pickle", main="pickle.dump(labels, open('a.pkl', 'w'))"),
    ),
    "an iterator class of Python 2": (
        STOPS,
        custom(
            data=f"{IMAGES}\nclass Batches(object):\n  def __iter__(self):\n    return self\n"
            "  def next(self):\n    return images, labels",
            main="for batch in Batches():\n  break",
        ),
    ),
    "clusters of contrib": (STOPS, custom(main="tf.contrib.factorization.KMeansClustering(2)")),
    "layers of contrib by a name": (
        RUNS, custom(imports="layers = tf.contrib.layers", body="x = layers.fully_connected(x, 4)"),
    ),
    "layers that contrib has not": (
        STOPS, custom(imports="lib = tf.contrib\nlayers = lib.layers", body="x = layers.fully_conected(x, 4)"),
    ),
    "layers that an object holds": (
        STOPS,
        custom(imports="class Nets(object):\n  pass\nnets = Nets()\nnets.layers = tf.contrib.layers",
               body="x = nets.layers.fully_conected(x, 4)"),
    ),
    "layers by getattr": (STOPS, custom(body="x = getattr(tf.contrib, 'layers').fully_conected(x, 4)")),
    "layers by a default": (
        STOPS, custom(data=f"{IMAGES}\ndef net(x, layers=tf.contrib.layers):\n  return layers.fully_conected(x, 4)",
                      body="x = net(x)"),
    ),
    # datasets of contrib
    "a dataset of contrib": (
        RUNS, contrib_data("tf.contrib.data.TextLineDataset(['data.txt']).skip(1).map(decode).repeat().batch(2)"),
    ),
    "a dataset of contrib by a name": (
        RUNS, contrib_data("d.TextLineDataset('data.txt').skip(1).map(decode).repeat().batch(2)",
                           "from tensorflow.contrib import data as d"),
    ),
    "a dataset that contrib has not": (
        STOPS, contrib_data("d.CSVDataset('data.txt').skip(1).batch(2)", "from tensorflow.contrib import data as d"),
    ),
    "features that contrib read": (
        STOPS, contrib_data("d.data.read_batch_features('data.txt', 2, {}, tf.TFRecordReader)", "d = tf.contrib"),
    ),
    "a method that datasets had": (
        STOPS, contrib_data("tf.contrib.data.TextLineDataset('data.txt').dense_to_sparse_batch(2, [2])"),
    ),
    "a method of a dataset with a name": (
        STOPS, contrib_data("tf.data.TextLineDataset('data.txt')\n    dataset = dataset.skip(1)\n"
                            "    dataset = dataset.map(decode)\n    dataset = dataset.batch_and_drop_remainder(2)"),
    ),
    "a name that gfile has not, beside a URL": (
        STOPS, contrib_data("tf.data.TextLineDataset('data.txt').skip(1).map(decode).batch(2)",
                            "tf.io.gfile.Open if 'gs://bucket' else None"),
    ),
    "an argument of shuffle": (
        STOPS, contrib_data("tf.data.TextLineDataset('data.txt').skip(1).map(decode).shuffle(size=2).batch(2)"),
    ),
}  # fmt: skip
"""Name -> (what happens, the program)."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_check_says_of_a_program_happens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, text = PROGRAMS[name]
    assert said(text, tmp_path / "script.py") == expected, "what check says"
    assert happens(text, tmp_path, monkeypatch) == expected, "what happens"
