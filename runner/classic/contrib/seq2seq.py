"""`tf.contrib.seq2seq`: the loss of sequences, and decoders that make sequences step by step.

Formulas and names are those of TensorFlow 1.15, contrib/seq2seq/python/ops/{loss,helper,basic_decoder,decoder}.py.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from runner.tf_private.tf_estimator import size_of

v1 = tf.compat.v1


def sequence_loss(
    logits: tf.Tensor,
    targets: tf.Tensor,
    weights: tf.Tensor,
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    sum_over_timesteps: bool = False,
    sum_over_batch: bool = False,
    softmax_loss_function: Callable[..., Any] | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Return the weighted cross entropy of a batch of sequences, in the dtype of the logits.

    Args:
      logits: float `[batch, time, classes]`.
      targets: integers `[batch, time]`.
      weights: `[batch, time]`; 0 for padding.
      average_across_timesteps: sum over time and divide by the sum of the weights.
      average_across_batch: sum over the batch and divide by the sum of the weights.
      sum_over_timesteps: sum over time and divide by the number of weights that are not 0.
      sum_over_batch: sum over the batch and divide by the number of weights that are not 0.
      softmax_loss_function: called with labels and logits; None: sparse softmax cross entropy.
      name: name scope.

    Returns:
      a scalar, or a tensor with the axes that are neither averaged nor summed over.

    Raises:
      ValueError: a shape is wrong, or averages and sums are mixed.
    """
    _check_shapes(logits, targets, weights)
    both_over_time = average_across_timesteps and sum_over_timesteps
    both_over_batch = average_across_batch and sum_over_batch
    if both_over_time or both_over_batch:
        raise ValueError("average_across_* and sum_over_* cannot be set to True for the same axis.")
    is_sum = sum_over_timesteps or sum_over_batch
    is_average = average_across_timesteps or average_across_batch
    if is_sum and is_average:
        raise ValueError("sum_over_* and average_across_* cannot be mixed.")
    with v1.name_scope(name, "sequence_loss", [logits, targets, weights]):
        classes = tf.shape(logits)[2]
        arguments = {"labels": tf.reshape(targets, [-1]), "logits": tf.reshape(logits, [-1, classes])}
        function = softmax_loss_function or tf.nn.sparse_softmax_cross_entropy_with_logits
        losses = tf.reshape(function(**arguments), tf.shape(targets)) * tf.cast(weights, logits.dtype)
        axes = []
        if average_across_batch or sum_over_batch:
            axes.append(0)
        if average_across_timesteps or sum_over_timesteps:
            axes.append(1)
        if not axes:
            return losses
        divisor = tf.math.count_nonzero(weights, axes) if is_sum else tf.reduce_sum(weights, axes)
        return tf.math.divide_no_nan(tf.reduce_sum(losses, axes), tf.cast(divisor, losses.dtype))


def _check_shapes(logits: tf.Tensor, targets: tf.Tensor, weights: tf.Tensor) -> None:
    ranks = (len(logits.shape), len(targets.shape), len(weights.shape))
    if ranks != (3, 2, 2):
        raise ValueError(
            "sequence_loss: logits must be [batch, time, classes], targets and weights [batch, time]; their shapes are "
            f"{logits.shape}, {targets.shape} and {weights.shape}."
        )


def tile_batch(t: Any, multiplier: int, name: str | None = None) -> Any:
    """Return tensors `[batch * multiplier, ...]` with each example repeated `multiplier` times in a row; scalars are
    unchanged.
    """
    with v1.name_scope(name, "tile_batch"):
        return tf.nest.map_structure(lambda tensor: _tiled(tensor, multiplier), t)


def _tiled(tensor: Any, multiplier: int) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        return tensor
    return tf.repeat(tensor, multiplier, axis=0)


# --- helpers: the next input of a decoder -----------------------------------------------------------------------------


class Helper(abc.ABC):
    """Base class: samples ids from the outputs of a decoder and chooses the decoder's next inputs."""

    sample_ids_shape: Any = tf.TensorShape([])
    sample_ids_dtype: Any = tf.int32

    @property
    @abc.abstractmethod
    def batch_size(self) -> Any:
        """The number of sequences."""

    @abc.abstractmethod
    def initialize(self, name: str | None = None) -> tuple[Any, Any]:
        """Return (whether each sequence is finished, bool `[batch]`; first inputs `[batch, ...]`)."""

    def sample(self, time: Any, outputs: Any, state: Any, name: str | None = None) -> Any:
        """Return the sampled ids, `[batch]`, from the outputs of a step: by default the most likely ones."""
        return tf.argmax(outputs, axis=-1, output_type=tf.int32)

    @abc.abstractmethod
    def next_inputs(
        self, time: Any, outputs: Any, state: Any, sample_ids: Any, name: str | None = None
    ) -> tuple[Any, Any, Any]:
        """Return (finished, bool `[batch]`; next inputs `[batch, ...]`; next state)."""


class TrainingHelper(Helper):
    """Feeds the true inputs to a decoder (teacher forcing). Samples are the most likely ids.

    Args:
      inputs: `[batch, time, ...]`; with `time_major` `[time, batch, ...]`.
      sequence_length: integers `[batch]`.
      time_major: see inputs.
      name: ignored.

    Raises:
      ValueError: sequence_length is not a vector.
    """

    def __init__(self, inputs: Any, sequence_length: Any, time_major: bool = False, name: str | None = None) -> None:
        inputs = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        self.inputs = inputs if time_major else tf.nest.map_structure(_with_swapped_axes, inputs)
        self.sequence_length = tf.convert_to_tensor(sequence_length, name="sequence_length")
        if self.sequence_length.shape.rank != 1:
            raise ValueError(
                f"Expected sequence_length to be a vector, but received shape: {self.sequence_length.shape}"
            )
        self._longest = tf.shape(tf.nest.flatten(self.inputs)[0])[0]

    @property
    def batch_size(self) -> Any:
        return tf.size(self.sequence_length)

    def _inputs_at(self, time: Any, finished: tf.Tensor) -> Any:
        """Return the inputs of a step; zeros once all sequences are finished."""
        last = tf.maximum(self._longest - 1, 0)
        is_over = tf.reduce_all(finished)

        def read(inputs: tf.Tensor) -> tf.Tensor:
            inputs_of_step = inputs[tf.minimum(time, last)]
            return tf.where(is_over, tf.zeros_like(inputs_of_step), inputs_of_step)

        return tf.nest.map_structure(read, self.inputs)

    def initialize(self, name: str | None = None) -> tuple[Any, Any]:
        finished = tf.equal(self.sequence_length, 0)
        return finished, self._inputs_at(0, finished)

    def next_inputs(
        self, time: Any, outputs: Any, state: Any, sample_ids: Any, name: str | None = None
    ) -> tuple[Any, Any, Any]:
        finished = tf.cast(time + 1, self.sequence_length.dtype) >= self.sequence_length
        return finished, self._inputs_at(time + 1, finished), state


class GreedyEmbeddingHelper(Helper):
    """Feeds the embedding of the most likely id to a decoder.

    Args:
      embedding: a function of ids, or a tensor `[ids, ...]`.
      start_tokens: integers `[batch]`, the first ids.
      end_token: integer scalar, the id that finishes a sequence.

    Raises:
      ValueError: start_tokens is not a vector, or end_token not a scalar.
    """

    def __init__(self, embedding: Any, start_tokens: Any, end_token: Any) -> None:
        self._embed = embedding if callable(embedding) else lambda ids: tf.nn.embedding_lookup(embedding, ids)
        self._start_tokens = tf.convert_to_tensor(start_tokens, tf.int32, name="start_tokens")
        self._end_token = tf.convert_to_tensor(end_token, tf.int32, name="end_token")
        if self._start_tokens.shape.rank != 1:
            raise ValueError("start_tokens must be a vector")
        if self._end_token.shape.rank != 0:
            raise ValueError("end_token must be a scalar")

    @property
    def batch_size(self) -> Any:
        return tf.size(self._start_tokens)

    def initialize(self, name: str | None = None) -> tuple[Any, Any]:
        return tf.zeros_like(self._start_tokens, tf.bool), self._embed(self._start_tokens)

    def next_inputs(
        self, time: Any, outputs: Any, state: Any, sample_ids: Any, name: str | None = None
    ) -> tuple[Any, Any, Any]:
        finished = tf.equal(sample_ids, self._end_token)
        token = tf.where(tf.reduce_all(finished), self._start_tokens, sample_ids)
        return finished, self._embed(token), state


class SampleEmbeddingHelper(GreedyEmbeddingHelper):
    """Feeds the embedding of an id that is drawn from softmax(outputs / softmax_temperature) to a decoder.

    Args:
      embedding: as in GreedyEmbeddingHelper.
      start_tokens: as in GreedyEmbeddingHelper.
      end_token: as in GreedyEmbeddingHelper.
      softmax_temperature: divides the outputs; None: 1.
      seed: seed of the draws.
    """

    def __init__(
        self, embedding: Any, start_tokens: Any, end_token: Any, softmax_temperature: Any = None, seed: Any = None
    ) -> None:
        super().__init__(embedding, start_tokens, end_token)
        self._temperature = softmax_temperature
        self._seed = seed

    def sample(self, time: Any, outputs: Any, state: Any, name: str | None = None) -> Any:
        logits = outputs if self._temperature is None else outputs / self._temperature
        return tf.random.categorical(logits, 1, dtype=tf.int32, seed=self._seed)[:, 0]


class CustomHelper(Helper):
    """A helper made of functions: `initialize_fn()`, and `sample_fn` and `next_inputs_fn` with keyword arguments."""

    def __init__(
        self,
        initialize_fn: Callable[..., Any],
        sample_fn: Callable[..., Any],
        next_inputs_fn: Callable[..., Any],
        sample_ids_shape: Any = None,
        sample_ids_dtype: Any = None,
    ) -> None:
        self._initialize = initialize_fn
        self._sample = sample_fn
        self._next_inputs = next_inputs_fn
        self.sample_ids_shape = tf.TensorShape(sample_ids_shape or [])
        self.sample_ids_dtype = sample_ids_dtype or tf.int32
        self._batch_size: Any = None

    @property
    def batch_size(self) -> Any:
        if self._batch_size is None:
            raise ValueError("batch_size accessed before initialize was called")
        return self._batch_size

    def initialize(self, name: str | None = None) -> tuple[Any, Any]:
        finished, inputs = self._initialize()
        self._batch_size = tf.size(finished)
        return finished, inputs

    def sample(self, time: Any, outputs: Any, state: Any, name: str | None = None) -> Any:
        return self._sample(time=time, outputs=outputs, state=state)

    def next_inputs(
        self, time: Any, outputs: Any, state: Any, sample_ids: Any, name: str | None = None
    ) -> tuple[Any, Any, Any]:
        return self._next_inputs(time=time, outputs=outputs, state=state, sample_ids=sample_ids)


# --- decoders ---------------------------------------------------------------------------------------------------------


class Decoder(abc.ABC):
    """Base class of networks that `dynamic_decode` calls for each step."""

    tracks_own_finished = False
    """Whether `step` alone tells if a sequence is finished. False: once finished, a sequence stays finished. True in a
    beam search, where sequences change places."""

    @property
    @abc.abstractmethod
    def output_dtype(self) -> Any:
        """The dtypes of a step's outputs, in the structure of the outputs."""

    @abc.abstractmethod
    def initialize(self, name: str | None = None) -> tuple[Any, Any, Any]:
        """Return (finished, bool `[batch]`; first inputs; first state)."""

    @abc.abstractmethod
    def step(self, time: Any, inputs: Any, state: Any, name: str | None = None) -> tuple[Any, Any, Any, Any]:
        """Return (outputs, next state, next inputs, finished)."""

    def finalize(self, outputs: Any, final_state: Any, sequence_lengths: Any) -> tuple[Any, Any]:
        """Return the final (outputs `[time, batch, ...]`, state) from those of all steps."""
        return outputs, final_state


class BasicDecoderOutput(NamedTuple):
    """The outputs of a step.

    Attributes:
      rnn_output: output of the cell, or of the output layer, `[batch, ...]`.
      sample_id: the sampled ids, `[batch]`.
    """

    rnn_output: Any
    sample_id: Any


class BasicDecoder(Decoder):
    """Runs a cell on the inputs from a helper.

    Args:
      cell: a cell of `tf.nn.rnn_cell`.
      helper: a Helper, which samples ids and chooses the inputs.
      initial_state: state of the cell before the first step.
      output_layer: a layer such as `tf.layers.Dense`, applied to the outputs before ids are sampled.
    """

    def __init__(self, cell: Any, helper: Helper, initial_state: Any, output_layer: Any = None) -> None:
        self._cell = cell
        self._helper = helper
        self._initial_state = initial_state
        self._output_layer = output_layer

    @property
    def batch_size(self) -> Any:
        return self._helper.batch_size

    @property
    def output_dtype(self) -> BasicDecoderOutput:
        kind = tf.nest.flatten(self._initial_state)[0].dtype
        return BasicDecoderOutput(
            tf.nest.map_structure(lambda _: kind, self._cell.output_size), self._helper.sample_ids_dtype
        )

    def initialize(self, name: str | None = None) -> tuple[Any, Any, Any]:
        return (*self._helper.initialize(), self._initial_state)

    def step(self, time: Any, inputs: Any, state: Any, name: str | None = None) -> tuple[Any, Any, Any, Any]:
        with v1.name_scope(name, "BasicDecoderStep"):
            outputs, state = self._cell(inputs, state)
            if self._output_layer is not None:
                outputs = self._output_layer(outputs)
            ids = self._helper.sample(time=time, outputs=outputs, state=state)
            finished, inputs, state = self._helper.next_inputs(time=time, outputs=outputs, state=state, sample_ids=ids)
            return BasicDecoderOutput(outputs, ids), state, inputs, finished


def dynamic_decode(
    decoder: Decoder,
    output_time_major: bool = False,
    impute_finished: bool = False,
    maximum_iterations: Any = None,
    parallel_iterations: int = 32,
    swap_memory: bool = False,
    scope: Any = None,
) -> tuple[Any, Any, Any]:
    """Run a decoder until all sequences are finished, in the variable scope `decoder`.

    Args:
      decoder: the decoder.
      output_time_major: return outputs as `[time, batch, ...]`.
      impute_finished: for finished sequences, output 0 and keep the state.
      maximum_iterations: the largest number of steps; None: no limit.
      parallel_iterations: as in `tf.while_loop`.
      swap_memory: as in `tf.while_loop`.
      scope: variable scope; None: `decoder`.

    Returns:
      (outputs `[batch, time, ...]`, final state, sequence lengths int32 `[batch]`).
    """
    with v1.variable_scope(scope, "decoder"):
        finished, inputs, state = decoder.initialize()
        limit = None if maximum_iterations is None else tf.convert_to_tensor(maximum_iterations, tf.int32)
        if limit is not None:
            finished = tf.logical_or(finished, limit <= 0)
        lengths = tf.zeros_like(finished, tf.int32)
        arrays = tf.nest.map_structure(
            lambda dtype: tf.TensorArray(dtype, size=0, dynamic_size=True, infer_shape=False), decoder.output_dtype
        )
        static_shapes: list[Any] = []  # of the outputs of a step, which TensorArrays would forget; `body` sets them

        def body(time: Any, arrays: Any, state: Any, inputs: Any, finished: Any, lengths: Any) -> Any:
            outputs, new_state, new_inputs, new_finished = decoder.step(time, inputs, state)
            if not decoder.tracks_own_finished:  # a finished sequence stays finished
                new_finished = tf.logical_or(new_finished, finished)
            # A sequence that was not finished before this step is one step longer.
            new_lengths = tf.where(finished, lengths, tf.fill(tf.shape(lengths), time + 1))
            if limit is not None:
                new_finished = tf.logical_or(new_finished, time + 1 >= limit)
            if impute_finished:
                zeros = tf.nest.map_structure(tf.zeros_like, outputs)
                outputs = tf.nest.map_structure(
                    lambda zero, new: _keep_if_finished(finished, zero, new), zeros, outputs
                )
                new_state = tf.nest.map_structure(
                    lambda old, new: _keep_if_finished(finished, old, new), state, new_state
                )
            static_shapes[:] = [output.shape for output in tf.nest.flatten(outputs)]
            arrays = tf.nest.map_structure(lambda array, output: array.write(time, output), arrays, outputs)
            return time + 1, arrays, new_state, new_inputs, new_finished, new_lengths

        _, arrays, state, _, _, lengths = tf.while_loop(
            lambda time, arrays, state, inputs, finished, lengths: tf.logical_not(tf.reduce_all(finished)),
            body,
            (tf.constant(0), arrays, state, inputs, finished, lengths),
            parallel_iterations=parallel_iterations,
            swap_memory=swap_memory,
        )
        stacked = [array.stack() for array in tf.nest.flatten(arrays)]
        for output, shape in zip(stacked, static_shapes, strict=True):
            output.set_shape(tf.TensorShape([None]).concatenate(shape))
        outputs = tf.nest.pack_sequence_as(decoder.output_dtype, stacked)
        outputs, state = decoder.finalize(outputs, state, lengths)
        if not output_time_major:
            outputs = tf.nest.map_structure(_with_swapped_axes, outputs)
    return outputs, state, lengths


def _keep_if_finished(finished: tf.Tensor, old: Any, new: Any) -> Any:
    """Return `old` for finished sequences and `new` for others; for scalars and TensorArrays always `new`."""
    if isinstance(old, tf.TensorArray) or new.shape.rank == 0:
        return new
    ones = tf.ones([tf.rank(new) - 1], tf.int32)
    return tf.where(tf.reshape(finished, tf.concat([[-1], ones], 0)), old, new)


def _with_swapped_axes(tensor: tf.Tensor) -> tf.Tensor:
    rank = tensor.shape.rank
    if rank is None:
        return tf.transpose(tensor, tf.concat([[1, 0], tf.range(2, tf.rank(tensor))], 0))
    if rank < 2:
        return tensor
    return tf.transpose(tensor, [1, 0, *range(2, rank)])


# --- beam search ------------------------------------------------------------------------------------------------------


class BeamSearchDecoderOutput(NamedTuple):
    """The outputs of a step of a beam search, each `[batch, beam]`."""

    scores: Any
    predicted_ids: Any
    parent_ids: Any


class BeamSearchDecoderState(NamedTuple):
    """The state of a beam search: `cell_state` is `[batch, beam, ...]`, the other fields are `[batch, beam]`."""

    cell_state: Any
    log_probs: Any
    finished: Any
    lengths: Any


class FinalBeamSearchDecoderOutput(NamedTuple):
    """The result of a beam search.

    Attributes:
      predicted_ids: the sequences, best first, int32 `[batch, time, beam]`; `[time, batch, beam]` with
        output_time_major.
      beam_search_decoder_output: the outputs of all steps; each field has the shape of predicted_ids.
    """

    predicted_ids: Any
    beam_search_decoder_output: BeamSearchDecoderOutput


class BeamSearchDecoder(Decoder):
    """Beam search: keeps the `beam_width` best sequences by the sum of their ids' log-probabilities.

    As in TensorFlow 1.15, contrib/seq2seq/python/ops/beam_search_decoder.py. Repeat the initial state, and the memory
    of an attention, with `tile_batch(..., beam_width)`.

    Args:
      cell: a cell of `tf.nn.rnn_cell`.
      embedding: as in GreedyEmbeddingHelper.
      start_tokens: as in GreedyEmbeddingHelper.
      end_token: as in GreedyEmbeddingHelper.
      initial_state: state of the cell, `[batch * beam_width, ...]`.
      beam_width: number of sequences to keep per example.
      output_layer: as in BasicDecoder.
      length_penalty_weight: divide the score by ((5 + length) / 6) to this power.
      coverage_penalty_weight: must be 0; not supported.
      reorder_tensor_arrays: ignored; TensorArrays such as alignment_history stay in the order of beams.
    """

    tracks_own_finished = True

    def __init__(
        self,
        cell: Any,
        embedding: Any,
        start_tokens: Any,
        end_token: Any,
        initial_state: Any,
        beam_width: int,
        output_layer: Any = None,
        length_penalty_weight: float = 0.0,
        coverage_penalty_weight: float = 0.0,
        reorder_tensor_arrays: bool = True,
    ) -> None:
        if coverage_penalty_weight:
            raise ValueError("BeamSearchDecoder(coverage_penalty_weight=) is not supported; leave it 0.")
        self._embedding_helper = GreedyEmbeddingHelper(embedding, start_tokens, end_token)
        self._start_tokens = self._embedding_helper._start_tokens
        self._end_token = self._embedding_helper._end_token
        self._cell = cell
        self._initial_state = initial_state
        self._beam_width = beam_width
        self._output_layer = output_layer
        self._length_penalty_weight = length_penalty_weight
        del reorder_tensor_arrays

    @property
    def batch_size(self) -> Any:
        return tf.size(self._start_tokens)

    @property
    def output_dtype(self) -> BeamSearchDecoderOutput:
        kind = tf.nest.flatten(self._initial_state)[0].dtype
        return BeamSearchDecoderOutput(kind, tf.int32, tf.int32)

    def initialize(self, name: str | None = None) -> tuple[Any, Any, Any]:
        batch = self.batch_size
        beams = self._beam_width
        kind = self.output_dtype.scores
        finished = tf.zeros([batch, beams], tf.bool)
        tokens = tf.repeat(self._start_tokens[:, None], beams, 1)
        # All beams are equal at first: give all but one the lowest probability.
        log_probs = tf.one_hot(tf.zeros([batch], tf.int32), beams, tf.cast(0.0, kind), kind.min, dtype=kind)
        state = tf.nest.map_structure(self._divided, self._initial_state)
        lengths = tf.zeros([batch, beams], tf.int64)
        return (
            finished,
            self._embedding_helper._embed(tokens),
            BeamSearchDecoderState(state, log_probs, finished, lengths),
        )

    def _divided(self, tensor: Any) -> Any:
        """Reshape from `[batch * beam, ...]` to `[batch, beam, ...]`. Scalars and TensorArrays are unchanged."""
        if isinstance(tensor, tf.TensorArray) or tensor.shape.rank == 0:
            return tensor
        rest = tf.shape(tensor)[1:]
        divided = tf.reshape(tensor, tf.concat([[self.batch_size, self._beam_width], rest], 0))
        divided.set_shape(tf.TensorShape([None, self._beam_width]).concatenate(tensor.shape[1:]))
        return divided

    @staticmethod
    def _joined(tensor: Any) -> Any:
        """Do the reverse of `_divided`."""
        if isinstance(tensor, tf.TensorArray) or tensor.shape.rank == 0:
            return tensor
        joined = tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))
        joined.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[2:]))
        return joined

    def step(self, time: Any, inputs: Any, state: Any, name: str | None = None) -> tuple[Any, Any, Any, Any]:
        with v1.name_scope(name, "BeamSearchDecoderStep"):
            cell_state = tf.nest.map_structure(self._joined, state.cell_state)
            outputs, cell_state = self._cell(self._joined(inputs), cell_state)
            if self._output_layer is not None:
                outputs = self._output_layer(outputs)
            logits = self._divided(outputs)
            cell_state = tf.nest.map_structure(self._divided, cell_state)
            output, state = self._best(logits, cell_state, state)
            # As in GreedyEmbeddingHelper, the inputs after the end are those of the start tokens.
            all_finished = tf.reduce_all(state.finished)
            ids = tf.where(
                all_finished, tf.repeat(self._start_tokens[:, None], self._beam_width, 1), output.predicted_ids
            )
            return output, state, self._embedding_helper._embed(ids), state.finished

    def _best(self, logits: tf.Tensor, cell_state: Any, state: BeamSearchDecoderState) -> tuple[Any, Any]:
        """Continue each sequence by each id, and return (output, state) of the best `beam_width` continuations.

        Args:
          logits: float `[batch, beam, ids]`.
          cell_state: state of the cell after this step, `[batch, beam, ...]`.
          state: state of the beam search before this step.
        """
        num_ids = size_of(logits, -1)
        dtype = logits.dtype
        is_end = tf.one_hot(self._end_token, num_ids, True, False)
        # A finished sequence can only continue with the end token, at log-probability 0.
        after_end = tf.where(is_end, tf.zeros([num_ids], dtype), tf.fill([num_ids], dtype.min))
        step_log_probs = tf.where(state.finished[:, :, None], after_end, tf.nn.log_softmax(logits))
        total_log_probs = state.log_probs[:, :, None] + step_log_probs
        is_longer = tf.cast(tf.logical_and(~state.finished[:, :, None], ~is_end), tf.int64)
        lengths = tf.cast(state.lengths[:, :, None] + is_longer, dtype)
        penalty = ((5.0 + lengths) / 6.0) ** self._length_penalty_weight
        scores = tf.reshape(total_log_probs / penalty, [-1, self._beam_width * num_ids])
        # The last axis of `scores` counts (beam, id) pairs: beam * num_ids + id.
        best_scores, chosen = tf.math.top_k(scores, self._beam_width)
        ids = chosen % num_ids
        parents = chosen // num_ids
        was_finished = tf.gather(state.finished, parents, batch_dims=1)

        def of_parents(tensor: Any) -> Any:
            has_no_beams = isinstance(tensor, tf.TensorArray) or tensor.shape.rank in (0, 1)
            return tensor if has_no_beams else tf.gather(tensor, parents, batch_dims=1)

        next_state = BeamSearchDecoderState(
            cell_state=tf.nest.map_structure(of_parents, cell_state),
            log_probs=tf.gather(tf.reshape(total_log_probs, tf.shape(scores)), chosen, batch_dims=1),
            finished=tf.logical_or(was_finished, tf.equal(ids, self._end_token)),
            lengths=tf.gather(state.lengths, parents, batch_dims=1) + tf.cast(~was_finished, tf.int64),
        )
        return BeamSearchDecoderOutput(best_scores, ids, parents), next_state

    def finalize(self, outputs: Any, final_state: Any, sequence_lengths: Any) -> tuple[Any, Any]:
        """Return (FinalBeamSearchDecoderOutput, state). The sequences are traced back from the last step through the
        parents; after the first end token, each is filled with end tokens.
        """
        ids = outputs.predicted_ids
        parents = outputs.parent_ids
        beams = tf.broadcast_to(tf.range(self._beam_width), tf.shape(ids)[1:])  # of the last step, in its own order

        def trace_back(later: tuple[Any, Any], step: tuple[Any, Any]) -> tuple[Any, Any]:
            # `later` has, for the step after this one: (ids, the beam of this step that each sequence continues).
            step_ids, step_parents = step
            return tf.gather(step_ids, later[1], batch_dims=1), tf.gather(step_parents, later[1], batch_dims=1)

        path, _ = tf.scan(trace_back, (ids, parents), (beams, beams), reverse=True)
        ended = tf.cumsum(tf.cast(tf.equal(path, self._end_token), tf.int32), exclusive=True) > 0
        sequences = tf.where(ended, self._end_token, path)
        return FinalBeamSearchDecoderOutput(sequences, outputs), final_state
