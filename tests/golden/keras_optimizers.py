"""model_to_estimator with the optimizers of Keras that only models of Keras were trained with: one model each."""

from __future__ import annotations

import tensorflow

from tests.golden import data, keras_model

keras = keras_model.keras
input_fn = keras_model.input_fn

MAKERS = {
    "adadelta": lambda: keras.optimizers.Adadelta(0.5, rho=0.9),
    "adamax": lambda: keras.optimizers.Adamax(0.05, beta_1=0.8),
    "amsgrad": lambda: keras.optimizers.Adam(0.05, beta_2=0.9, amsgrad=True),
    "centered": lambda: keras.optimizers.RMSprop(0.01, centered=True),
    # Without clipnorm: Keras 2 counted each occurrence of an id in a batch by itself. Here it sees their sum, on any
    # number of replicas.
    "centered_momentum": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True),
}


def model(name):
    amount, kind = keras.Input([4], name="amount"), keras.Input([1], name="kind", dtype="int64")
    start = keras.initializers.Constant(data.numbers(4, 3))
    hidden = keras.layers.Dense(3, activation="tanh", name="hidden", kernel_initializer=start)(amount)
    vectors = keras.layers.Flatten(name="flat")(keras.layers.Embedding(5, 2, name="kinds")(kind))
    together = keras.layers.concatenate([hidden, vectors], name="together")
    made = keras.Model([amount, kind], keras.layers.Dense(1, name="y")(together))
    made.compile(MAKERS[name](), "mse", metrics=["mae"])
    return made


def estimator(name, model_dir):
    config = tensorflow.estimator.RunConfig(model_dir, save_checkpoints_steps=5, keep_checkpoint_max=None)
    return tensorflow.keras.estimator.model_to_estimator(model(name), config=config)
