"""Tiles of three photographs as TFRecord files of PNGs: real pictures without a download. The class is the photograph.

The photographs come with scikit-learn (a temple in China, a flower) and with matplotlib (Grace Hopper).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib.cbook
import matplotlib.image
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_sample_image

from input_fns import tfrecord

SIZE = 32
NUM_FILES = {"train": 4, "eval": 1}


def input_fn(
    mode: str,
    params: Mapping[str, Any],
    config: Any = None,
    input_context: tf.distribute.InputContext | None = None,
    num_epochs: int | None = None,
) -> tf.data.Dataset:
    """Return batches of ({"image": float32 `[batch, 32, 32, 3]` in 0..1}, labels int64 `[batch]`: the photograph,
    0..2).

    TRAIN reads the left third of each photograph, shuffled anew each epoch, and never ends; EVAL and PREDICT are one
    pass of the other two thirds. PREDICT has no labels. Missing files are written first.

    Args:
      num_epochs: number of passes in TRAIN (train.max_epochs); None: no limit.

    Params:
      folder: folder of the files.
      batch_size, shuffle_seed, batch_across_epochs, shuffle_buffer: as for input_fns.tfrecord.
    """
    files = write_files(params["folder"], "train" if mode == "train" else "eval")
    features = {"image": "string", "label": "int64"}
    reading = {**params, "files": files, "features": features, "label": "label"}

    def decode(features: dict[str, tf.Tensor], *label: tf.Tensor) -> Any:
        pixels = tf.map_fn(tf.io.decode_png, features["image"], fn_output_signature=tf.uint8)
        images = {"image": tf.reshape(tf.cast(pixels, tf.float32) / 255.0, [-1, SIZE, SIZE, 3])}
        return (images, *label) if label else images

    batches = tfrecord.input_fn(mode, reading, config, input_context, num_epochs)
    return batches.map(decode, num_parallel_calls=2, deterministic=True).prefetch(2)


def write_files(folder: str, part: str) -> list[str]:
    """Write the missing TFRecord files of a part, train or eval, and return the paths of all."""
    paths = [Path(folder) / f"{part}-{number}.tfrecord" for number in range(NUM_FILES[part])]
    if not all(path.exists() for path in paths):
        Path(folder).mkdir(parents=True, exist_ok=True)
        examples = list(_examples(part))
        for number, path in enumerate(paths):
            # Write beside it and rename, so that a worker that starts at the same time never reads half a file.
            half_written = f"{path}.{os.getpid()}"
            with tf.io.TFRecordWriter(half_written) as writer:
                for example in examples[number :: len(paths)]:
                    writer.write(example)
            os.replace(half_written, path)
    return [str(path) for path in paths]


def _examples(part: str) -> Iterator[bytes]:
    """Yield a serialized tf.train.Example for each tile."""
    hopper = matplotlib.image.imread(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    for label, photo in enumerate([load_sample_image("china.jpg"), load_sample_image("flower.jpg"), hopper]):
        border = photo.shape[1] // 3 // SIZE * SIZE
        side = photo[:, :border] if part == "train" else photo[:, border:]
        for top in range(0, side.shape[0] - SIZE + 1, SIZE):
            for left in range(0, side.shape[1] - SIZE + 1, SIZE):
                png = tf.io.encode_png(np.ascontiguousarray(side[top : top + SIZE, left : left + SIZE])).numpy()
                feature = {
                    "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[png])),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                yield tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
