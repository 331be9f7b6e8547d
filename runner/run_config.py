"""RunConfig: the `config` that model_fn and input_fn get."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.schema import SEED_BITS, CheckpointConfig, Config, TrackingConfig, setting_at
from runner.config.settings.limits import check_fields
from runner.config.settings.metric_rules import KeepBest as KeepBest
from runner.config.settings.step_range import StepRange
from runner.config.validation import check_backend, compile_pattern
from runner.distribute.cluster import Cluster
from runner.remote.mirror import local_folder, mirror_of, remote_dir

_log = logging.getLogger(__name__)

SAVE_CADENCES = ("save_checkpoints_steps", "save_checkpoints_secs")
_NOT_GIVEN: Any = object()
_NOT_EAGER = {"not_eager": True}


class DrawnSeed(int):
    """A seed that was drawn because none was given. Each process draws its own; workers that train together use the
    chief's.
    """


def _key(key: str, *, zero: bool = False, **default: Any) -> Any:
    """Declare a field that stands for a key of the config: it has the default and the metadata of the key's field.

    Args:
      key: the full name of the key, such as train.log_steps.
      zero: also allow 0, which means None, as in tf.estimator.
      default: the field's default if it differs from the key's.
    """
    setting = setting_at(key)
    assert setting is not None, key
    metadata = {**setting.metadata, "key": key, "zero": zero}
    return dataclasses.field(metadata=metadata, **{"default": setting.default, **default})


@dataclasses.dataclass(frozen=True)
class WarmStartWords:
    """The user's own names for the settings of a WarmStart, which messages quote.

    Attributes:
      settings: the name of the settings as a whole.
      written: an expression of `include` or `rename` -> the text that the user wrote for it, if the two differ.
    """

    settings: str = "train.warm_start"
    checkpoint: str = "train.warm_start.checkpoint"
    include: str = "train.warm_start.include"
    rename: str = "train.warm_start.rename"
    vocabularies: str = "train.warm_start.vocabularies"
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, expression: str) -> Any:
        """Return what the user wrote for `expression`."""
        return self.written.get(expression, expression)


# Not the class of `train.warm_start`: half of these fields are no keys, OmegaConf declares only lists and dicts where a
# script may give any sequence and mapping, and a `Vocabulary` needs TensorFlow.
@dataclasses.dataclass(frozen=True)
class WarmStart:
    r"""Values of another checkpoint with which a new model begins.

    Attributes:
      checkpoint: path of a checkpoint, or of a folder, which stands for its newest undamaged checkpoint or for the
        checkpoint of a SavedModel. The runner's, tf.estimator's and tf.train.Checkpoint's formats are read.
      include: regular expressions. A variable is read, trainable or not, if one of them matches its whole name. None:
        every trainable variable.
      rename: a variable's name, a prefix of names or a regular expression -> its replacement, the name in the
        checkpoint; `\1` stands for a group of the expression.
      vocabularies: a variable's name -> a `runner.checkpoint.vocabulary.Vocabulary`, which maps each token to its row
        in the checkpoint if the order of tokens has changed. With `include=()` only these variables are read.
      only_trainable: of the variables that `include` matches, read only the trainable ones.
      optimizer_state: also read the optimizer's state (slots) of those variables whose state `include` matches.
      strict: raise an error for a variable that the checkpoint lacks; False: such a variable keeps its initial value.
      words: the user's names for these settings, for messages.

    Raises:
      ValueError: an expression does not compile.
    """

    checkpoint: str
    include: Sequence[str] | None = None
    rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
    vocabularies: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    only_trainable: bool = False
    optimizer_state: bool = False
    strict: bool = False
    words: WarmStartWords = WarmStartWords()

    def __post_init__(self) -> None:
        for setting, patterns in ((self.words.include, self.include or ()), (self.words.rename, self.rename)):
            for pattern in patterns:
                compile_pattern(setting, pattern, self.words.of(pattern))


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of a run: its folder, seed, cadences, training options and devices. Field names are tf.estimator's.

    Attributes:
      model_dir: folder of checkpoints and events; None: the Estimator makes a temporary one. In place of a URL
        (s3://, gs://, az://) stands the local folder that is mirrored there; `remote_dir` is the URL.
      tf_random_seed: determines initial values, shuffling and dropout; None: one is drawn.
      save_summary_steps: write summaries every N steps; None: never.
      summaries_from_first_step: count N from the first step of the run (1, 1 + N, 1 + 2N), as tf.estimator does; False:
        write summaries at the first step and at multiples of N.
      save_checkpoints_steps, save_checkpoints_secs: save every N steps or N seconds; give at most one. Neither given:
        every 600 seconds. Both None: only at the end of training.
      keep_checkpoint_max: number of newest checkpoints to keep; None or 0: all.
      keep_best: also keep the best checkpoints by these metrics.
      keep_checkpoint_every_n_hours: also keep one checkpoint permanently every N hours; None: no.
      save_checkpoints_asynchronously: write checkpoints from a copy in memory while training continues. Checkpoint
        listeners, evaluations, the end of training and errors wait until the file is durable. "auto": only if the copy
        fits into free memory.
      checkpoint_input_state: how a checkpoint remembers its place in the training input. "saved": it holds the state of
        the iterator, shuffle buffers included. "counted": it holds the number of batches read, and a resumed run reads
        them again. "auto": counted if the state is larger than the variables and the input is seeded and in a fixed
        order throughout; else saved.
      checkpoint_save_graph_def: write the graph of the training step beside checkpoints, for TensorFlow 1's tools:
        `graph.pbtxt`, and a `.meta` file of each checkpoint. A script's RunConfig has True, as tf.estimator's has.
      warm_start: values with which a new model begins; ignored on resume.
      log_step_count_steps: log loss and speed every N steps; None: never.
      steps_per_loop: steps per graph call; None: grows until one call takes about a second. A call always ends at the
        next save, evaluation or last step.
      tensorboard: write event files of training and evaluation.
      nan: what to do at the first loss that is not finite, or before a save of variables that have become so. "stop":
        end with an error. "ignore": continue. "rollback": return to the last checkpoint and skip the bad batch, at most
        three times in a run.
      clip_global_norm: scale down the gradient of the global batch if its norm is larger than this; None: no clipping.
      gradient_accumulation: number of micro-batches into which each replica splits its batch; 1: not split.
      learning_rate_scaling: scale the learning rate by the number of replicas ("linear"), by its square root ("sqrt"),
        or not at all ("none").
      warmup_steps: number of updates over which the learning rate rises to its value; 0: none.
      jit: compile each replica's computation, from batch to gradients, with XLA.
      log_gradient_norm: log the global norm of the gradient, before clipping, together with the loss.
      train_metrics: also compute and report `eval_metric_ops` in TRAIN with `train_op=`; with `optimizer=` they always
        are.
      precision: compute type of Keras 3 layers. "float32" leaves it to the layers; or "mixed_bfloat16",
        "mixed_float16".
      ema_decay: keep exponential moving averages of the weights with this decay, and evaluate those; None: no.
      check_numerics: check the result of every operation of a training step, and name the first operation that is not
        finite with its line in model_fn. Runs one step per graph call; for debugging.
      check_replicas: at each save, compare the variables of all replicas and workers bit by bit, and end with an error
        that names the first that differs. For debugging.
      eager: run model_fn eagerly in each training step, so that print and a debugger show values. Needs `optimizer=`
        and the default strategy; evaluation and prediction are still traced. For debugging.
      profile_steps: global steps to profile for xprof or TensorBoard; None: none.
      train_distribute: strategy of training; None: TensorFlow's default.
      eval_distribute: strategy of evaluation and prediction; None: that of training; "default": TensorFlow's default.
      cluster: the role of this process in the cluster.
      has_evaluator: another process evaluates the checkpoints (its RunConfig has `Cluster("evaluator", 0)` and the same
        model_dir), so `train_and_evaluate` does not evaluate here.
      generation: number of this start of the run; 0: starts are not counted.
      export_dir: parent folder of the exporters' folders; None: `export` in model_dir. In place of a URL stands the
        local folder that is mirrored there.
      tracking: where a script's Estimator is recorded: a value of `tracking.backend` ("mlflow", "csv", "none", a class
        name, a list), or a `TrackingConfig` with the other keys of `tracking`. Other processes ship the journal in
        model_dir. None: no journal, no progress, nothing recorded.
      progress: how to show progress if `tracking` is given: "auto", "rich", "plain" or "off".

    Raises:
      ValueError: both save cadences are given, a number is out of its limits, or two settings exclude each other.
    """

    model_dir: str | None = _key("model_dir")
    tf_random_seed: int | None = _key("run.seed")
    save_summary_steps: int | None = _key("train.summary_steps", zero=True)
    summaries_from_first_step: bool = False
    save_checkpoints_steps: int | None = _key("checkpoint.save_steps")
    save_checkpoints_secs: float | None = _key("checkpoint.save_secs", default=_NOT_GIVEN)
    keep_checkpoint_max: int | None = _key("checkpoint.keep_max", zero=True)
    keep_best: KeepBest | None = None
    keep_checkpoint_every_n_hours: float | None = _key("checkpoint.keep_every_hours")
    save_checkpoints_asynchronously: bool | str = _key("checkpoint.asynchronous")
    checkpoint_input_state: str = _key("checkpoint.input_state")
    checkpoint_save_graph_def: bool = False
    warm_start: WarmStart | None = None
    log_step_count_steps: int | None = _key("train.log_steps", zero=True)
    steps_per_loop: int | None = _key("train.steps_per_loop", default=None)
    tensorboard: bool = _key("tracking.tensorboard")
    nan: str = _key("train.nan")
    clip_global_norm: float | None = _key("train.clip_global_norm")
    gradient_accumulation: int = _key("train.gradient_accumulation")
    learning_rate_scaling: str = _key("train.learning_rate_scaling")
    warmup_steps: int = _key("train.warmup_steps")
    jit: bool = _key("train.jit")
    log_gradient_norm: bool = _key("train.log_gradient_norm")
    train_metrics: bool = _key("train.metrics")
    precision: str = _key("train.precision")
    ema_decay: float | None = _key("train.ema_decay")
    profile_steps: StepRange | None = None
    check_numerics: bool = dataclasses.field(default=False, metadata=_NOT_EAGER)
    check_replicas: bool = False
    eager: bool = _key("run.eager")
    train_distribute: Any = dataclasses.field(default=None, metadata=_NOT_EAGER)
    eval_distribute: Any = None
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    has_evaluator: bool = False
    generation: int = 0
    export_dir: str | None = _key("export.dir")
    tracking: Any = None
    progress: str = _key("run.progress")

    @classmethod
    def from_config(cls, config: Config, **given: Any) -> RunConfig:
        """Build the RunConfig of a run: the arguments in `given`, and for every other one the value of its key in
        `config`.
        """
        arguments = dict(given)
        for field in dataclasses.fields(cls):
            if "key" in field.metadata and field.name not in given:
                value_of = operator.attrgetter(field.metadata["key"])
                arguments[field.name] = value_of(config)
        return cls(**arguments)

    def __post_init__(self) -> None:
        self._check_accumulation()
        self._set_local_folders()
        self._set_save_cadence()
        if self.tf_random_seed is None:
            object.__setattr__(self, "tf_random_seed", DrawnSeed(secrets.randbits(SEED_BITS)))
        if self.tracking is not None:
            self._check_tracking()
        if not self.tensorboard:
            object.__setattr__(self, "save_summary_steps", None)
        if self.check_numerics and (self.jit or self.precision == "mixed_float16"):
            other = "jit=True" if self.jit else "precision='mixed_float16'"
            raise ValueError(f"RunConfig(check_numerics=True, {other}) cannot be combined. Unset one of them.")
        if self.eager:
            self._check_eager()
        if self.check_numerics or self.eager:
            object.__setattr__(self, "steps_per_loop", 1)
        check_fields(self)

    def _set_local_folders(self) -> None:
        """Replace the folders by paths, and URLs by the local folders that are mirrored there."""
        if self.model_dir is not None:
            path = os.fspath(self.model_dir)
            if not path:
                raise ValueError("RunConfig(model_dir=''): give a folder, or None for a temporary one.")
            object.__setattr__(self, "model_dir", local_folder("RunConfig(model_dir=", path))
        if self.export_dir is not None:
            path = os.fspath(self.export_dir)
            object.__setattr__(self, "export_dir", local_folder("RunConfig(export_dir=", path))

    def _set_save_cadence(self) -> None:
        """Set `save_checkpoints_secs` if it is not given: to its default, or to None where steps are given."""
        if self.save_checkpoints_secs is _NOT_GIVEN:
            secs = CheckpointConfig.save_secs if self.save_checkpoints_steps is None else None
            object.__setattr__(self, "save_checkpoints_secs", secs)
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ValueError(
                f"RunConfig(save_checkpoints_steps={self.save_checkpoints_steps}, save_checkpoints_secs="
                f"{self.save_checkpoints_secs}): give one of them; None turns the other off."
            )

    def _check_eager(self) -> None:
        """Raise ValueError for a setting with which an eager step does not work."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("not_eager") and value != field.default:
                raise ValueError(
                    f"RunConfig(eager=True, {field.name}={value!r}): an eager step runs on one replica, in float32, "
                    "and without a graph. Unset one of them."
                )

    def _check_accumulation(self) -> None:
        """Raise ValueError for "auto", which the key allows."""
        if self.gradient_accumulation == "auto":
            raise ValueError(
                "RunConfig(gradient_accumulation='auto'): a process that has run out of memory cannot train on. Give a "
                "number, or start the run by `python -m runner` or runner.run, whose supervisor starts it again."
            )

    def _check_tracking(self) -> None:
        """Replace a backend in `tracking` by a TrackingConfig.

        Raises:
          ValueError: the backend is not valid.
        """
        given = self.tracking
        settings = given if isinstance(given, TrackingConfig) else TrackingConfig(given)
        for mistake in check_backend("RunConfig(tracking=", settings.backend, end=")"):
            raise mistake
        object.__setattr__(self, "tracking", settings)
        if not settings.tensorboard:
            object.__setattr__(self, "tensorboard", False)

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with `changes`. Setting one save cadence turns the other off, as in tf.estimator."""
        if sum(changes.get(name) is not None for name in SAVE_CADENCES) == 1:
            changes = {**dict.fromkeys(SAVE_CADENCES), **changes}
        return dataclasses.replace(self, **changes)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that take part in one update, over all workers."""
        if self.train_distribute is None:
            return 1
        return int(self.train_distribute.num_replicas_in_sync)

    @property
    def evaluation_strategy(self) -> Any:
        """The strategy of evaluation and prediction; None: TensorFlow's default."""
        strategy = self.eval_distribute
        if strategy is None:
            strategy = self.train_distribute
        return None if strategy == "default" else strategy

    @property
    def remote_dir(self) -> str | None:
        """The URL in an object store that `model_dir` is the local folder of; None: there is none."""
        if self.model_dir is None:
            return None
        return remote_dir(self.model_dir)

    seed = property(operator.attrgetter("tf_random_seed"))

    # tf.estimator's attributes of the cluster: addresses by task type, this process's task type and index, and others.
    @property
    def place(self) -> Cluster:
        """The field `cluster`, which a subclass may show as something else."""
        place: Cluster = vars(self)["cluster"]
        return place

    cluster_spec = property(operator.attrgetter("place.tasks"))
    task_type = property(operator.attrgetter("place.task_type"))
    task_id = property(operator.attrgetter("place.task_index"))
    is_chief = property(operator.attrgetter("place.is_chief"))
    num_worker_replicas = property(operator.attrgetter("place.num_workers"))
    num_ps_replicas = property(operator.attrgetter("place.num_ps"))
    global_id_in_cluster = property(operator.attrgetter("place.worker_index"))


def with_model_dir(model_dir: str | os.PathLike[str] | None, config: Any) -> RunConfig:
    """Return `config` with a model_dir: `model_dir` if given, else its own, else a temporary folder.

    Args:
      model_dir: the folder; None: not given.
      config: a RunConfig; None: the defaults.

    Raises:
      ValueError: `config` is not a RunConfig, or both give a model_dir and they differ.
    """
    if config is not None and not isinstance(config, RunConfig):
        raise ValueError(f"Estimator(config={config!r}): it must be a RunConfig.")
    config = config or RunConfig()
    if model_dir is not None:
        given = local_folder("Estimator(model_dir=", os.fsdecode(model_dir))
        if not given:
            raise ValueError("Estimator(model_dir=''): give a folder, or None for a temporary one.")
        if config.model_dir is not None and config.model_dir != given:
            raise ValueError(
                f"Estimator(model_dir={given!r}) and its config's model_dir={config.model_dir!r} differ. Set one."
            )
        config = config.replace(model_dir=given)
    url = mirror_of(Path(config.model_dir or "")).url
    is_cluster = sum(map(len, config.place.tasks.values())) > 1
    if url and is_cluster:
        raise ValueError(
            f"model_dir={url!r}: the tasks of a cluster that a script joins need one folder, on shared storage. Those "
            "of `python -m runner strategy=multi_worker` do not."
        )
    if config.model_dir is None:
        config = config.replace(model_dir=tempfile.mkdtemp(prefix="model-"))
        _log.warning("No model_dir was given: using the temporary folder %s.", config.model_dir)
    return config
