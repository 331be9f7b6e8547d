"""Attention and beam search of tf.contrib.seq2seq: numbers by numpy, names of TensorFlow 1.15."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import runner.classic  # noqa: F401

pytest.importorskip("tf_slim", reason="the extra 'classic' brings it")

RANDOM = np.random.RandomState(0)
MEMORY = RANDOM.randn(2, 3, 4).astype(np.float32)
LENGTHS = np.array([3, 2])
KERNEL, QUERY = RANDOM.randn(4, 2).astype(np.float32), RANDOM.randn(2, 2).astype(np.float32)


def softmax(scores: Any) -> Any:
    exp = np.exp(scores)
    return exp / exp.sum(-1, keepdims=True)


def attention(mechanism: str, **arguments: Any) -> tuple[Any, dict[str, Any]]:
    with tf.Graph().as_default(), tf.Session() as session:
        made = getattr(tf.contrib.seq2seq, mechanism)(2, tf.constant(MEMORY), LENGTHS, **arguments)
        alignments, _ = made(tf.constant(QUERY), None)
        session.run(tf.global_variables_initializer())
        session.run(tf.global_variables()[0].assign(KERNEL))
        return session.run((alignments, {one.op.name: one for one in tf.global_variables()}))


def test_luong_attends_by_the_product() -> None:
    alignments, variables = attention("LuongAttention", scale=True)
    assert sorted(variables) == ["luong_attention/attention_g", "memory_layer/kernel"]
    scores = np.einsum("bu,btu->bt", QUERY, MEMORY @ KERNEL)
    np.testing.assert_allclose(alignments[0], softmax(scores[0]), rtol=1e-4)
    np.testing.assert_allclose(alignments[1], [*softmax(scores[1, :2]), 0], rtol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
def test_bahdanau_attends_by_the_sum(normalize: bool) -> None:
    alignments, variables = attention("BahdanauAttention", normalize=normalize)
    more = ["attention_b", "attention_g"] if normalize else []
    names = [*more, "attention_v", "query_layer/kernel"]
    assert sorted(variables) == sorted(["memory_layer/kernel", *(f"bahdanau_attention/{name}" for name in names)])
    weights = variables["bahdanau_attention/attention_v"]
    if normalize:
        weights = weights / np.linalg.norm(weights) * np.sqrt(0.5)
    asked = QUERY @ variables["bahdanau_attention/query_layer/kernel"]
    scores = np.tanh(MEMORY @ KERNEL + asked[:, None]) @ weights
    np.testing.assert_allclose(alignments[0], softmax(scores[0]), rtol=1e-4)
    np.testing.assert_allclose(alignments[1], [*softmax(scores[1, :2]), 0], rtol=1e-4)


def test_a_decoder_with_attention_has_the_names_of_1_15() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        seq2seq = tf.contrib.seq2seq
        mechanism = seq2seq.LuongAttention(2, tf.constant(MEMORY), LENGTHS)
        cell = seq2seq.AttentionWrapper(
            tf.contrib.rnn.GRUCell(2), mechanism, attention_layer_size=5, alignment_history=True
        )
        helper = seq2seq.TrainingHelper(tf.constant(MEMORY), tf.constant([3, 3]))
        state = cell.zero_state(2, tf.float32).clone(cell_state=tf.ones([2, 2]))
        outputs, final, _ = seq2seq.dynamic_decode(seq2seq.BasicDecoder(cell, helper, state))
        variables = tf.trainable_variables()
        assert [one.op.name for one in variables] == [
            "memory_layer/kernel",
            *(f"decoder/attention_wrapper/gru_cell/{part}" for part in (
                "gates/kernel", "gates/bias", "candidate/kernel", "candidate/bias")),
            "decoder/attention_wrapper/attention_layer/kernel",
        ]  # fmt: skip
        slopes = tf.gradients(tf.reduce_sum(outputs.rnn_output), variables)
        session.run(tf.global_variables_initializer())
        made, history, last, slopes, steps = session.run(
            (outputs.rnn_output, final.alignment_history.stack(), final.attention, slopes, final.time)
        )
    assert made.shape == (2, 3, 5) and history.shape == (3, 2, 3) and steps == 3
    np.testing.assert_allclose(history.sum(-1), 1, rtol=1e-5)
    np.testing.assert_allclose(history[:, 1, 2], 0)
    np.testing.assert_allclose(made[:, -1], last, rtol=1e-6)
    assert all(np.abs(one).max() > 0 for one in slopes)


def test_a_beam_as_wide_as_all_finds_the_best_sequence() -> None:
    """Three ids of which 2 ends; the logits depend on the id before alone, so every sequence can be scored."""
    table = RANDOM.randn(3, 3).astype(np.float32)
    log_probs = np.log(softmax(table))

    def score(path: tuple[int, ...]) -> Any:
        total, before = 0.0, 0
        for one in path:
            total, before = total + log_probs[before, one], one
        return total

    everything = [
        (*path, *end)
        for length in range(4)
        for path in itertools.product((0, 1), repeat=length)
        for end in ([(2,)] if length < 3 else [()])
    ]
    best = sorted(everything, key=score, reverse=True)

    class Last(tf.contrib.rnn.RNNCell):
        """Its output is its input; its state counts."""

        state_size, output_size = 1, 3

        def call(self, inputs: Any, state: Any) -> Any:
            return inputs, state + 1

    with tf.Graph().as_default(), tf.Session() as session:
        seq2seq = tf.contrib.seq2seq
        state = seq2seq.tile_batch(tf.zeros([2, 1]), 9)
        decoder = seq2seq.BeamSearchDecoder(Last(), tf.constant(table), tf.constant([0, 0]), 2, state, 9)
        outputs, final, lengths = seq2seq.dynamic_decode(decoder, maximum_iterations=3)
        ids, found, lengths = session.run((outputs.predicted_ids, final.log_probs, lengths))
    assert ids.shape == (2, 3, 9) and lengths.shape == (2, 9)
    for example in ids:
        paths = [tuple(path) for path in example.T.tolist()]
        until_end = [path[: path.index(2) + 1] if 2 in path else path for path in paths]
        assert len({*paths}) == 9 and all(
            {*path[len(end) :]} <= {2} for path, end in zip(paths, until_end, strict=True)
        )
        # Some score the same, in any order.
        np.testing.assert_allclose([score(path) for path in until_end], [score(path) for path in best[:9]], rtol=1e-5)
    np.testing.assert_allclose(found, [[score(path) for path in best[:9]]] * 2, rtol=1e-5)
