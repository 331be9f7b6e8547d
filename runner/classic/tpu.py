"""`tf.compat.v1.estimator.tpu`: TPUEstimator and its classes. Without a TPUStrategy they work on CPUs and GPUs."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from runner.classic import run_config
from runner.classic.estimator import Estimator
from runner.classic.estimator_spec import EstimatorSpec
from runner.classic.inputs import named_only
from runner.data.inputs import Input
from runner.hooks.builtin_hooks import checked
from runner.model_fn import ModeKeys
from runner.types import copied_params


class _TPUConfig(NamedTuple):
    iterations_per_loop: int = 2
    num_shards: int | None = None
    num_cores_per_replica: int | None = None
    per_host_input_for_training: Any = True
    tpu_job_name: str | None = None
    initial_infeed_sleep_secs: int | None = None
    input_partition_dims: Any = None
    eval_training_input_configuration: int = 2
    experimental_host_call_every_n_steps: int = 1
    experimental_allow_per_host_v2_parallel_get_next: bool = False
    experimental_feed_hook: Any = None


class TPUConfig(_TPUConfig):
    """Settings of infeed and sharding. They have no effect, and are kept for code that reads them.

    Raises:
      ValueError: a value is none that tf.estimator allowed.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> TPUConfig:
        config = super().__new__(cls, *args, **kwargs)
        input_kind = config.per_host_input_for_training
        if isinstance(input_kind, bool):
            config = config._replace(per_host_input_for_training=input_kind + 1)  # PER_HOST_V1 or PER_SHARD_V1
        for name, number in zip(("iterations_per_loop", "num_shards"), config[:2], strict=True):
            if isinstance(number, int) and number < 1:  # not a time such as "300s"
                raise ValueError(f"TPUConfig({name}={number}): it must be positive.")
        if config.num_cores_per_replica not in (None, 1, 2, 4, 8, 16, 32, 64, 128):
            raise ValueError(f"TPUConfig(num_cores_per_replica={config[2]}): it must be a power of 2 up to 128.")
        _check_partitions(config)
        eval_input = config.eval_training_input_configuration
        if eval_input not in (InputPipelineConfig.PER_HOST_V1, InputPipelineConfig.SLICED):
            raise ValueError(
                f"TPUConfig(eval_training_input_configuration={eval_input}): it must be PER_HOST_V1 or SLICED."
            )
        return config


def _check_partitions(config: Any) -> None:
    dimensions = config.input_partition_dims
    if dimensions is None:
        return
    is_split = config.num_cores_per_replica is not None
    is_input_per_host = config.per_host_input_for_training == InputPipelineConfig.PER_HOST_V2
    if len(dimensions) not in (1, 2) or not (is_split and is_input_per_host):
        raise ValueError(
            f"TPUConfig(input_partition_dims={dimensions!r}): it must be a list of one or two, with "
            "per_host_input_for_training=InputPipelineConfig.PER_HOST_V2 and num_cores_per_replica."
        )


class InputPipelineConfig:
    """Values of TPUConfig(per_host_input_for_training=). They have no effect: `Input.shard` divides the input."""

    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


class RunConfig(run_config.RunConfig):
    """Like `tf.estimator.RunConfig`, with a TPUConfig.

    Args:
      tpu_config: a TPUConfig; None: TPUConfig().
      evaluation_master, master: addresses that only the attributes of these names give; None: as in
        `tf.estimator.RunConfig`. Give a TPUStrategy as `train_distribute` instead.
      cluster: a cluster resolver with these addresses, and the `cluster_spec`; None: there is none.
      **kwargs: as in `tf.estimator.RunConfig`.

    Raises:
      ValueError: master and cluster are given.
    """

    def __init__(
        self,
        tpu_config: TPUConfig | None = None,
        evaluation_master: str | None = None,
        master: str | None = None,
        cluster: Any = None,
        **kwargs: Any,
    ) -> None:
        if cluster is not None and master is not None:
            raise ValueError("RunConfig(master=..., cluster=...): give only one; the cluster has its own master.")
        if cluster is not None:
            master = cluster.master()
        given = {"_master": master, "_evaluation_master": evaluation_master, "_resolver": cluster}
        for name, value in {"tpu_config": tpu_config or TPUConfig(), **given}.items():
            object.__setattr__(self, name, value)
        super().__init__(**kwargs)

    @property
    def cluster(self) -> Any:
        """The resolver that was given; None: none was. `place` is this process's place in the cluster of TF_CONFIG."""
        return vars(self)["_resolver"]

    @cluster.setter
    def cluster(self, place: Any) -> None:  # the constructor sets the field
        vars(self)["cluster"] = place

    @property
    def master(self) -> str:
        """The address that was given, or that of `tf.estimator.RunConfig`."""
        given: str | None = vars(self)["_master"]
        return super().master if given is None else given

    @property
    def evaluation_master(self) -> str:
        """The address that was given, or that of TF_CONFIG; outside of an evaluator else `master`."""
        given: str | None = vars(self)["_evaluation_master"]
        if given is not None:
            return given
        found = super().evaluation_master
        return found if found or self.task_type == "evaluator" else self.master

    @property
    def cluster_spec(self) -> tf.train.ClusterSpec:
        """The cluster of the resolver that was given; else as in `tf.estimator.RunConfig`."""
        resolver = vars(self)["_resolver"]
        return super().cluster_spec if resolver is None else resolver.cluster_spec()

    def replace(self, **changes: Any) -> RunConfig:
        tpu_config = changes.pop("tpu_config", self.tpu_config)  # type: ignore[attr-defined]
        config = super().replace(**changes)
        object.__setattr__(config, "tpu_config", tpu_config)
        return config  # type: ignore[return-value]


_Fields = collections.namedtuple(
    "_Fields",
    "mode predictions loss train_op eval_metrics export_outputs scaffold_fn host_call training_hooks evaluation_hooks "
    "prediction_hooks",
    defaults=[None] * 10,  # type: ignore[misc]
)


class TPUEstimatorSpec(_Fields):
    """The result of a model_fn for TPUEstimator. Every Estimator of the runner accepts it.

    Attributes:
      eval_metrics: (function, tensors): the function returns `eval_metric_ops`. The tensors are a list,
        passed by position, or a dict, passed by name.
      host_call: (function, tensors), called in TRAIN: the operations that the function returns run in each step.
      scaffold_fn: function without arguments that returns the Scaffold.
      Others: as in EstimatorSpec; hooks are tuples, without any ().

    Raises:
      ValueError: eval_metrics or host_call is not a pair.
      TypeError: its first part is not a function, or a hook is none.
    """

    __slots__ = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> TPUEstimatorSpec:
        given = _Fields(*args, **kwargs)._asdict()
        for name in ("eval_metrics", "host_call"):
            pair = given[name]
            is_pair = isinstance(pair, tuple | list) and len(pair) == 2
            has_function = is_pair and callable(pair[0])
            if pair is not None and not has_function:
                kind = TypeError if is_pair else ValueError
                raise kind(
                    f"TPUEstimatorSpec({name}={pair!r}): it must be (function, tensors), with a list or a dict of "
                    "tensors that are passed to the function."
                )
        for name in given:
            if name.endswith("_hooks"):
                given[name] = tuple(checked("hook", given[name]))
        return super().__new__(cls, **given)

    def as_runner_spec(self, mode: str) -> Any:
        """Return the equivalent EstimatorSpec of the runner, which calls this while it traces model_fn."""
        return self.as_estimator_spec().as_runner_spec(mode)

    def as_estimator_spec(self) -> EstimatorSpec:
        """Return the equivalent `tf.estimator.EstimatorSpec`."""
        train_op = self.train_op
        if self.host_call is not None and self.mode == ModeKeys.TRAIN:
            operations = tf.nest.flatten(_call_pair(self.host_call))
            train_op = tf.group(train_op, *[operation for operation in operations if operation is not None])
        fields = {name: value for name, value in self._asdict().items() if name in EstimatorSpec._fields}
        fields["train_op"] = train_op
        if self.eval_metrics is not None:
            fields["eval_metric_ops"] = _call_pair(self.eval_metrics)
        if self.scaffold_fn is not None:
            fields["scaffold"] = self.scaffold_fn()
        return EstimatorSpec(**fields)


class TPUEstimator(Estimator):
    """An Estimator whose input functions and model_fn get the batch size of the current mode as `params["batch_size"]`.

    Args:
      model_fn: as in Estimator.
      model_dir: as in Estimator.
      config: as in Estimator.
      params: as in Estimator; must not have a batch_size.
      use_tpu: True requires a TPUStrategy as `train_distribute` in config.
      train_batch_size: examples per batch in TRAIN; None: not passed.
      eval_batch_size: examples per batch in EVAL; None: not passed.
      predict_batch_size: examples per batch in PREDICT; None: not passed.
      warm_start_from: as in Estimator.
      Others: ignored.

    Raises:
      ValueError: use_tpu without a TPUStrategy, or params has a batch_size.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: Any = None,
        params: Any = None,
        use_tpu: bool = True,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        batch_axis: Any = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        export_to_cpu: bool = True,
        warm_start_from: Any = None,
        embedding_config_spec: Any = None,
        export_saved_model_api_version: Any = None,
    ) -> None:
        del batch_axis, eval_on_tpu, export_to_tpu, export_to_cpu, embedding_config_spec, export_saved_model_api_version
        strategy = None if config is None else config.train_distribute
        if use_tpu and not isinstance(strategy, tf.distribute.TPUStrategy):
            raise ValueError(
                "TPUEstimator(use_tpu=True): give RunConfig(train_distribute=tf.distribute.TPUStrategy(resolver)), or "
                "use_tpu=False to run without one."
            )
        if isinstance(params, Mapping) and "batch_size" in params:
            raise ValueError(
                "TPUEstimator(params=...): remove batch_size from params; train_batch_size, eval_batch_size and "
                "predict_batch_size set it."
            )
        self._batch_sizes = {
            ModeKeys.TRAIN: train_batch_size,
            ModeKeys.EVAL: eval_batch_size,
            ModeKeys.PREDICT: predict_batch_size,
        }
        super().__init__(_with_batch_size(model_fn, self._batch_sizes), model_dir, config, params, warm_start_from)

    def _as_input(self, input_fn: Any, mode: str) -> Any:
        """Return the input whose input_fn gets the batch size of `mode` in params."""
        size = self._batch_sizes[mode]
        if size is not None:
            source = input_fn if isinstance(input_fn, Input) else Input(named_only(input_fn))
            params = self.params if source.params is None else source.params
            input_fn = dataclasses.replace(source, params=copied_params(params, batch_size=size))
        return super()._as_input(input_fn, mode)


def _with_batch_size(model_fn: Callable[..., Any], sizes: Mapping[str, int | None]) -> Callable[..., Any]:
    """Return a function like `model_fn` that gets the batch size of its mode as params["batch_size"].

    Args:
      model_fn: the function, or a functools.partial of one.
      sizes: mode -> batch size; None: not passed.
    """
    if isinstance(model_fn, functools.partial):
        return functools.partial(_with_batch_size(model_fn.func, sizes), *model_fn.args, **model_fn.keywords)

    @functools.wraps(model_fn)
    def model_fn_with_batch_size(**arguments: Any) -> Any:
        size = sizes.get(arguments.get("mode", ""))
        if size is not None and "params" in arguments:
            arguments["params"] = copied_params(arguments["params"], batch_size=size)
        return model_fn(**arguments)

    return model_fn_with_batch_size


def _call_pair(pair: Any) -> Any:
    """Return the result of the function in (function, tensors), called with the tensors by position or by name."""
    function, tensors = pair
    return function(**tensors) if isinstance(tensors, Mapping) else function(*tensors)
