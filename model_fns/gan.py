"""A generative adversarial network: two networks, two losses, two optimizers in one step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import runner
from runner import EstimatorSpec, ModeKeys, Params

tf1 = tf.compat.v1


def model_fn(features: dict[str, tf.Tensor], labels: tf.Tensor, mode: str, params: Params) -> EstimatorSpec:
    """Train a generator of images, and a discriminator that tells them from real ones.

    Args:
      features: `image` float32 `[batch, 8, 8, 1]` in 0..1.
      labels: ignored.
      mode: one of ModeKeys.
      params: noise (length of the vector from which an image is generated), learning_rate, beta_1.
    """
    real, is_training = features["image"], mode == ModeKeys.TRAIN
    generator, discriminator = _generator(), _discriminator()
    with tf.GradientTape(persistent=True) as tape:
        fake = generator(tf.random.normal([tf.shape(real)[0], params.noise]))
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions={"image": fake})
        of_real, of_fake = discriminator(real, training=is_training), discriminator(fake, training=is_training)
        # The discriminator learns to output 1 for real images and 0 for fake ones; the generator, to make it output 1.
        discriminator_loss = (_cross_entropy(1.0, of_real) + _cross_entropy(0.0, of_fake)) / 2
        generator_loss = _cross_entropy(1.0, of_fake)
    if mode == ModeKeys.EVAL:
        return EstimatorSpec(mode, loss=generator_loss, eval_metric_ops={"frechet": frechet_distance(real, fake)})

    for network, loss in ((discriminator, discriminator_loss), (generator, generator_loss)):
        optimizer = keras.optimizers.Adam(params.learning_rate, params.beta_1, name=f"{network.name}_adam")
        optimizer.apply(tape.gradient(loss, network.trainable_variables), network.trainable_variables)
    tf.summary.image("samples", _samples(generator, params.noise))
    runner.log({"discriminator_loss": discriminator_loss}, on_progress=True)
    return EstimatorSpec(mode, loss=generator_loss, train_op=tf1.assign_add(tf1.train.get_global_step(), 1))


def _generator() -> keras.Sequential:
    """Return a network from noise `[batch, n]` to images `[batch, 8, 8, 1]` in 0..1."""
    layers = [
        keras.layers.Dense(128, activation="leaky_relu"),
        keras.layers.Dense(256, activation="leaky_relu"),
        keras.layers.Dense(64, activation="tanh"),  # -1..1; a sigmoid would learn more slowly
        keras.layers.Rescaling(0.5, offset=0.5),
        keras.layers.Reshape([8, 8, 1]),
    ]
    return keras.Sequential(layers, name="generator")


def _discriminator() -> keras.Sequential:
    """Return a network from images `[batch, 8, 8, 1]` in 0..1 to logits `[batch, 1]` of being real."""
    layers = [
        keras.layers.Flatten(),
        keras.layers.Rescaling(2.0, offset=-1.0),
        keras.layers.Dense(256, activation="leaky_relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(128, activation="leaky_relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1),
    ]
    return keras.Sequential(layers, name="discriminator")


def _cross_entropy(target: float, logits: tf.Tensor) -> tf.Tensor:
    targets = tf.fill(tf.shape(logits), target)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(targets, logits))


def _samples(generator: keras.Sequential, noise: int) -> tf.Tensor:
    """Return a picture `[1, 400, 400, 1]` of 100 generated images, from the same noise at every step."""
    images = generator(tf.random.stateless_normal([100, noise], seed=[0, 0]))
    framed = tf.reshape(tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]]), [10, 10, 10, 10])
    picture = tf.reshape(tf.transpose(framed, [0, 2, 1, 3]), [1, 100, 100, 1])
    return tf.image.resize(picture, [400, 400], "nearest")


def frechet_distance(real: tf.Tensor, fake: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """Return a (value, update) pair: the Fréchet distance between the pixels of real and fake images, 0 if they are
    alike.

    Heusel et al. 2017 (arXiv:1706.08500), on pixels instead of the activations of an Inception network: |m - n|^2 +
    trace(C + D - 2 (C D)^(1/2)), where m, n are the means and C, D the covariances over all examples.

    Args:
      real, fake: float `[batch, height, width, channels]`.
    """
    (m, c, update_real), (n, d, update_fake) = _moments(real), _moments(fake)
    values, vectors = tf.linalg.eigh(c)
    root = vectors * tf.sqrt(tf.maximum(values, 0.0)) @ tf.transpose(vectors)
    of_both = tf.sqrt(tf.maximum(tf.linalg.eigvalsh(root @ d @ root), 0.0))
    distance = tf.reduce_sum((m - n) ** 2) + tf.linalg.trace(c + d) - 2 * tf.reduce_sum(of_both)
    return distance, tf.group(update_real, update_fake)


def _moments(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, Any]:
    """Return (mean `[pixels]`, covariance `[pixels, pixels]`, operation that adds a batch), over all examples so
    far.
    """
    pixels = tf.reshape(images, [-1, 64])
    count = tf.cast(tf.shape(images)[0], tf.float32)
    mean, add_to_mean = tf1.metrics.mean_tensor(tf.reduce_mean(pixels, axis=0), count)
    products = tf.matmul(pixels, pixels, transpose_a=True) / count
    product, add_to_product = tf1.metrics.mean_tensor(products, count)
    return mean, product - mean[:, None] * mean, tf.group(add_to_mean, add_to_product)
