"""`tf.contrib.crf`: linear-chain conditional random fields.

Formulas are those of TensorFlow 1.15, contrib/crf/python/ops/crf.py. In all functions the scores of tags (`inputs`,
`potentials`) are float `[batch, time, tags]`, tags are integers `[batch, time]`, sequence lengths integers `[batch]`,
and transition scores float `[from tag, to tag]`. Steps after the end of a sequence do not count.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from runner.tf_private.tf_estimator import size_of, static_size

v1 = tf.compat.v1


def crf_unary_score(tag_indices: Any, sequence_lengths: Any, inputs: tf.Tensor) -> tf.Tensor:
    """Return the sum of the scores of each sequence's tags, float `[batch]`."""
    scores = tf.gather(inputs, tag_indices, batch_dims=2)
    return tf.reduce_sum(scores * _mask(inputs, sequence_lengths), 1)


def crf_binary_score(tag_indices: Any, sequence_lengths: Any, transition_params: Any) -> tf.Tensor:
    """Return the sum of the scores of each sequence's transitions, float `[batch]`."""
    tag_indices = tf.convert_to_tensor(tag_indices)
    scores = tf.gather_nd(transition_params, tf.stack([tag_indices[:, :-1], tag_indices[:, 1:]], axis=-1))
    mask = tf.sequence_mask(sequence_lengths, tf.shape(tag_indices)[1], scores.dtype)
    return tf.reduce_sum(scores * mask[:, 1:], 1)


def crf_sequence_score(inputs: tf.Tensor, tag_indices: Any, sequence_lengths: Any, transition_params: Any) -> tf.Tensor:
    """Return each sequence's score, float `[batch]`: its tags' scores plus its transitions' scores; 0 if empty."""
    score_of_tags = crf_unary_score(tag_indices, sequence_lengths, inputs)
    score_of_transitions = crf_binary_score(tag_indices, sequence_lengths, transition_params)
    return score_of_tags + score_of_transitions


def crf_log_norm(inputs: tf.Tensor, sequence_lengths: Any, transition_params: Any) -> tf.Tensor:
    """Return log(sum(exp(score))) over all possible sequences of tags, float `[batch]`, by the forward algorithm."""
    lengths = tf.reshape(tf.cast(sequence_lengths, tf.int32), [-1])

    def step(time: tf.Tensor, alphas: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        new = inputs[:, time] + tf.reduce_logsumexp(alphas[:, :, None] + transition_params, 1)
        return time + 1, tf.where((time < lengths)[:, None], new, alphas)

    _, alphas = tf.while_loop(lambda time, alphas: time < tf.shape(inputs)[1], step, (1, inputs[:, 0]))
    log_norm = tf.reduce_logsumexp(alphas, 1)
    return tf.where(lengths > 0, log_norm, tf.zeros_like(log_norm))


def crf_log_likelihood(
    inputs: tf.Tensor, tag_indices: Any, sequence_lengths: Any, transition_params: Any = None
) -> tuple[tf.Tensor, Any]:
    """Return (log-likelihood of each sequence's tags, float `[batch]`; transition scores `[tags, tags]`).

    Args:
      inputs: scores of tags, float `[batch, time, tags]`.
      tag_indices: the tags, integers `[batch, time]`.
      sequence_lengths: integers `[batch]`.
      transition_params: float `[tags, tags]`; None: the variable `transitions` of the current scope.
    """
    num_tags = static_size(inputs, 2)
    if transition_params is None:
        transition_params = v1.get_variable("transitions", [num_tags, num_tags])
    score = crf_sequence_score(inputs, tag_indices, sequence_lengths, transition_params)
    return score - crf_log_norm(inputs, sequence_lengths, transition_params), transition_params


def crf_decode(potentials: tf.Tensor, transition_params: Any, sequence_length: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Return (best tags, int32 `[batch, time]` with 0 after the end of a sequence; their scores, float `[batch]`).

    Uses the Viterbi algorithm.
    """
    lengths = tf.maximum(tf.reshape(tf.cast(sequence_length, tf.int32), [-1]), 1)
    num_steps = tf.shape(potentials)[1]
    same_tags = tf.broadcast_to(tf.range(size_of(potentials, 2)), tf.shape(potentials[:, 0]))

    def forward(time: tf.Tensor, scores: tf.Tensor, back: tf.TensorArray) -> tuple[Any, Any, Any]:
        totals = scores[:, :, None] + transition_params  # [batch, from tag, to tag]
        is_inside = (time < lengths)[:, None]
        # After the end of a sequence the scores stay, and each tag comes from itself.
        best = tf.where(is_inside, potentials[:, time] + tf.reduce_max(totals, 1), scores)
        previous_tags = tf.where(is_inside, tf.argmax(totals, 1, output_type=tf.int32), same_tags)
        return time + 1, best, back.write(time - 1, previous_tags)

    back = tf.TensorArray(tf.int32, size=num_steps - 1, element_shape=same_tags.shape)
    _, scores, back = tf.while_loop(lambda time, *_: time < num_steps, forward, (1, potentials[:, 0], back))
    last_tag = tf.argmax(scores, 1, output_type=tf.int32)

    def backward(time: tf.Tensor, tag: tf.Tensor, tags: tf.TensorArray) -> tuple[Any, Any, Any]:
        previous_tag = tf.gather(back.read(time - 1), tag, batch_dims=1)
        return time - 1, previous_tag, tags.write(time - 1, previous_tag)

    tags = tf.TensorArray(tf.int32, size=num_steps, element_shape=last_tag.shape).write(num_steps - 1, last_tag)
    _, _, tags = tf.while_loop(lambda time, *_: time > 0, backward, (num_steps - 1, last_tag, tags))
    path = tf.transpose(tags.stack())
    return path * tf.sequence_mask(lengths, num_steps, tf.int32), tf.reduce_max(scores, 1)


def viterbi_decode(score: Any, transition_params: Any) -> tuple[list[int], Any]:
    """Return (list of the best tags, their score) of one sequence from tag scores `[time, tags]`, with NumPy."""
    scores = np.array(score[0])
    back = []
    for step_scores in score[1:]:
        totals = scores[:, None] + transition_params
        back.append(np.argmax(totals, 0))
        scores = step_scores + np.max(totals, 0)
    path = [int(np.argmax(scores))]
    for previous_tags in reversed(back):
        path.append(int(previous_tags[path[-1]]))
    return path[::-1], np.max(scores)


def _mask(inputs: tf.Tensor, lengths: Any) -> tf.Tensor:
    return tf.sequence_mask(lengths, tf.shape(inputs)[1], inputs.dtype)
