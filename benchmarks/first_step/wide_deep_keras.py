"""The job of wide_deep.py with a Keras 3 model: StringLookup, Hashing, HashedCrossing and Embedding layers, `fit`.

    python wide_deep_keras.py KIND FOLDER TRAIN_STEPS EVAL_STEPS PREDICT_STEPS STARTED

Keras has one optimizer for the whole model: Adagrad.
"""

import os
import sys
import tempfile

import keras
import tensorflow as tf
from wide_deep import HASHED, IDS, NUMBERS, WORDS, now, read, say

layers = keras.layers


class FirstSteps(keras.callbacks.Callback):
    """Notes when 100 steps have been taken."""

    now = None

    def on_train_batch_end(self, batch, logs=None):
        if batch + 1 >= 100 and self.now is None:
            self.now = now()


def data(*arguments):
    """Return the data of the other script; Keras does not find its inputs in an OrderedDict."""
    return read(*arguments).map(lambda features, label: (dict(features), label))


def build():
    strings = [*WORDS, *HASHED]
    inputs = {
        **{name: keras.Input([], name=name) for name in NUMBERS},
        **{name: keras.Input([], name=name, dtype="string") for name in strings},
        **{name: keras.Input([], name=name, dtype="int64") for name in IDS},
    }
    words = {
        name: layers.StringLookup(vocabulary=[f"{name}_{i}" for i in range(size)])(inputs[name])
        for name, size in WORDS.items()
    }
    hashed = {name: layers.Hashing(size)(inputs[name]) for name, size in HASHED.items()}
    ids = {name: layers.Identity(dtype="int64")(inputs[name]) for name in IDS}
    buckets = layers.Discretization([-1.0, -0.5, 0.0, 0.5, 1.0])(inputs["n0"])
    crossed = {
        ("c0", "c1"): layers.HashedCrossing(200)((inputs["c0"], inputs["c1"])),
        ("c1", "c3"): layers.HashedCrossing(10_000)((inputs["c1"], inputs["c3"])),
        ("n0", "c2"): layers.HashedCrossing(300)((buckets, inputs["c2"])),
    }
    sizes = {**{name: size + 1 for name, size in WORDS.items()}, **HASHED, **IDS}
    sizes |= {("c0", "c1"): 200, ("c1", "c3"): 10_000, ("n0", "c2"): 300}
    categories = {**words, **hashed, **ids, **crossed}
    wide = layers.Add()(
        [layers.Embedding(sizes[name], 1, embeddings_initializer="zeros")(one) for name, one in categories.items()]
    )
    numbers = [layers.Reshape([1])(inputs[name]) for name in NUMBERS]
    one_hot = [layers.CategoryEncoding(sizes[name], output_mode="one_hot")(one) for name, one in words.items()]
    vectors = [layers.Embedding(sizes[name], 16)(one) for name, one in {**hashed, **ids}.items()]
    deep = layers.Concatenate()([*numbers, *one_hot, *vectors])
    for units in (128, 64):
        deep = layers.Dense(units, "relu")(deep)
    logits = layers.Add()([layers.Dense(1)(deep), wide])
    return keras.Model(inputs, layers.Activation("sigmoid")(logits))


def main():
    kind, folder, *steps, started = sys.argv[1:]
    train_steps, eval_steps, predict_steps = map(int, steps)
    times = [now()]
    say("start", (float(started), 0.0), times[-1])
    keras.utils.set_random_seed(1)
    model = build()
    model.compile(
        keras.optimizers.Adagrad(0.05), "binary_crossentropy", metrics=[keras.metrics.AUC(name="auc"), "accuracy"]
    )
    first = FirstSteps()
    model.fit(data(folder, kind, "train", True), steps_per_epoch=train_steps, callbacks=[first], verbose=0)
    model.save(os.path.join(tempfile.mkdtemp(), "model.keras"))
    times.append(now())
    say("first 100 steps", times[-2], first.now or times[-1])
    say("train", times[-2], times[-1])
    metrics = model.evaluate(data(folder, kind, "eval", False), steps=eval_steps, verbose=0)
    times.append(now())
    say("evaluate", times[-2], times[-1])
    features = data(folder, kind, "eval", False).take(predict_steps).map(lambda features, _: features)
    predicted = sum(1 for _ in model.predict(features, verbose=0))
    times.append(now())
    say("predict", times[-2], times[-1])
    model.export(tempfile.mkdtemp(), verbose=False)
    times.append(now())
    say("export", times[-2], times[-1])
    print(predicted, metrics, tf.__version__, file=sys.stderr)


if __name__ == "__main__":
    main()
