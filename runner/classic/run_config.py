"""tf.estimator's RunConfig: its arguments and TF_CONFIG, converted to a RunConfig of the runner."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import operator
import os
import zlib
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from runner import run_config
from runner.classic.compat.differences import WITHOUT_EFFECT
from runner.config.mistakes import ConfigError
from runner.distribute.cluster import Cluster, counted
from runner.distribute.strategy import is_parameter_server
from runner.distribute.tf_config import read_tf_config

_log = logging.getLogger(__name__)

_NOT_GIVEN: Any = object()

_SERVERS = (
    "Start each process with the same TF_CONFIG as `python -m runner.classic --strategy parameter_server SCRIPT` (or "
    "multi_worker), or give RunConfig train_distribute=tf.distribute.ParameterServerStrategy("
    "tf.distribute.cluster_resolver.TFConfigClusterResolver()) or MultiWorkerMirroredStrategy()."
)


def fits(value: Any, allowed: Any) -> bool:
    """Report whether `value` is of the type, or of one of the types, or fulfils the function `allowed`."""
    return isinstance(value, allowed) if isinstance(allowed, type | tuple) else bool(allowed(value))


def _takes_op(value: Any) -> bool:
    return callable(value) and [*inspect.signature(value).parameters] == ["op"]


_CHECKS: Mapping[str, tuple[Any, type[Exception], str]] = {
    "tf_random_seed": (int, ValueError, "it must be an integer"),
    "log_step_count_steps": (lambda value: value > 0, ValueError, "it must be positive"),
    "session_config": (tf.compat.v1.ConfigProto, ValueError, "it must be a tf.compat.v1.ConfigProto"),
    "device_fn": (_takes_op, ValueError, "it must be callable, with one argument 'op'"),
    "protocol": (lambda value: value in ("grpc", "grpc+verbs"), ValueError, "it must be 'grpc' or 'grpc+verbs'"),
    "experimental_max_worker_delay_secs": (int, ValueError, "it must be an integer"),
    "session_creation_timeout_secs": (lambda value: value > 0, ValueError, "it must be positive"),
    "service": (dict, TypeError, "in TF_CONFIG, it must be a JSON object"),
}
"""Property -> (what `fits` allows for a value other than None, type of the exception if it does not fit, text of what
is allowed). The runner's RunConfig checks the others."""

_PASSED_UNCHANGED = (
    "save_summary_steps", "keep_checkpoint_max", "keep_checkpoint_every_n_hours", "log_step_count_steps",
    "checkpoint_save_graph_def",
)  # fmt: skip
"""Arguments that the runner's RunConfig takes under the same name."""

_OWN_ATTRIBUTES = (*WITHOUT_EFFECT, "tf_config")
"""Arguments that the runner's RunConfig does not have, which are set as attributes."""


class RunConfig(run_config.RunConfig):
    """`tf.estimator.RunConfig` on the runner.

    The positional arguments are those of TensorFlow 2.15, in the same order. The other fields of `runner.RunConfig`
    (`nan=`, `precision=`, `steps_per_loop=`, ...) are keyword arguments. The cluster and the task of this process come
    from the environment variable TF_CONFIG.

    Attributes:
      service: the value of "service" in TF_CONFIG; None: there is none.
      tf_config: the text of TF_CONFIG.

    Raises:
      ValueError: a value is not allowed, or TF_CONFIG has no valid task.
      TypeError: an argument does not exist.
    """

    tf_config: str
    session_config: Any

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: int | None = _NOT_GIVEN,
        save_checkpoints_secs: float | None = _NOT_GIVEN,
        session_config: Any = None,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = 10000,
        log_step_count_steps: int | None = 100,
        train_distribute: Any = None,
        device_fn: Any = None,
        protocol: str | None = None,
        eval_distribute: Any = None,
        experimental_distribute: Any = None,
        experimental_max_worker_delay_secs: int | None = None,
        session_creation_timeout_secs: float | None = 7200,
        checkpoint_save_graph_def: bool = True,
        *,
        tf_config: str | None = None,
        **engine: Any,
    ) -> None:
        if tf_config is None:
            tf_config = os.environ.get("TF_CONFIG", "")
        given = locals()
        for name in _OWN_ATTRIBUTES:
            object.__setattr__(self, name, given[name])
        train_distribute, eval_distribute = _strategies(train_distribute, eval_distribute, experimental_distribute)
        cluster = _cluster_of(tf_config, has_strategy=train_distribute is not None)
        self._check(given)
        if cluster.is_evaluator or (cluster.is_server and is_parameter_server(train_distribute)):
            train_distribute = None  # evaluators do not join the training cluster, and servers only serve it
        cadences = _cadences(save_checkpoints_steps, save_checkpoints_secs)
        engine.update((name, value or None) for name, value in cadences.items())
        engine.setdefault("cluster", cluster)
        engine.setdefault("summaries_from_first_step", True)
        engine.setdefault("has_evaluator", "evaluator" in cluster.tasks and not cluster.is_evaluator)
        try:
            super().__init__(
                model_dir=_model_dir(model_dir, self._environment.get("model_dir")),
                tf_random_seed=_seed(tf_random_seed, cluster),
                **{name: given[name] for name in _PASSED_UNCHANGED},
                train_distribute=train_distribute,
                eval_distribute=eval_distribute,
                **engine,
            )
        except ConfigError as error:
            raise ValueError(str(error)) from error
        # As in tf.estimator, programs read the values that they gave: 0 for a cadence that is off, and None for a seed
        # that was not given. The engine reads `seed`.
        object.__setattr__(self, "_seed", self.tf_random_seed)
        is_drawn = isinstance(tf_random_seed, run_config.DrawnSeed)
        object.__setattr__(self, "tf_random_seed", None if is_drawn else tf_random_seed)
        for name, cadence in cadences.items():
            object.__setattr__(self, name, cadence)
        if session_config is None and cluster.tasks:
            object.__setattr__(self, "session_config", default_session_config(self.task_type, cluster.task_index))

    def _check(self, given: Mapping[str, Any]) -> None:
        for name, (allowed, error, text) in _CHECKS.items():
            value = given[name] if name in given else getattr(self, name)
            if value is not None and not fits(value, allowed):
                raise error(f"RunConfig({name}={value!r}): {text}.")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        fields = {field.name for field in dataclasses.fields(cls)}
        for name in fields.union(_OWN_ATTRIBUTES).intersection(vars(cls)):
            own = vars(cls)[name]
            # A subclass replaced the field by a property: let the constructor's assignment to it do nothing.
            if isinstance(own, property) and own.fset is None:
                setattr(cls, name, own.setter(lambda self, value: None))

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    seed = property(operator.attrgetter("_seed"))

    @property
    def evaluation_strategy(self) -> Any:
        """The strategy of evaluation and prediction. As in tf.estimator, without eval_distribute it is one device."""
        return None if self.eval_distribute == "default" else self.eval_distribute

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy of the same class with `changes`. Attributes that were set after construction are copied, too.

        Setting one of save_checkpoints_steps and save_checkpoints_secs turns the other off.

        Raises:
          ValueError: the constructor does not take an argument of that name.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["cluster"] = self.place
        own_attributes = {name: getattr(self, name) for name in _OWN_ATTRIBUTES}
        unknown = sorted({*changes} - {*fields, *own_attributes} - {"experimental_distribute"})
        if unknown:
            raise ValueError(
                f"RunConfig.replace({', '.join(unknown)}): only arguments of the constructor can be replaced."
            )
        changed_cadences = [name for name in run_config.SAVE_CADENCES if changes.get(name) is not None]
        if len(changed_cadences) == 1:
            changes = {**dict.fromkeys(run_config.SAVE_CADENCES), **changes}
        changed = RunConfig(**{**fields, **own_attributes, **changes})
        copied = object.__new__(type(self))  # a subclass's constructor may take other arguments
        copied.__dict__.update({**self.__dict__, **changed.__dict__})
        if "tf_random_seed" not in changes:  # the constructor above has drawn another one, if none was given
            object.__setattr__(copied, "_seed", self.seed)
        return copied

    # --- from TF_CONFIG -----------------------------------------------------------------------------------------

    @property
    def _environment(self) -> Mapping[str, Any]:
        return json.loads(self.tf_config or "{}")

    @property
    def service(self) -> Mapping[str, Any] | None:
        return self._environment.get("service")

    @property
    def cluster_spec(self) -> tf.train.ClusterSpec:
        """The processes that train or serve; empty for a single process or an evaluator."""
        if self.place.is_evaluator:
            return tf.train.ClusterSpec({})
        written = self._environment.get("cluster") or {}
        chief = "master" if "master" in written else "chief"  # "master" is its name in TensorFlow 1
        tasks: dict[str, list[str]] = {}
        for kind, addresses in self.place.tasks.items():
            name = chief if kind == "chief" else kind
            tasks[name] = list(addresses)
        return tf.train.ClusterSpec(tasks)

    @property
    def task_type(self) -> str:
        task = self._environment.get("task") or {}
        is_master = task.get("type") == "master"  # the chief's name in TensorFlow 1
        return "master" if is_master else self.place.task_type

    @property
    def master(self) -> str:
        """The address of this process; "" for a single process or an evaluator."""
        if self.place.is_evaluator:
            return ""
        address = ""
        num_tasks = sum(map(len, self.place.tasks.values()))
        if num_tasks > 1:
            address = f"grpc://{self.place.tasks[self.place.task_type][self.place.task_index]}"
        return str(self._environment.get("session_master", address))

    @property
    def evaluation_master(self) -> str:
        evaluates = self.place.is_evaluator or not self.place.tasks
        if not evaluates:
            return ""
        return str(self._environment.get("eval_session_master", ""))

    @property
    def num_worker_replicas(self) -> int:
        """The number of worker processes, including the chief; 0 in an evaluator."""
        return 0 if self.place.is_evaluator else self.place.num_workers

    @property
    def num_ps_replicas(self) -> int:
        return 0 if self.place.is_evaluator else self.place.num_ps

    @property
    def global_id_in_cluster(self) -> int | None:
        """The index of this process among all processes in the order chief, other types by name, parameter servers.

        None in an evaluator.
        """
        if self.place.is_evaluator:
            return None
        tasks = self.place.tasks
        if self.place.task_type not in tasks:
            return self.task_id
        order = sorted(tasks, key=lambda kind: (kind != "chief", kind == "ps", kind))
        before = order[: order.index(self.place.task_type)]
        return sum(len(tasks[kind]) for kind in before) + self.task_id

    def check_strategy(self) -> None:
        """Check that train_distribute is given if there are several processes. Without it, each process would train a
        separate model in the same model_dir.

        Raises:
          ValueError: it is not given.
        """
        tasks = {kind: places for kind, places in self.place.tasks.items() if kind != "evaluator"}
        if self.train_distribute is None and sum(map(len, tasks.values())) > 1:
            raise ValueError(
                f"TF_CONFIG names a cluster of {counted(tasks)}, but RunConfig has no train_distribute. {_SERVERS}"
            )

    def say_without_effect(self) -> None:
        """Warn about each argument that was given but has no effect."""
        for name, (default, reason) in WITHOUT_EFFECT.items():
            defaults = (default_session_config(), default_session_config(self.task_type, self.task_id))
            was_given = name != "session_config" or self.session_config not in defaults
            if getattr(self, name) != default and was_given:
                _log.warning("RunConfig(%s=...) has no effect: %s.", name, reason)

    def say_who_evaluates(self) -> None:
        """Warn that the chief may evaluate as well, if this process is an evaluator that TF_CONFIG does not list."""
        if self.place.is_evaluator and self.place.tasks and "evaluator" not in self.place.tasks:
            _log.warning(
                "TF_CONFIG: cluster does not list this evaluator. If the chief's TF_CONFIG does not list it either, "
                'the chief evaluates as well. List it in every task: "evaluator": ["host:port"].'
            )


def default_session_config(task_type: str = "", index: int = 0) -> Any:
    """Return the session_config that tf.estimator used if none was given; None for an unknown type of task.

    In a cluster it has filters for the devices that the task may use. Without a task it is that of an Estimator, which
    has none.
    """
    filters_of_tasks = {
        "": [], "master": ["/job:ps", "/job:master"], "chief": ["/job:ps", "/job:chief"],
        "worker": ["/job:ps", f"/job:worker/task:{index}"],
        "ps": ["/job:ps", "/job:worker", "/job:chief", "/job:master"],
    }  # fmt: skip
    if task_type not in filters_of_tasks:
        return None
    config = tf.compat.v1.ConfigProto(allow_soft_placement=True, device_filters=filters_of_tasks[task_type])
    config.graph_options.rewrite_options.meta_optimizer_iterations = 1  # RewriterConfig.ONE
    return config


def _cadences(steps: Any, secs: Any) -> Mapping[str, Any]:
    """Return name -> value of save_checkpoints_steps and save_checkpoints_secs; if neither is given, every 600 s."""
    if steps is _NOT_GIVEN and secs is _NOT_GIVEN:
        secs = 600
    given = zip(run_config.SAVE_CADENCES, (steps, secs), strict=True)
    return {name: None if cadence is _NOT_GIVEN else cadence for name, cadence in given}


def _seed(seed: int | None, cluster: Cluster) -> int | None:
    """Return the seed of the engine, which takes no negative one; None: draw a new one. In a cluster, None becomes a
    number derived from the addresses in TF_CONFIG, because all workers need the same seed.
    """
    if seed is None and cluster.tasks:
        return zlib.crc32(repr(sorted(cluster.tasks.items())).encode())
    is_negative = seed is not None and seed < 0
    return seed % 2**32 if is_negative else seed  # type: ignore[operator]


def _model_dir(given: Any, in_tf_config: str | None) -> str | None:
    """Return the model_dir of the argument `given` or of TF_CONFIG; None: neither has one.

    Raises:
      ValueError: that in TF_CONFIG is "", or the two differ.
    """
    if given is not None:
        given = run_config.local_folder("RunConfig(model_dir=", os.fspath(given))
    if in_tf_config is None:
        return given
    if not in_tf_config:
        raise ValueError('TF_CONFIG: model_dir="": give a folder, or leave model_dir out.')
    in_tf_config = run_config.local_folder("TF_CONFIG: model_dir=", in_tf_config)
    if given is not None and given != in_tf_config:
        raise ValueError(
            f"RunConfig(model_dir={given!r}) and model_dir={in_tf_config!r} in TF_CONFIG differ. Give only one."
        )
    return in_tf_config


def _strategies(train: Any, evaluation: Any, both: Any) -> tuple[Any, Any]:
    """Return the strategies (of training, of evaluation).

    Args:
      train: the argument train_distribute.
      evaluation: the argument eval_distribute.
      both: the argument experimental_distribute, a DistributeConfig that has both; None: not given.

    Raises:
      ValueError: a strategy is not supported, or both forms are given.
    """
    for strategy in (train, evaluation):
        if isinstance(strategy, tf.compat.v1.distribute.experimental.ParameterServerStrategy):
            raise ValueError(
                "tf.compat.v1.distribute.experimental.ParameterServerStrategy needs between-graph replication, which "
                "no longer exists. "
                f"{_SERVERS}"
            )
    if both is None:
        return train, evaluation
    if getattr(both, "remote_cluster", None):
        raise ValueError(
            "RunConfig(experimental_distribute=DistributeConfig(remote_cluster=...)): standalone clients are not "
            "supported. Start this script once for each task, with TF_CONFIG in its environment."
        )
    if train is not None or evaluation is not None:
        raise ValueError(
            "RunConfig(experimental_distribute=...) cannot be combined with train_distribute and eval_distribute: "
            "remove experimental_distribute."
        )
    return getattr(both, "train_distribute", None), getattr(both, "eval_distribute", None)


def _cluster_of(tf_config: str, *, has_strategy: bool) -> Cluster:
    """Return the cluster and the task of this process from TF_CONFIG.

    Args:
      tf_config: the text of TF_CONFIG.
      has_strategy: RunConfig has a train_distribute.

    Raises:
      ValueError: TF_CONFIG is not valid, such as a cluster without a chief and without a strategy.
    """
    try:
        cluster = read_tf_config(tf_config, will_connect=False)
        # Read it again with the checks of a cluster whose processes will be connected.
        if has_strategy and not cluster.is_evaluator:
            cluster = read_tf_config(tf_config)
    except ConfigError as error:
        raise ValueError(str(error)) from error  # the type that tf.estimator raised
    if cluster.is_evaluator and "master" in (json.loads(tf_config).get("cluster") or {}):
        raise ValueError("TF_CONFIG: a master evaluates itself. Name it chief in all tasks to have an evaluator.")
    if cluster.is_evaluator:  # it reads checkpoints and needs no other process
        return cluster
    if "ps" in cluster.tasks:
        return _with_coordinator(cluster)
    if cluster.tasks and not has_strategy and "chief" not in cluster.tasks:
        raise ValueError(
            f'TF_CONFIG: cluster has {counted(cluster.tasks)} but no chief. Add "chief": ["host:port"], the process '
            "that writes checkpoints, or give RunConfig a train_distribute."
        )
    if not cluster.tasks and (cluster.task_type != "worker" or cluster.task_index):
        raise ValueError(
            f"TF_CONFIG: task is {cluster.task_type} {cluster.task_index}, but there is no cluster. Add the addresses "
            "of all tasks, or remove the task."
        )
    return cluster


def _with_coordinator(cluster: Cluster) -> Cluster:
    """Return `cluster`, which has parameter servers; if it has no chief, worker 0 becomes the chief.

    Raises:
      ValueError: there is no worker besides the chief.
    """
    changed = cluster.with_chief()
    if "chief" in cluster.tasks or "worker" in changed.tasks:
        return changed
    raise ValueError(
        f"TF_CONFIG: cluster has {counted(cluster.tasks)}, but parameter servers need a coordinator (the chief, or "
        'else worker 0) and at least one other worker. Add "chief": ["host:port"] or another worker.'
    )
