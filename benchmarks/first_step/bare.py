"""One training step without the runner, as short as possible: `python bare.py digits|deep`.

Data, layers, loss and Adam are those of the model_fn of that name. The layers are built before the trace, because
variables that are made inside a tf.function cause a second trace.

Prints when the step ended (seconds since 1970) and this process's CPU seconds until then.
"""

import os
import sys
import time

import deep
import keras
import tensorflow as tf

from input_fns.digits import input_fn

dataset = input_fn("train", {"batch_size": 64, "shuffle_seed": 1})


def digits_layers():
    return [
        keras.layers.Conv2D(32, 3, padding="same", activation="relu", name="conv1"),
        keras.layers.Conv2D(32, 3, padding="same", activation="relu", name="conv2"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu", name="hidden"),
        keras.layers.Dense(10, name="logits"),
    ]


def digits_loss(logits, labels):
    targets = tf.one_hot(labels, 10) * 0.9 + 0.1 / 10
    return tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=logits)


if sys.argv[1] == "digits":
    layers, loss_of, rate = digits_layers(), digits_loss, keras.optimizers.schedules.CosineDecay(0.002, 1000)
else:
    layers, loss_of, rate = deep.layers(), deep.loss_of, 0.001
shape = (None, 8, 8, 1)
for layer in layers:
    layer.build(shape)
    shape = layer.compute_output_shape(shape)
variables = [variable for layer in layers for variable in layer.trainable_variables]
optimizer = keras.optimizers.Adam(rate)
optimizer.build(variables)


@tf.function
def step(iterator):
    features, labels = next(iterator)
    with tf.GradientTape() as tape:
        x = features["image"]
        for layer in layers:
            x = layer(x)
        loss = tf.reduce_mean(loss_of(x, labels))
    optimizer.apply(tape.gradient(loss, [variable.value for variable in variables]), variables)
    return loss


step(iter(dataset)).numpy()
print(time.time(), sum(os.times()[:2]))
