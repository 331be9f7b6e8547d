"""Cells and networks that only `tf.contrib.rnn` had. Its other names are in `tf.nn.rnn_cell`."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from runner.tf_private import tf_estimator
from runner.tf_private.tf_estimator import static_size

v1 = tf.compat.v1
rnn_cell: Any = tf_estimator.legacy_keras("rnn_cell")
LSTMStateTuple = rnn_cell.LSTMStateTuple


class LSTMBlockCell(rnn_cell.LSTMCell):
    """`tf.nn.rnn_cell.LSTMCell` with the arguments and variable names of tf.contrib's fused cell.

    As in TensorFlow 1.15, contrib/rnn/python/ops/lstm_ops.py: one kernel for the gates i, j, f, o; c is clipped to
    cell_clip; the peephole of o uses the new c. Variables are `lstm_cell/kernel`, `lstm_cell/bias`, and
    `lstm_cell/w_i_diag` etc. for peepholes.
    """

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        cell_clip: float | None = None,
        use_peephole: bool = False,
        dtype: Any = None,
        reuse: Any = None,
        name: str = "lstm_cell",
    ) -> None:
        clip = cell_clip if cell_clip is not None and cell_clip > 0 else None
        super().__init__(
            num_units, use_peepholes=use_peephole, cell_clip=clip, forget_bias=forget_bias, reuse=reuse, dtype=dtype,
            name=name,
        )  # fmt: skip


class GRUBlockCellV2(rnn_cell.GRUCell):
    """`tf.nn.rnn_cell.GRUCell` with the arguments of tf.contrib's fused cell."""

    def __init__(self, num_units: int, reuse: Any = None, name: str = "gru_cell", **kwargs: Any) -> None:
        super().__init__(num_units, reuse=reuse, name=name, **kwargs)


class LayerNormBasicLSTMCell(rnn_cell.RNNCell):
    """LSTM with layer normalization (arXiv:1607.06450) and recurrent dropout (arXiv:1603.05118).

    As in TensorFlow 1.15, contrib/rnn/python/ops/rnn_cell.py: i, j, f, o = norm of each part of [x, h] kernel; c =
    norm(sigmoid(f + forget_bias) c + sigmoid(i) dropout(tanh j)); h = sigmoid(o) tanh(c). Variables are `kernel` and
    `{input,transform,forget,output,state}/{gamma,beta}`; without layer_norm, `kernel` and `bias`.
    """

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        input_size: Any = None,
        activation: Callable[..., Any] = tf.tanh,
        layer_norm: bool = True,
        norm_gain: float = 1.0,
        norm_shift: float = 0.0,
        dropout_keep_prob: Any = 1.0,
        dropout_prob_seed: int | None = None,
        reuse: Any = None,
    ) -> None:
        super().__init__(_reuse=reuse)
        del input_size
        self._num_units = num_units
        self._forget_bias = forget_bias
        self._activation = activation
        self._layer_norm = layer_norm
        self._gain = norm_gain
        self._shift = norm_shift
        self._keep_prob = dropout_keep_prob
        self._seed = dropout_prob_seed

    @property
    def state_size(self) -> Any:
        return LSTMStateTuple(self._num_units, self._num_units)

    @property
    def output_size(self) -> int:
        return self._num_units

    def _norm(self, inputs: tf.Tensor, scope: str) -> tf.Tensor:
        with v1.variable_scope(scope):
            shape = [static_size(inputs, -1)]
            gamma = v1.get_variable("gamma", shape, inputs.dtype, v1.constant_initializer(self._gain))
            beta = v1.get_variable("beta", shape, inputs.dtype, v1.constant_initializer(self._shift))
        mean, variance = tf.nn.moments(inputs, [-1], keepdims=True)
        return tf.nn.batch_normalization(inputs, mean, variance, beta, gamma, 1e-12)

    def call(self, inputs: tf.Tensor, state: Any) -> tuple[tf.Tensor, Any]:
        """Return (output `[batch, num_units]`, state): one step of the cell on float `inputs`, `[batch, inputs]`."""
        c, h = state
        inputs_and_output = tf.concat([inputs, h], 1)
        kernel = v1.get_variable(
            "kernel", [static_size(inputs_and_output, -1), 4 * self._num_units], inputs_and_output.dtype
        )
        gates = tf.matmul(inputs_and_output, kernel)
        if not self._layer_norm:
            # As in TensorFlow 1.15, the bias is initialized like the kernel, not with zeros.
            gates += v1.get_variable("bias", [4 * self._num_units], inputs_and_output.dtype)
        i, j, f, o = tf.split(gates, 4, axis=1)
        if self._layer_norm:
            i = self._norm(i, "input")
            j = self._norm(j, "transform")
            f = self._norm(f, "forget")
            o = self._norm(o, "output")
        candidate = self._activation(j)
        if tf.is_tensor(self._keep_prob) or self._keep_prob < 1:
            candidate = v1.nn.dropout(candidate, rate=1 - self._keep_prob, seed=self._seed)
        c = c * tf.sigmoid(f + self._forget_bias) + tf.sigmoid(i) * candidate
        if self._layer_norm:
            c = self._norm(c, "state")
        h = self._activation(c) * tf.sigmoid(o)
        return h, LSTMStateTuple(c, h)


# --- networks over a whole sequence, [time, batch, ...] ---------------------------------------------------------------


class FusedRNNCell(abc.ABC):
    """A network that takes all steps of a sequence in one call."""

    @abc.abstractmethod
    def __call__(
        self, inputs: Any, initial_state: Any = None, dtype: Any = None, sequence_length: Any = None, scope: Any = None
    ) -> tuple[Any, Any]:
        """Return (outputs, float `[time, batch, units]`; state after the last step).

        Args:
          inputs: float `[time, batch, inputs]`, or a list of steps; the outputs are then a list, too.
          initial_state: state before the first step; None: zeros.
          dtype: dtype of the state and outputs.
          sequence_length: integers `[batch]`; None: all sequences have the full length.
          scope: variable scope.
        """


class _OfWholeSequence(FusedRNNCell):
    """A FusedRNNCell that takes a list of steps as one tensor."""

    def __call__(
        self, inputs: Any, initial_state: Any = None, dtype: Any = None, sequence_length: Any = None, scope: Any = None
    ) -> tuple[Any, Any]:
        if isinstance(inputs, list | tuple):
            outputs, state = self._run(tf.stack(inputs), initial_state, dtype, sequence_length, scope)
            return tf.unstack(outputs), state
        return self._run(tf.convert_to_tensor(inputs), initial_state, dtype, sequence_length, scope)

    @abc.abstractmethod
    def _run(self, inputs: tf.Tensor, initial_state: Any, dtype: Any, lengths: Any, scope: Any) -> tuple[Any, Any]:
        """Do the same as a call; `lengths` is its `sequence_length`."""


class LSTMBlockFusedCell(_OfWholeSequence):
    """An LSTM over a whole sequence in one op of TensorFlow, BlockLSTM.

    As in TensorFlow 1.15, contrib/rnn/python/ops/lstm_ops.py: outputs after the end of a sequence are 0, and the state
    is that at its end. Variables are `lstm_fused_cell/kernel` and `lstm_fused_cell/bias`.
    """

    def __init__(
        self,
        num_units: int,
        forget_bias: float = 1.0,
        cell_clip: float | None = None,
        use_peephole: bool = False,
        reuse: Any = None,
        dtype: Any = None,
        name: str = "lstm_fused_cell",
    ) -> None:
        self._num_units = num_units
        self._forget_bias = forget_bias
        self._cell_clip = cell_clip if cell_clip is not None else -1.0
        self._use_peephole = use_peephole
        self._reuse = reuse
        self._dtype = dtype
        self._name = name
        self._scope: Any = None

    @property
    def num_units(self) -> int:
        return self._num_units

    def _run(self, inputs: tf.Tensor, initial_state: Any, dtype: Any, lengths: Any, scope: Any) -> tuple[Any, Any]:
        batch = tf.shape(inputs)[1]
        time = tf.shape(inputs)[0]
        units = self._num_units
        # The first call makes the variables, and later calls use them in the same scope.
        is_built = self._scope is not None
        reuse = True if is_built else self._reuse
        with v1.variable_scope(self._scope or scope, self._name, reuse=reuse) as self._scope:
            weights = self._weights(inputs)
        if initial_state is None:
            initial_state = (tf.zeros([batch, units], inputs.dtype), tf.zeros([batch, units], inputs.dtype))
        c, h = initial_state
        if lengths is None:
            longest = tf.cast(time, tf.int64)
        else:
            lengths = tf.cast(lengths, tf.int64)
            longest = tf.reduce_max(lengths)
        result = tf.raw_ops.BlockLSTM(
            seq_len_max=longest, x=inputs, cs_prev=c, h_prev=h, **weights, forget_bias=self._forget_bias,
            cell_clip=self._cell_clip, use_peephole=self._use_peephole,
        )  # fmt: skip
        cells = result.cs
        outputs = result.h
        if lengths is None:
            return outputs, LSTMStateTuple(cells[-1], outputs[-1])
        outputs *= tf.transpose(tf.sequence_mask(lengths, time, inputs.dtype))[:, :, None]
        index_of_ends = tf.stack([lengths, tf.range(tf.cast(batch, tf.int64))], axis=1)
        # With the initial state in front, index 0 is the state of an empty sequence.
        c = tf.gather_nd(tf.concat([c[None], cells], 0), index_of_ends)
        h = tf.gather_nd(tf.concat([h[None], outputs], 0), index_of_ends)
        return outputs, LSTMStateTuple(c, h)

    def _weights(self, inputs: tf.Tensor) -> dict[str, Any]:
        """Return the weights by the names of BlockLSTM's arguments. Peepholes that are not used are zeros."""
        units = self._num_units
        dtype = inputs.dtype
        weights = {"w": v1.get_variable("kernel", [_known_size(inputs) + units, 4 * units], dtype)}
        weights["b"] = v1.get_variable("bias", [4 * units], dtype, v1.zeros_initializer())
        for key, name in (("wci", "w_i_diag"), ("wcf", "w_f_diag"), ("wco", "w_o_diag")):
            if self._use_peephole:
                weights[key] = v1.get_variable(name, [units], dtype)
            else:
                weights[key] = tf.zeros([units], dtype)
        return weights


def _known_size(inputs: tf.Tensor) -> int:
    size = static_size(inputs, -1)
    if size is None:
        raise ValueError(f"Expected inputs.shape[-1] to be known, saw shape: {inputs.shape}")
    return size


class FusedRNNCellAdaptor(_OfWholeSequence):
    """Runs a cell over a whole sequence.

    Args:
      cell: a cell of `tf.nn.rnn_cell`.
      use_dynamic_rnn: use tf.nn.dynamic_rnn; False: tf.nn.static_rnn.
    """

    def __init__(self, cell: Any, use_dynamic_rnn: bool = False) -> None:
        self._cell = cell
        self._use_dynamic_rnn = use_dynamic_rnn

    def __call__(self, inputs: Any, *others: Any, **named: Any) -> tuple[Any, Any]:
        # A step may be a nest of tensors, which cannot be stacked.
        if isinstance(inputs, list | tuple) and not self._use_dynamic_rnn:
            return v1.nn.static_rnn(self._cell, inputs, *others, **named)  # its parameters have the same order
        return super().__call__(inputs, *others, **named)

    def _run(self, inputs: tf.Tensor, initial_state: Any, dtype: Any, lengths: Any, scope: Any) -> tuple[Any, Any]:
        if self._use_dynamic_rnn:
            return v1.nn.dynamic_rnn(self._cell, inputs, lengths, initial_state, dtype, time_major=True, scope=scope)
        outputs, state = self(tf.unstack(inputs), initial_state, dtype, lengths, scope)
        return tf.stack(outputs), state


class TimeReversedFusedRNN(_OfWholeSequence):
    """Runs a FusedRNNCell over the reversed sequences, and reverses its outputs."""

    def __init__(self, cell: FusedRNNCell) -> None:
        self._cell = cell

    def _run(self, inputs: tf.Tensor, initial_state: Any, dtype: Any, lengths: Any, scope: Any) -> tuple[Any, Any]:
        outputs, state = self._cell(_reversed(inputs, lengths), initial_state, dtype, lengths, scope)
        return _reversed(outputs, lengths), state


def _reversed(inputs: tf.Tensor, lengths: Any) -> tf.Tensor:
    if lengths is None:
        return tf.reverse(inputs, [0])
    return tf.reverse_sequence(inputs, lengths, seq_axis=0, batch_axis=1)


def stack_bidirectional_dynamic_rnn(
    cells_fw: Sequence[Any],
    cells_bw: Sequence[Any],
    inputs: tf.Tensor,
    initial_states_fw: Sequence[Any] | None = None,
    initial_states_bw: Sequence[Any] | None = None,
    dtype: Any = None,
    sequence_length: Any = None,
    parallel_iterations: int | None = None,
    time_major: bool = False,
    scope: Any = None,
    swap_memory: bool = False,
) -> tuple[tf.Tensor, tuple[Any, ...], tuple[Any, ...]]:
    """Return (outputs of the last layer, `[batch, time, forward + backward units]`; forward states; backward states).

    As in TensorFlow 1.15, contrib/rnn/python/ops/rnn.py: the input of each layer is the concatenated outputs of the
    layer below. Variables are `stack_bidirectional_rnn/cell_<layer>/bidirectional_rnn/{fw,bw}/<cell>/...`.

    Args:
      cells_fw: forward cells, one per layer.
      cells_bw: backward cells, one per layer.
      inputs: float `[batch, time, inputs]`; with time_major `[time, batch, inputs]`.
      initial_states_fw: initial states of the forward cells, one per layer; None: zeros.
      initial_states_bw: initial states of the backward cells, one per layer; None: zeros.
      dtype: as in `tf.nn.bidirectional_dynamic_rnn`.
      sequence_length: as in `tf.nn.bidirectional_dynamic_rnn`.
      parallel_iterations: as in `tf.nn.bidirectional_dynamic_rnn`.
      time_major: inputs and outputs are `[time, batch, ...]`.
      scope: variable scope; None: `stack_bidirectional_rnn`.
      swap_memory: as in `tf.nn.bidirectional_dynamic_rnn`.

    Raises:
      ValueError: cells_fw and cells_bw are empty or differ in length.
    """

    def layer(inputs: Any, cell_fw: Any, cell_bw: Any, first_fw: Any, first_bw: Any) -> tuple[Any, ...]:
        outputs, states = v1.nn.bidirectional_dynamic_rnn(
            cell_fw, cell_bw, inputs, initial_state_fw=first_fw, initial_state_bw=first_bw,
            sequence_length=sequence_length, parallel_iterations=parallel_iterations, dtype=dtype,
            swap_memory=swap_memory, time_major=time_major,
        )  # fmt: skip
        return (tf.concat(outputs, 2), *states)

    return _stacked(layer, inputs, (cells_fw, cells_bw), (initial_states_fw, initial_states_bw), scope)


def stack_bidirectional_rnn(
    cells_fw: Sequence[Any],
    cells_bw: Sequence[Any],
    inputs: Sequence[tf.Tensor],
    initial_states_fw: Sequence[Any] | None = None,
    initial_states_bw: Sequence[Any] | None = None,
    dtype: Any = None,
    sequence_length: Any = None,
    scope: Any = None,
) -> tuple[Sequence[tf.Tensor], tuple[Any, ...], tuple[Any, ...]]:
    """Like `stack_bidirectional_dynamic_rnn`, but inputs and outputs are lists of tensors `[batch, ...]`."""

    def layer(inputs: Any, cell_fw: Any, cell_bw: Any, *first: Any) -> tuple[Any, ...]:
        return v1.nn.static_bidirectional_rnn(cell_fw, cell_bw, inputs, *first, dtype, sequence_length)

    return _stacked(layer, inputs, (cells_fw, cells_bw), (initial_states_fw, initial_states_bw), scope)


def _stacked(layer: Callable[..., tuple[Any, ...]], inputs: Any, cells: Any, initial_states: Any, scope: Any) -> Any:
    """Return (outputs of the last layer, forward states, backward states).

    Args:
      layer: (inputs, forward cell, backward cell, their first states) -> (outputs, forward state, backward state).
      inputs: those of the first layer.
      cells: (forward cells, backward cells), each with one per layer.
      initial_states: (those of the forward cells, those of the backward cells), each with one per layer; None: zeros.
      scope: as in `stack_bidirectional_dynamic_rnn`.
    """
    forward, backward = cells
    if not forward or len(forward) != len(backward):
        raise ValueError(
            f"cells_fw and cells_bw need the same length, at least 1, but have {len(forward)} and {len(backward)}."
        )
    initial_states = [states_of_cells or [None] * len(forward) for states_of_cells in initial_states]
    states_of_layers = []
    with v1.variable_scope(scope or "stack_bidirectional_rnn"):
        for number, arguments in enumerate(zip(*cells, *initial_states, strict=True)):
            with v1.variable_scope(f"cell_{number}"):
                inputs, *final_states = layer(inputs, *arguments)
            states_of_layers.append(final_states)
    return (inputs, *zip(*states_of_layers, strict=True))
