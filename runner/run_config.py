"""What a run is: model_fn's and input_fn's `config`."""

from __future__ import annotations

import dataclasses
import logging
import operator
import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from runner.config.error_messages import check_limits
from runner.config.schema import SEED_BITS, Config, TrackingConfig, class_at, limits_of
from runner.config.step_range import StepRange
from runner.config.validation import check_backend, compile_pattern
from runner.distribute.cluster import Cluster

_log = logging.getLogger(__name__)

SAVE_CADENCES = ("save_checkpoints_steps", "save_checkpoints_secs")
_NOT_GIVEN: Any = object()


class DrawnSeed(int):
    """A seed that nobody gave: each process draws another one, so workers that train together take the chief's."""


def _key(key: str, *, zero: bool = False, **default: Any) -> Any:
    """Declare an argument that is the config's `key`: it has the key's default and limits, and its value in a run.

    Args:
      zero: 0 is allowed, too, and means None, as in tf.estimator.
      default: the argument's own, where it differs from the key's.
    """
    group, _, name = key.rpartition(".")
    (setting,) = (one for one in dataclasses.fields(class_at(group) or Config) if one.name == name)
    metadata = {"key": key, "limits": limits_of(setting), "zero": zero}
    return dataclasses.field(metadata=metadata, **{"default": setting.default, **default})


def _check_arguments(values: Any) -> None:
    """Check the fields of `values` that are keys of the config against the limits that these declare."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if (value is None and "None" in str(field.type)) or (value == 0 and field.metadata.get("zero")):
            continue
        check_limits(limits_of(field), value, f"{type(values).__name__}({field.name}={{!r}})".format)


@dataclasses.dataclass(frozen=True)
class KeepBest:
    """The best checkpoints stay, however old.

    Attributes:
      metric: of an evaluation, as the journal names it: eval/accuracy, eval_<name>/loss.
      mode: the best is the smallest ("min") or the largest ("max"); None: by the metric's name.
      max: so many.
    """

    metric: str
    mode: str | None = _key("checkpoint.keep_best.mode")
    max: int = _key("checkpoint.keep_best.max")

    def __post_init__(self) -> None:
        if "/" not in self.metric:
            raise ValueError(f"KeepBest({self.metric!r}): a metric is named with its evaluation: eval/{self.metric}.")
        _check_arguments(self)


@dataclasses.dataclass(frozen=True)
class WarmStartWords:
    """What the settings of a WarmStart are called where somebody wrote them.

    Attributes:
      settings: all of them.
      written: expression of `include` or `rename` -> what was written for it, where that is something else.
    """

    settings: str = "train.warm_start"
    checkpoint: str = "train.warm_start.checkpoint"
    include: str = "train.warm_start.include"
    rename: str = "train.warm_start.rename"
    vocabularies: str = "train.warm_start.vocabularies"
    written: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, expression: str) -> Any:
        """What was written for it."""
        return self.written.get(expression, expression)


@dataclasses.dataclass(frozen=True)
class WarmStart:
    r"""Values from another checkpoint that a new model begins with.

    Attributes:
      checkpoint: its path, or a folder: the newest whole one in it, or that of a SavedModel. Ours, tf.estimator's, or
        of tf.train.Checkpoint.
      include: regular expressions; a variable is taken when one of them matches its whole name, trainable or not.
        None: every trainable one.
      rename: name of a variable here, a prefix of names or a regular expression -> what takes its place in the
        checkpoint, where names differ; groups of the expression are written `\1`.
      vocabularies: name of a variable -> a `runner.checkpoint.vocabulary.Vocabulary`, by which its rows are found again
        where they stand for other tokens by now. `include=()` takes only these.
      only_trainable: of what `include` matches, only trainable variables.
      optimizer_state: what optimizers keep is taken, too, where `include` matches it.
      strict: a variable that is not in the checkpoint is an error; otherwise it keeps its initial value.
      words: for messages.

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
    """Where a run lives, how often it does what, on which devices. Field names are tf.estimator's.

    Attributes:
      model_dir: folder of checkpoints and events; None: a temporary one, made by the Estimator.
      tf_random_seed: initial values, shuffling, dropout are functions of it; None: a new one is drawn.
      save_summary_steps: summaries every so many steps; None: never.
      summaries_from_first_step: they count from the first step of a run (1, 1 + n, 1 + 2n), as tf.estimator's did;
        False: summaries are written at that step and at multiples.
      save_checkpoints_steps, save_checkpoints_secs: at most one; neither given: every 600 seconds. Both None: only at
        the end of training.
      keep_checkpoint_max: checkpoints kept, the newest; None or 0: all.
      keep_best: others kept for what an evaluation found of them.
      keep_checkpoint_every_n_hours: one kept for good in so many hours; None: none for that.
      save_checkpoints_asynchronously: checkpoints are written while training goes on, from a copy in memory. Listeners,
        evaluations, the end of training and errors wait until they are durable. "auto": where the copy fits into the
        memory that is free.
      checkpoint_input_state: "saved": a checkpoint holds the state of the training input, its shuffle's buffer among
        it; "counted": how many batches were read, which a run that resumes reads again; "auto": counted where the state
        is larger than the variables, and all that the input draws is seeded and in a fixed order.
      warm_start: values that a new model begins with; one that is continued has its own.
      log_step_count_steps: loss and speed are logged every so many steps; None: never.
      steps_per_loop: steps that run in one graph call; None: grows until a call takes about a second, and always
        ends at the next save, evaluation or last step.
      tensorboard: False writes no event files, of training or evaluation.
      nan: "stop": training ends with an error at the first loss that is not finite; "ignore"; "rollback": it goes back
        to the last checkpoint, while the input goes on after the bad batch, at most three times in a run.
      clip_global_norm: the gradient of the global batch is scaled down to this norm where it is larger; None: not.
      gradient_accumulation: each replica computes its part of a batch in so many parts, one after the other.
      learning_rate_scaling: "none", or by the replicas: "linear", "sqrt" of their number.
      warmup_steps: updates until the learning rate is what it is to be.
      jit: XLA compiles what each replica computes, from its batch to its gradients.
      log_gradient_norm: the global norm of the gradient, before it is clipped, is logged where the loss is.
      train_metrics: `eval_metric_ops` of TRAIN are computed and reported with `train_op=`, too; with `optimizer=` they
        are in any case.
      precision: what Keras 3 layers compute in: "float32" leaves it to them, "mixed_bfloat16", "mixed_float16".
      ema_decay: moving averages of the weights are kept with this decay, and evaluated; None: none.
      check_numerics: each operation of a training step is checked, and the one that makes a value which is not finite
        is named with the line of model_fn. One step in a loop; for debugging.
      eager: model_fn runs eagerly in each step of training, where print and a debugger see values. Needs `optimizer=`
        and the default strategy; evaluation and prediction are traced as ever. For debugging.
      profile_steps: global steps whose profile is written for TensorBoard; None: none.
      profile_format: "trace", or "text": with a table of the operations beside it.
      train_distribute: strategy of training; None: TensorFlow's default.
      eval_distribute: strategy of evaluation and prediction; None: that of training; "default": TensorFlow's own.
      cluster: who this process is.
      has_evaluator: another process evaluates the checkpoints of this one (`Cluster("evaluator", 0)` in its RunConfig,
        the same model_dir), and `train_and_evaluate` leaves it to that.
      generation: which start of the run this process belongs to; 0: nobody counts them.
      export_dir: folder for the folders of exporters; None: `export` in model_dir.
      tracking: where a script's Estimator is recorded, as `tracking.backend` says it ("mlflow", "csv", "none", the name
        of a class, a list), or a `TrackingConfig` with the other keys of `tracking`. A process beside the script ships
        the journal in model_dir. None: there is no journal, progress is not shown, and nothing is recorded.
      progress: how progress is shown where there is `tracking`: "auto", "rich", "plain", "off".

    Raises:
      ValueError: both save cadences are given, or a number is negative.
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
    profile_format: str = _key("run.profile_format")
    check_numerics: bool = False
    eager: bool = _key("run.eager")
    train_distribute: Any = None
    eval_distribute: Any = None
    cluster: Cluster = dataclasses.field(default_factory=Cluster)
    has_evaluator: bool = False
    generation: int = 0
    export_dir: str | None = _key("export.dir")
    tracking: Any = None
    progress: str = _key("run.progress")

    @classmethod
    def from_config(cls, config: Config, **given: Any) -> RunConfig:
        """Build the RunConfig of a run: `given`, and for every other argument the value of its key in `config`."""
        keys = {field.name: field.metadata["key"] for field in dataclasses.fields(cls) if "key" in field.metadata}
        values = {name: operator.attrgetter(key)(config) for name, key in keys.items() if name not in given}
        return cls(**values, **given)

    def __post_init__(self) -> None:
        if self.model_dir is not None:
            path = os.fspath(self.model_dir)
            if not path:
                raise ValueError("RunConfig(model_dir=''): give a folder, or None for a temporary one.")
            object.__setattr__(self, "model_dir", path)
        if self.save_checkpoints_secs is _NOT_GIVEN:
            object.__setattr__(self, "save_checkpoints_secs", 600 if self.save_checkpoints_steps is None else None)
        if self.save_checkpoints_steps is not None and self.save_checkpoints_secs is not None:
            raise ValueError(
                f"RunConfig(save_checkpoints_steps={self.save_checkpoints_steps}, save_checkpoints_secs="
                f"{self.save_checkpoints_secs}): give one of them; None turns the other off."
            )
        if self.tf_random_seed is None:
            object.__setattr__(self, "tf_random_seed", DrawnSeed(secrets.randbits(SEED_BITS)))
        if self.tracking is not None:
            self._check_tracking()
        if not self.tensorboard:
            object.__setattr__(self, "save_summary_steps", None)
        if self.check_numerics and (self.jit or self.precision == "mixed_float16"):
            other = "jit=True" if self.jit else "precision='mixed_float16'"
            raise ValueError(f"RunConfig(check_numerics=True, {other}) do not go together. Leave one out.")
        if self.eager:
            self._check_eager()
        if self.check_numerics or self.eager:
            object.__setattr__(self, "steps_per_loop", 1)
        _check_arguments(self)

    def _check_tracking(self) -> None:
        """Make a TrackingConfig of a backend. Raises: ValueError: it is none."""
        given = self.tracking
        settings = given if isinstance(given, TrackingConfig) else TrackingConfig(given)
        for mistake in check_backend("RunConfig(tracking=", settings.backend, end=")"):
            raise ValueError(mistake)
        object.__setattr__(self, "tracking", settings)
        if not settings.tensorboard:
            object.__setattr__(self, "tensorboard", False)

    def _check_eager(self) -> None:
        """Refuse what a step that runs eagerly does not do."""
        settings = ("gradient_accumulation", "jit", "precision", "check_numerics", "train_distribute")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in settings:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"RunConfig(eager=True, {name}={getattr(self, name)!r}): one replica takes a step at once, in "
                    "float32, and no graph of it is looked at. Leave one out."
                )

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with `changes`. Setting one save cadence turns the other off, as in tf.estimator."""
        if sum(changes.get(name) is not None for name in SAVE_CADENCES) == 1:
            changes = {**dict.fromkeys(SAVE_CADENCES), **changes}
        return dataclasses.replace(self, **changes)

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas that take part in one update, over all workers."""
        return 1 if self.train_distribute is None else int(self.train_distribute.num_replicas_in_sync)

    seed = property(operator.attrgetter("tf_random_seed"))

    # What tf.estimator's has of its cluster: the addresses by task type, the place of this process, and others.
    cluster_spec = property(operator.attrgetter("cluster.tasks"))
    task_type = property(operator.attrgetter("cluster.task_type"))
    task_id = property(operator.attrgetter("cluster.task_index"))
    is_chief = property(operator.attrgetter("cluster.is_chief"))
    num_worker_replicas = property(operator.attrgetter("cluster.num_workers"))
    num_ps_replicas = property(operator.attrgetter("cluster.num_ps"))
    global_id_in_cluster = property(operator.attrgetter("cluster.worker_index"))


def with_model_dir(model_dir: str | os.PathLike[str] | None, config: Any) -> RunConfig:
    """Return `config` with a model_dir: the one given, its own, or a temporary one.

    Args:
      config: a RunConfig; None: its defaults.

    Raises:
      ValueError: it is something else, or both give a model_dir and they differ.
    """
    if config is not None and not isinstance(config, RunConfig):
        raise ValueError(f"Estimator(config={config!r}): it must be a RunConfig.")
    config = config or RunConfig()
    if model_dir is not None:
        given = os.fspath(model_dir)
        if not given:
            raise ValueError("Estimator(model_dir=''): give a folder, or None for a temporary one.")
        if config.model_dir is not None and config.model_dir != given:
            raise ValueError(f"Estimator(model_dir={given!r}) and its config's model_dir={config.model_dir!r} differ.")
        config = config.replace(model_dir=given)
    if config.model_dir is None:
        config = config.replace(model_dir=tempfile.mkdtemp(prefix="model-"))
        _log.warning("No model_dir was given: using the temporary folder %s.", config.model_dir)
    return config
