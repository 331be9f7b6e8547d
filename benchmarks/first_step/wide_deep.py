"""A recommender's job as users of tf.estimator wrote it: train, evaluate, predict and export a wide and deep model.

    python wide_deep.py KIND FOLDER TRAIN_STEPS EVAL_STEPS PREDICT_STEPS STARTED

Runs as it stands on TensorFlow 2.15, and as `python -m runner.classic wide_deep.py ...` on today's. FOLDER has the data
of benchmarks/wide_deep.py; KIND is csv, tfrecord or, here only, input=csv; STARTED is when the process was started.
"""

import logging
import os
import sys
import tempfile
import time

import tensorflow as tf

NUMBERS = [f"n{i}" for i in range(6)]
WORDS = {"c0": 10, "c1": 20, "c2": 50}  # in a vocabulary
HASHED = {"c3": 1_000, "c4": 5_000, "c5": 10_000, "c6": 50_000}
IDS = {"c7": 100}
BATCH = 128


class FirstSteps(logging.Handler):
    """Notes when the log has the loss of step 100."""

    now = None

    def emit(self, record):
        if self.now is None and "step = 100 " in record.getMessage():
            self.now = now()


def now():
    return time.time(), time.process_time()


def say(phase, before, after):
    print(f"{phase} took {after[0] - before[0]} s, {after[1] - before[1]} s of CPU", flush=True)


def columns():
    fc = tf.feature_column
    numbers = [fc.numeric_column(name) for name in NUMBERS]
    words = [
        fc.categorical_column_with_vocabulary_list(name, [f"{name}_{i}" for i in range(size)])
        for name, size in WORDS.items()
    ]
    hashed = [fc.categorical_column_with_hash_bucket(name, size) for name, size in HASHED.items()]
    ids = [fc.categorical_column_with_identity(name, size) for name, size in IDS.items()]
    buckets = fc.bucketized_column(numbers[0], [-1.0, -0.5, 0.0, 0.5, 1.0])
    crossed = [
        fc.crossed_column(["c0", "c1"], 200),
        fc.crossed_column(["c1", "c3"], 10_000),
        fc.crossed_column([buckets, "c2"], 300),
    ]
    deep = [fc.indicator_column(one) for one in words] + [fc.embedding_column(one, 16) for one in hashed + ids]
    return [*words, *hashed, *ids, *crossed], [*numbers, *deep]


def spec():
    names = [*WORDS, *HASHED]
    return {
        **{name: tf.io.FixedLenFeature([], tf.float32) for name in NUMBERS},
        **{name: tf.io.FixedLenFeature([], tf.string) for name in names},
        **{name: tf.io.FixedLenFeature([], tf.int64) for name in IDS},
    }


def read(folder, kind, part, train):
    passes = {"num_epochs": None if train else 1, "shuffle": train, "shuffle_seed": 1}
    if kind == "csv":
        defaults = [0.0] * len(NUMBERS) + [""] * (len(WORDS) + len(HASHED)) + [0] * (len(IDS) + 1)
        return tf.data.experimental.make_csv_dataset(
            os.path.join(folder, f"{part}.csv"), BATCH, column_defaults=defaults, label_name="label", **passes
        )
    if kind == "input=csv":
        from input_fns.csv import input_fn

        names = [*NUMBERS, *WORDS, *HASHED, *IDS]
        dtypes = {name: "string" for name in names} | dict.fromkeys(NUMBERS, "float32") | {"c7": "int64"}
        params = {"files": os.path.join(folder, f"{part}.csv"), "columns": {**dtypes, "label": "int64"}}
        return input_fn("train" if train else "eval", {**params, "label": "label", "batch_size": BATCH})
    return tf.data.experimental.make_batched_features_dataset(
        os.path.join(folder, f"{part}.tfrecord"),
        BATCH,
        {**spec(), "label": tf.io.FixedLenFeature([], tf.int64)},
        label_key="label",
        **passes,
    )


def main():
    kind, folder, *steps, started = sys.argv[1:]
    train_steps, eval_steps, predict_steps = map(int, steps)
    times = [now()]
    say("start", (float(started), 0.0), times[-1])
    tf.get_logger().setLevel(logging.INFO)
    tf.get_logger().handlers[:] = [first := FirstSteps()]
    wide, deep = columns()
    estimator = tf.estimator.DNNLinearCombinedClassifier(
        tempfile.mkdtemp(),
        linear_feature_columns=wide,
        dnn_feature_columns=deep,
        dnn_hidden_units=[128, 64],
        config=tf.estimator.RunConfig(tf_random_seed=1),
    )
    estimator.train(lambda: read(folder, kind, "train", True), steps=train_steps)
    times.append(now())
    say("first 100 steps", times[-2], first.now or times[-1])
    say("train", times[-2], times[-1])
    metrics = estimator.evaluate(lambda: read(folder, kind, "eval", False), steps=eval_steps)
    times.append(now())
    say("evaluate", times[-2], times[-1])
    predicted = sum(1 for _ in estimator.predict(lambda: read(folder, kind, "eval", False).take(predict_steps)))
    times.append(now())
    say("predict", times[-2], times[-1])
    features = tf.feature_column.make_parse_example_spec([*wide, *deep])
    receiver = tf.estimator.export.build_parsing_serving_input_receiver_fn(features)
    estimator.export_saved_model(tempfile.mkdtemp(), receiver)
    times.append(now())
    say("export", times[-2], times[-1])
    print(predicted, sorted(metrics.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
