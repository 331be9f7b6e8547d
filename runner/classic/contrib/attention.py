"""`tf.contrib.seq2seq`: a decoder's attention to the outputs of an encoder.

Formulas and variable names are those of TensorFlow 1.15, contrib/seq2seq/python/ops/attention_wrapper.py.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from runner.tf_private import tf_estimator
from runner.tf_private.tf_estimator import size_of, static_size

v1 = tf.compat.v1
rnn_cell: Any = tf_estimator.legacy_keras("rnn_cell")
layers: Any = tf_estimator.legacy_keras("layers")


class AttentionMechanism(abc.ABC):
    """Computes how much a query attends to each step of a memory.

    Args:
      num_units: size of the keys; the variable `memory_layer/kernel` projects the memory to them.
      memory: float `[batch, time, ...]`, usually an encoder's outputs.
      memory_sequence_length: integers `[batch]`; later steps get no attention. None: all steps are used.
      probability_fn: converts scores `[batch, time]` to probabilities; None: softmax.
      score_mask_value: score of steps after the end; None: -infinity.
    """

    def __init__(
        self,
        num_units: int,
        memory: tf.Tensor,
        memory_sequence_length: Any,
        probability_fn: Callable[..., Any] | None,
        score_mask_value: Any,
    ) -> None:
        memory = tf.convert_to_tensor(memory)
        self._mask = None
        if memory_sequence_length is not None:
            self._mask = tf.sequence_mask(memory_sequence_length, tf.shape(memory)[1])
            ones = tf.ones([tf.rank(memory) - 2], tf.int32)
            shape = tf.concat([tf.shape(self._mask), ones], 0)  # [batch, time, 1, ...], to broadcast to the memory
            memory *= tf.cast(tf.reshape(self._mask, shape), memory.dtype)
        self._num_units = num_units
        self._probability_fn = probability_fn or tf.nn.softmax
        self._mask_value = float("-inf") if score_mask_value is None else score_mask_value
        self.memory_layer = layers.Dense(num_units, name="memory_layer", use_bias=False)
        self.values = memory
        self.keys = self.memory_layer(memory)

    @property
    def alignments_size(self) -> Any:
        """The number of steps of the memory."""
        return size_of(self.keys, 1)

    @property
    def state_size(self) -> Any:
        return self.alignments_size

    @property
    def batch_size(self) -> Any:
        return tf.shape(self.keys)[0]

    def initial_alignments(self, batch_size: Any, dtype: Any) -> tf.Tensor:
        """Return zeros `[batch_size, memory time]` of `dtype`: no alignment before the first step."""
        return tf.zeros([batch_size, self.alignments_size], dtype)

    def initial_state(self, batch_size: Any, dtype: Any) -> tf.Tensor:
        """Return the state before the first step, by default `initial_alignments`: `[batch_size, memory time]`."""
        return self.initial_alignments(batch_size, dtype)

    def __call__(self, query: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        """Return (attention to each step, float `[batch, time]`; next state) for a query, float `[batch, units]`."""
        score = self._score(query)
        if self._mask is not None:
            mask_scores = tf.fill(tf.shape(score), tf.cast(self._mask_value, score.dtype))
            score = tf.where(self._mask, score, mask_scores)
        alignments = self._probability_fn(score)
        return alignments, alignments

    @abc.abstractmethod
    def _score(self, query: tf.Tensor) -> tf.Tensor:
        """Return the score of each step, float `[batch, time]`, for a query `[batch, units]`."""


class LuongAttention(AttentionMechanism):
    """Multiplicative attention: score = query * key, times `attention_g` if `scale`; after Luong et al.,
    arXiv:1508.04025.
    """

    def __init__(
        self,
        num_units: int,
        memory: tf.Tensor,
        memory_sequence_length: Any = None,
        scale: bool = False,
        probability_fn: Callable[..., Any] | None = None,
        score_mask_value: Any = None,
        dtype: Any = None,
        custom_key_value_fn: Any = None,
        name: str = "LuongAttention",
    ) -> None:
        super().__init__(num_units, memory, memory_sequence_length, probability_fn, score_mask_value)
        self._scale = scale

    def _score(self, query: tf.Tensor) -> tf.Tensor:
        with v1.variable_scope(None, "luong_attention", [query]):
            score = tf.einsum("bu,btu->bt", query, self.keys)
            if not self._scale:
                return score
            return score * v1.get_variable("attention_g", [], query.dtype, v1.ones_initializer())


class BahdanauAttention(AttentionMechanism):
    """Additive attention: score = sum(attention_v * tanh(key + query_layer(query))); after Bahdanau et al.,
    arXiv:1409.0473.

    Args:
      normalize: scale attention_v to the length `attention_g`, and add `attention_b` inside of tanh (weight
        normalization, arXiv:1602.07868).
      Others: as in AttentionMechanism.
    """

    def __init__(
        self,
        num_units: int,
        memory: tf.Tensor,
        memory_sequence_length: Any = None,
        normalize: bool = False,
        probability_fn: Callable[..., Any] | None = None,
        score_mask_value: Any = None,
        dtype: Any = None,
        custom_key_value_fn: Any = None,
        name: str = "BahdanauAttention",
    ) -> None:
        super().__init__(num_units, memory, memory_sequence_length, probability_fn, score_mask_value)
        self._normalize = normalize
        self.query_layer = layers.Dense(num_units, name="query_layer", use_bias=False)

    def _score(self, query: tf.Tensor) -> tf.Tensor:
        units = self._num_units
        dtype = query.dtype
        with v1.variable_scope(None, "bahdanau_attention", [query]):
            keys_and_query = self.keys + self.query_layer(query)[:, None]
            weights = v1.get_variable("attention_v", [units], dtype)
            if self._normalize:
                length = v1.get_variable("attention_g", [], dtype, v1.constant_initializer((1.0 / units) ** 0.5))
                keys_and_query += v1.get_variable("attention_b", [units], dtype, v1.zeros_initializer())
                weights = length * weights * tf.math.rsqrt(tf.reduce_sum(tf.square(weights)))
            return tf.reduce_sum(weights * tf.tanh(keys_and_query), 2)


class AttentionWrapperState(NamedTuple):
    """The state of an AttentionWrapper. With several attention mechanisms, the last three fields are tuples.

    Attributes:
      cell_state: state of the cell.
      attention: the last attention, `[batch, attention size]`.
      time: int32 scalar, the number of steps so far.
      alignments: attention to each step of the memory, `[batch, time]`.
      alignment_history: TensorArray of the alignments of all steps; () if they are not collected.
      attention_state: state of the attention mechanism, `[batch, time]`.
    """

    cell_state: Any
    attention: Any
    time: Any
    alignments: Any
    alignment_history: Any
    attention_state: Any

    def clone(self, **changes: Any) -> AttentionWrapperState:
        """Return a copy of this state with some fields replaced."""
        return self._replace(**changes)


class AttentionWrapper(rnn_cell.RNNCell):
    """Wraps a cell with attention: the cell's input also contains the attention of the previous step.

    Args:
      cell: a cell of `tf.nn.rnn_cell`.
      attention_mechanism: an AttentionMechanism, or a list of several.
      attention_layer_size: units of a dense layer (`attention_layer/kernel`) that computes the attention from the
        cell's output and the context; with several mechanisms a list of numbers. None: the attention is the context.
      alignment_history: collect the alignments of each step in the state.
      cell_input_fn: function (input, attention) -> input of the cell; None: concatenates them.
      output_attention: return the attention as the output; False: the cell's output.
      initial_cell_state: state of the cell in `zero_state`; None: the cell's own zero state.
      name: name of the cell.
      attention_layer: a layer, or one per mechanism, instead of attention_layer_size.
    """

    def __init__(
        self,
        cell: Any,
        attention_mechanism: Any,
        attention_layer_size: Any = None,
        alignment_history: bool = False,
        cell_input_fn: Callable[..., Any] | None = None,
        output_attention: bool = True,
        initial_cell_state: Any = None,
        name: str | None = None,
        attention_layer: Any = None,
    ) -> None:
        super().__init__(name=name)
        self._is_multi = isinstance(attention_mechanism, list | tuple)
        self._mechanisms: Sequence[Any] = attention_mechanism if self._is_multi else (attention_mechanism,)
        self._layers = self._attention_layers(attention_layer_size, attention_layer)
        sizes: list[Any] = [static_size(mechanism.values, -1) for mechanism in self._mechanisms]
        if attention_layer_size is not None:
            sizes = [layer.units for layer in self._layers]
        elif attention_layer is not None:
            sizes_of_context = sizes
            sizes = []
            for layer, size in zip(self._layers, sizes_of_context, strict=True):
                shape = layer.compute_output_shape([None, size + cell.output_size])
                sizes.append(static_size(tf.TensorShape(shape), -1))
        self._attention_size = sum(sizes)
        self._cell = cell
        self._has_history = alignment_history
        self._cell_input_fn = cell_input_fn or (lambda inputs, attention: tf.concat([inputs, attention], -1))
        self._output_attention = output_attention
        self._initial_cell_state = initial_cell_state

    def _attention_layers(self, sizes: Any, attention_layer: Any) -> Sequence[Any]:
        """Return the attention layer of each mechanism; None in its place: the attention is the context.

        The arguments are `attention_layer_size` and `attention_layer` of the constructor.
        """
        if sizes is not None and attention_layer is not None:
            raise ValueError("Only one of attention_layer_size and attention_layer should be set")
        if attention_layer is not None:
            return attention_layer if isinstance(attention_layer, list | tuple) else (attention_layer,)
        if sizes is None:
            return (None,) * len(self._mechanisms)
        sizes = sizes if isinstance(sizes, list | tuple) else (sizes,)
        if len(sizes) != len(self._mechanisms):
            raise ValueError(
                f"attention_layer_size has {len(sizes)} numbers for {len(self._mechanisms)} attention mechanisms. Give "
                "one for each."
            )
        return tuple(layers.Dense(size, name="attention_layer", use_bias=False) for size in sizes)

    @property
    def output_size(self) -> Any:
        return self._attention_size if self._output_attention else self._cell.output_size

    @property
    def state_size(self) -> AttentionWrapperState:
        sizes = self._packed([mechanism.alignments_size for mechanism in self._mechanisms])
        history = sizes if self._has_history else ()
        return AttentionWrapperState(
            self._cell.state_size, self._attention_size, tf.TensorShape([]), sizes, history, sizes
        )

    def _packed(self, values: Sequence[Any]) -> Any:
        """Return one value per mechanism in the form of the state: a tuple, or with one mechanism the value itself."""
        return tuple(values) if self._is_multi else values[0]

    def zero_state(self, batch_size: Any, dtype: Any) -> AttentionWrapperState:
        """Return the state before the first step; its tensors are `[batch_size, ...]`."""
        state = self._initial_cell_state
        if state is None:
            state = self._cell.zero_state(batch_size, dtype)
        alignments = [mechanism.initial_alignments(batch_size, dtype) for mechanism in self._mechanisms]
        history: Any = ()
        if self._has_history:
            arrays = []
            for alignment in alignments:
                arrays.append(tf.TensorArray(dtype, size=0, dynamic_size=True, element_shape=alignment.shape))
            history = self._packed(arrays)
        return AttentionWrapperState(
            cell_state=tf.nest.map_structure(tf.identity, state),
            attention=tf.zeros([batch_size, self._attention_size], dtype),
            time=tf.zeros([], tf.int32),
            alignments=self._packed(alignments),
            alignment_history=history,
            attention_state=self._packed(alignments),
        )

    def call(self, inputs: Any, state: AttentionWrapperState) -> tuple[tf.Tensor, AttentionWrapperState]:
        """Return (output, float `[batch, units]`; state) of one step on `inputs`, float `[batch, inputs]`."""
        cell_output, cell_state = self._cell(self._cell_input_fn(inputs, state.attention), state.cell_state)
        mechanism_states = state.attention_state if self._is_multi else (state.attention_state,)
        alignments = []
        attentions = []
        next_states = []
        for mechanism, layer, mechanism_state in zip(self._mechanisms, self._layers, mechanism_states, strict=True):
            alignment, next_state = mechanism(cell_output, mechanism_state)
            # The context: the memory's steps, weighted by the alignment.
            attention = tf.einsum("bt,btu->bu", alignment, mechanism.values)
            if layer is not None:
                attention = layer(tf.concat([cell_output, attention], 1))
            attentions.append(attention)
            alignments.append(alignment)
            next_states.append(next_state)
        history = state.alignment_history
        if self._has_history:
            arrays = history if self._is_multi else (history,)
            new_arrays = []
            for array, alignment in zip(arrays, alignments, strict=True):
                new_arrays.append(array.write(state.time, alignment))
            history = self._packed(new_arrays)
        attention = tf.concat(attentions, 1)
        next_state = AttentionWrapperState(
            cell_state, attention, state.time + 1, self._packed(alignments), history, self._packed(next_states)
        )
        output = attention if self._output_attention else cell_output
        return output, next_state
