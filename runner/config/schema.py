"""The schema of a run's config, group by group.

The rest of the program uses these dataclasses. The YAML files in `conf/` have the same keys with a comment over each.
Hydra merges them into this schema, and `runner.config.parsing` checks the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from runner.config import changed_keys
from runner.config.mistakes import ConfigError as ConfigError
from runner.config.mistakes import Malformed
from runner.config.settings.data_service import DataService
from runner.config.settings.limits import count, ranking, setting
from runner.config.settings.metric_rules import EarlyStopping, KeepBest, ReduceLROnPlateau
from runner.system.files import write_atomically
from runner.system.redaction import SecretList, secrets_of

ENVIRONMENT_COMMANDS = ("list", "diff", "report", "best", "cluster_info", "doctor", "new")
"""Commands without a run: they need no user functions and no model_dir, and start no task."""
RUN_COMMANDS = ("train_and_evaluate", "train", "evaluate", "predict", "export", "dry_run", "profile_input", "inspect")
"""Commands of a run, which is that of the config or of model_dir."""
COMMANDS = (*RUN_COMMANDS, *ENVIRONMENT_COMMANDS)
MODEL_COMMANDS = ("train_and_evaluate", "train", "dry_run")
"""Commands that train a model, or try it."""
TRAINING_COMMANDS = (*MODEL_COMMANDS, "profile_input")
"""Commands that need a training input; the others read a model_dir."""
TRAINING_RUNS = ("train_and_evaluate", "train")
"""Commands that make a model_dir and write its config."""
UNRECORDED_COMMANDS = ("dry_run", "profile_input", "inspect")
"""Commands that only print something; they write no files. The result is in the journal of a temporary folder."""
CLOUDS = ("aws", "azure", "gce", "auto")
"""The values of `run.preemption_notice` that read a cloud's metadata server; any other names a function."""
EVALUATING_COMMANDS = ("train_and_evaluate", "evaluate", "dry_run")
"""Commands that need the functions of `input.eval`."""
STRATEGY_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "one_device": ("devices", "virtual_devices"),
    "mirrored": ("devices", "num_gpus", "virtual_devices", "cross_device_ops", "num_packs"),
    "central_storage": ("devices", "num_gpus", "virtual_devices"),
    "multi_worker": ("communication", "timeout_secs", "bytes_per_pack", "virtual_devices"),
    "parameter_server": ("partitioner", "virtual_devices"),
    "tpu": ("address", "zone", "project"),
}
"""Strategy name -> the options that it uses."""
CROSS_DEVICE_OPS = ("auto", "nccl", "hierarchical_copy", "reduction_to_one_device")
PACKED_OPS = ("nccl", "hierarchical_copy")
"""Cross-device operations that group gradients by `num_packs`."""
CLUSTER_STRATEGIES = ("multi_worker", "parameter_server")
"""Strategies that train with several processes."""
CLUSTER_COMMANDS = ("train_and_evaluate", "train", "evaluate")
"""Commands in which all processes of such a strategy take part; any other command runs in one process."""
MAX_TASKS = 10_000
"""Largest number of tasks of one type, so that a typo does not fill the memory with addresses."""

SEED_BITS = 31
"""Number of bits of the random seed that a run gets if `run.seed` is null."""


# Why only the default of a setting works with train_op=: the ends of "train_op=, which ..." (`limits.setting`).
_APPLIES_GRADIENTS = "computes and applies its gradients itself, replica by replica"
_APPLIES_AT_ONCE = f"{_APPLIES_GRADIENTS}, so they cannot be separated from the update, which XLA must not compile"
_APPLIES_UNSCALED = {"mixed_float16": f"{_APPLIES_GRADIENTS}, so they cannot be scaled"}
_HAS_RATE = "has its learning rate in it"


@dataclass(frozen=True)
class ModelConfig:
    """The model_fn, its `params`, and the TensorFlow that it was written for.

    Attributes:
      classic: provide tf.estimator and tf.layers, which TensorFlow has removed: true, false, or auto.
    """

    fn: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    classic: Any = setting("auto", choices=("auto", True, False))
    keras: str = setting("auto", choices=("auto", "keras3", "legacy"))


@dataclass(frozen=True)
class AutotuneConfig:
    """Settings of tf.data's autotuning. None: the options that the input function sets apply."""

    enabled: bool | None = None
    ram_budget: int | None = setting(None, minimum=1)
    cpu_budget: int | None = count(None, minimum=1)


@dataclass(frozen=True)
class DataOptionsConfig:
    """Settings of tf.data.Options for an input. None: the options that the input function sets apply."""

    deterministic: bool | None = None
    private_threadpool_size: int | None = count(None, minimum=1)
    max_intra_op_parallelism: int | None = count(None, minimum=1)
    autotune: AutotuneConfig = field(default_factory=AutotuneConfig)


@dataclass(frozen=True)
class InputBlock:
    """One input: its input_fn, the function's params, and how examples are divided. `batch_size` is the global one."""

    fn: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    batch_size: int | None = count(None, minimum=1)
    shard: str = setting("auto", choices=("auto", "files", "examples", "input_fn", "off"))
    shuffle_seed: int | None = None
    options: DataOptionsConfig = field(default_factory=DataOptionsConfig)


@dataclass(frozen=True)
class TrainInputBlock(InputBlock):
    """The training input, with the settings that only training has."""

    prefetch_to_device: int | None = count(None, minimum=1)
    service: DataService = DataService(None)


@dataclass(frozen=True)
class InputConfig:
    """The inputs of a run. `eval` in YAML is one block, or several evaluations as a mapping of names to blocks.

    Attributes:
      eval: None: no evaluation. In a parsed config read `evals` instead.
      predict: the input of command=predict.
    """

    train: TrainInputBlock = field(default_factory=TrainInputBlock)
    eval: dict[str, Any] | None = field(default_factory=dict)
    predict: InputBlock = field(default_factory=InputBlock)

    @property
    def evals(self) -> dict[str, InputBlock]:
        """Evaluation name -> input; a single evaluation has the name ''. Only in a parsed config."""
        return self.eval or {}


@dataclass(frozen=True)
class EvalStrategyConfig:
    """A tf.distribute strategy of one process with its options. None: TensorFlow's default.

    Attributes:
      name: None: evaluation uses the strategy of training.
    """

    name: str | None = setting(None, choices=tuple(STRATEGY_OPTIONS))
    devices: list[str] | None = None
    num_gpus: int | None = count(None, minimum=0)
    virtual_devices: int | None = count(None, minimum=1)
    cross_device_ops: str | None = None  # one of CROSS_DEVICE_OPS, or the dotted name of a class
    num_packs: int | None = count(None, minimum=0)


@dataclass(frozen=True)
class StrategyConfig(EvalStrategyConfig):
    """The tf.distribute strategy of training, with options for several processes and TPUs."""

    name: str | None = setting("default", choices=tuple(STRATEGY_OPTIONS))
    communication: str | None = setting(None, choices=("auto", "ring", "nccl"))
    timeout_secs: int | None = count(None, minimum=1)
    bytes_per_pack: int | None = count(None, minimum=1)
    partitioner: str | None = setting(None, choices=("min_size", "fixed_shards"))
    address: str | None = None
    zone: str | None = None
    project: str | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """The processes of a cluster, and what happens when one of them is lost.

    Attributes:
      min_workers: least number of workers that a run goes on with; None: all of them.
      port: port on which tasks listen under Slurm, SageMaker or Kubernetes; None: the resolver chooses.
      service: headless Service of Kubernetes; None: the name of the Job or StatefulSet.
    """

    resolver: str = setting("auto", choices=("auto", "local", "tf_config", "slurm", "sagemaker", "kubernetes", "tpu"))
    num_workers: int = count(2, minimum=1, maximum=MAX_TASKS)
    num_ps: int = count(1, minimum=1, maximum=MAX_TASKS)
    evaluator: bool = False
    max_restarts: int | None = count(None, minimum=0)
    min_workers: int | None = count(None, minimum=1, maximum=MAX_TASKS)
    start_timeout_secs: int = count(120, minimum=1)
    port: int | None = setting(None, above=0, below=65536)
    service: str | None = None


@dataclass(frozen=True)
class RunSettings:
    """Settings of the whole run."""

    seed: int | None = setting(1, minimum=0)
    deterministic: bool = False
    memory_growth: bool = setting(False, shown_only=True)
    inter_op_threads: int | None = count(None, minimum=1)
    intra_op_threads: int | None = count(None, minimum=1)
    progress: str = setting("auto", choices=("auto", "rich", "plain", "off"), shown_only=True)
    output: str = setting("text", choices=("text", "json"), shown_only=True)
    inline: bool = setting(False, shown_only=True)
    eager: bool = False
    freeze_secs: int | None = setting(None, minimum=10, shown_only=True)
    preload: Any = setting("auto", choices=("auto", False), shown_only=True)
    preemption_notice: str | None = setting(None, shown_only=True)
    debug: str | None = setting(None, choices=("fast_dev", "overfit", "nan", "replicas"))
    profile: str | None = None
    log_level: str = setting("info", choices=("debug", "info", "warning", "error"), shown_only=True)
    code: bool = setting(True, shown_only=True)
    secrets: list[str] | None = setting(None, shown_only=True)
    local_dir: str | None = setting(None, shown_only=True)
    lease_secs: int = count(60, minimum=4, shown_only=True)
    upload_secs: int = count(600, minimum=1, shown_only=True)


@dataclass(frozen=True)
class VocabularyConfig:
    """The vocabularies, in the new model and in the warm-start checkpoint, of a variable's rows: tf.estimator's
    VocabInfo.

    Both files are required. A size of None means all lines of the file.
    """

    new_vocab: str | None = None
    new_vocab_size: int | None = count(None, minimum=1)
    num_oov_buckets: int = count(0, minimum=0)
    old_vocab: str | None = None
    old_vocab_size: int | None = count(None, minimum=1)
    axis: int = setting(0, choices=(0, 1))


@dataclass(frozen=True)
class WarmStartConfig:
    """Values with which a new run begins.

    Attributes:
      checkpoint: None: initial values.
      include: None: every trainable variable.
      vocabularies: variable name -> VocabularyConfig, in a parsed config.
    """

    checkpoint: str | None = None
    include: list[str] | None = None
    rename: dict[str, str] = field(default_factory=dict)
    vocabularies: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HookConfig:
    """A hook: the dotted name of a class or function, called with `params` by name."""

    fn: str | None = None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainConfig:
    """Settings of training: its length, its steps, and what it logs.

    Attributes:
      gradient_accumulation: a number, or auto: it belongs to a start of the run, whose tasks get it in its place.
      hooks: a list of HookConfigs, in a parsed config.
    """

    max_steps: int | None = setting(None, minimum=1)
    max_epochs: int | None = setting(None, minimum=1)
    max_secs: float | None = setting(None, above=0)
    steps_per_loop: Any = count("auto", minimum=1, auto=True)
    gradient_accumulation: Any = count(1, minimum=1, auto=True, needs_optimizer=_APPLIES_GRADIENTS, not_eager=True)
    clip_global_norm: float | None = setting(None, above=0, needs_optimizer=_APPLIES_GRADIENTS)
    jit: bool = setting(False, needs_optimizer=_APPLIES_AT_ONCE, not_eager=True)
    precision: str = setting(
        "float32", choices=("float32", "mixed_bfloat16", "mixed_float16"), needs_optimizer=_APPLIES_UNSCALED,
        not_eager=True,
    )  # fmt: skip
    learning_rate_scaling: str = setting("none", choices=("none", "linear", "sqrt"), needs_optimizer=_HAS_RATE)
    warmup_steps: int = setting(0, minimum=0, needs_optimizer=_HAS_RATE)
    ema_decay: float | None = setting(None, above=0, below=1)
    nan: str = setting("stop", choices=("stop", "rollback", "ignore"))
    early_stopping: EarlyStopping = EarlyStopping()
    reduce_lr_on_plateau: ReduceLROnPlateau = ReduceLROnPlateau()
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    log_steps: int | None = setting(100, minimum=1)
    log_gradient_norm: bool = setting(False, needs_optimizer=_APPLIES_GRADIENTS)
    metrics: bool = False
    summary_steps: int | None = setting(100, minimum=1)
    hooks: list[Any] = field(default_factory=list)

    @property
    def finds_accumulation(self) -> bool:
        """Report whether the supervisor finds the number of micro-batches: `gradient_accumulation=auto`."""
        return bool(self.gradient_accumulation == "auto")

    @property
    def first_accumulation(self) -> int:
        """The number of micro-batches with which a new run begins; auto begins with whole batches."""
        return 1 if self.finds_accumulation else int(self.gradient_accumulation)


@dataclass(frozen=True)
class EvalConfig:
    """The length and frequency of evaluations.

    Attributes:
      checkpoint: for command=evaluate: the checkpoint to evaluate; None: the newest.
      name: for command=evaluate: the name under which results are recorded.
      hooks: a list of HookConfigs, in a parsed config.
    """

    steps: int | None = setting(None, minimum=1)
    throttle_secs: int = count(0, minimum=0)
    start_delay_secs: int = count(0, minimum=0)
    at_start: bool = False
    checkpoint: str | None = None
    name: str | None = None
    hooks: list[Any] = field(default_factory=list)

    def recorded_name(self, own: str) -> str:
        """Return the name under which the evaluation `own` of `input.eval` is recorded."""
        return "_".join(name for name in (self.name, own) if name)


@dataclass(frozen=True)
class CheckpointConfig:
    """The settings of checkpoints: when to write them and how many to keep.

    Attributes:
      save_steps, save_secs: cadences; both None: only at the end of training.
      asynchronous: true, false, or auto.
    """

    save_steps: int | None = setting(None, minimum=1)
    save_secs: int | None = count(600, above=0)  # RunConfig also accepts fractions of a second
    keep_max: int | None = count(5, minimum=1)
    keep_best: KeepBest = KeepBest(None)
    keep_every_hours: float | None = setting(None, above=0)
    asynchronous: Any = setting(True, choices=("auto", True, False))
    input_state: str = setting("auto", choices=("auto", "saved", "counted"))


@dataclass(frozen=True)
class ExportBestConfig:
    """The metric by which the best model is exported. `metric` None: the loss of the first evaluation."""

    metric: str | None = None
    mode: str | None = ranking()


@dataclass(frozen=True)
class ExportConfig:
    """The SavedModels that a run exports.

    Attributes:
      exporters: None: nothing is exported.
      dir: folder of the exports; None: `export` in model_dir.
      receiver_fn: None: requests have the features of the input.
      checkpoint: for command=export: best, a step, a name or a path; None: the newest.
      register: name in MLflow's registry under which exports become versions; None: not registered.
      alias: alias of that version; None: no alias.
    """

    exporters: list[str] | None = setting(None, choices=("final", "latest", "best"))
    dir: str | None = None
    keep: int | None = count(5, minimum=1)
    best: ExportBestConfig = field(default_factory=ExportBestConfig)
    receiver_fn: str | None = None
    checkpoint: str | None = None
    register: str | None = None
    alias: str | None = None


TRACKERS = ("mlflow", "csv", "none")
"""The values of `tracking.backend` that are not dotted names."""


@dataclass(frozen=True)
class TrackingBackend:
    """One place where a run is recorded: mlflow, csv, or the dotted name of a user's class that is called with
    `params`.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackingConfig:
    """The trackers that record the run, and their settings.

    Attributes:
      backend: mlflow, csv, none, the dotted name of a class, `{fn: name, params: {}}`, or a list of them. Read
        `backends` instead.
    """

    backend: Any = "mlflow"
    uri: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)
    tensorboard: bool = True
    system_metrics: bool = False

    @property
    def backends(self) -> tuple[TrackingBackend, ...]:
        """The places where the run is recorded; only in a checked config."""
        entries = self.backend if isinstance(self.backend, list | tuple) else [self.backend]
        found = []
        for entry in entries:
            if isinstance(entry, Mapping):
                backend = TrackingBackend(entry["fn"], entry.get("params") or {})
            else:
                backend = TrackingBackend(entry)
            if backend.name != "none":
                found.append(backend)
        return tuple(found)

    @property
    def takes_files(self) -> bool:
        """Report whether one of the backends stores files; csv does not."""
        return any(backend.name != "csv" for backend in self.backends)

    @property
    def has_mlflow(self) -> bool:
        """Report whether MLflow records the run."""
        return any(backend.name == "mlflow" for backend in self.backends)

    def classes(self) -> list[tuple[str, str, str]]:
        """Return (config key, dotted name, default class) of each user's class that records the run."""
        names = [backend.name for backend in self.backends if backend.name not in TRACKERS]
        return [("tracking.backend", name, "Tracker") for name in names]


PREDICTION_FORMATS = {
    ".jsonl": "JSON Lines", ".csv": "CSV", ".npz": "NumPy", ".parquet": "Parquet", ".tfrecord": "tf.train.Example",
}  # fmt: skip
"""Suffix of predict.output -> its format."""


@dataclass(frozen=True)
class PredictConfig:
    """The predictions that command=predict writes, and where.

    Attributes:
      output: the file; None: predictions.jsonl in model_dir.
      keys: names of predictions, and of features to write beside them; None: all predictions.
      checkpoint: None: the newest.
    """

    output: str | None = None
    keys: list[str] | None = None
    checkpoint: str | None = None


@dataclass(frozen=True)
class SweepConfig:
    """The folder of a sweep and the ranking of its jobs. `dir` None: a folder named by a hash of the overrides."""

    dir: str | None = None
    metric: str | None = None
    mode: str | None = ranking()
    parallel: int = count(1, minimum=1)
    max_failed: int | None = count(None, minimum=1)
    devices_per_job: Any = count("auto", minimum=0, auto=True)
    seeds: list[int] | None = setting(None, minimum=0)


@dataclass(frozen=True)
class NewConfig:
    """Settings of command=new: the folder `path` in which it creates a project."""

    path: str | None = None


@dataclass(frozen=True)
class DiffConfig:
    """Settings of command=diff: the `runs` that it compares, by their folders or URLs."""

    runs: list[str] | None = None


@dataclass(frozen=True)
class ReportConfig:
    """Settings of command=report: the file `path` that it writes."""

    path: str = "report.html"


@dataclass(frozen=True)
class Config:
    """The checked config of a run."""

    command: str = setting("train_and_evaluate", choices=COMMANDS)
    model_dir: str | None = None
    vars: dict[str, Any] = field(default_factory=dict)
    model: ModelConfig = field(default_factory=ModelConfig)
    input: InputConfig = field(default_factory=InputConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    eval_strategy: EvalStrategyConfig = field(default_factory=EvalStrategyConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    run: RunSettings = field(default_factory=RunSettings)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig, metadata={"shown_only": True})
    new: NewConfig = field(default_factory=NewConfig)
    diff: DiffConfig = field(default_factory=DiffConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig, metadata={"shown_only": True})

    @property
    def max_restarts(self) -> int:
        """`cluster.max_restarts`, or the strategy's default if that is null."""
        if self.cluster.max_restarts is not None:
            return self.cluster.max_restarts
        may_lose_tasks = self.is_cluster or self.run.freeze_secs is not None
        return 3 if may_lose_tasks else 0

    @property
    def is_cluster(self) -> bool:
        """Report whether several processes run the command together."""
        return self.strategy.name in CLUSTER_STRATEGIES and self.command in CLUSTER_COMMANDS

    @property
    def exports(self) -> bool:
        """Report whether this run writes SavedModels."""
        return self.command == "export" or (self.command in MODEL_COMMANDS and bool(self.export.exporters))

    @property
    def export_input(self) -> tuple[str, InputBlock]:
        """(config key, block) of the input whose features are the requests of an exported model.

        The input of prediction is tried last: it may still be the shipped one, in runs that set only training and
        evaluation.
        """
        evals = [(eval_key(name), block) for name, block in self.input.evals.items()]
        blocks = [*evals, ("input.train", self.input.train), ("input.predict", self.input.predict)]
        for key, block in blocks:
            if block.fn:
                return key, block
        return blocks[-1]

    def functions(self) -> list[tuple[str, str, str]]:
        """Return (config key, dotted name, default function) of each user function that this run calls."""
        if self.command in ("inspect", *ENVIRONMENT_COMMANDS):
            return []
        inputs: dict[str, InputBlock] = {}
        if self.command in TRAINING_COMMANDS:
            inputs["input.train"] = self.input.train
        if self.command == "predict":
            inputs["input.predict"] = self.input.predict
        if self.command in EVALUATING_COMMANDS:
            inputs |= {eval_key(name): block for name, block in self.input.evals.items()}
        if self.exports and not self.export.receiver_fn:
            inputs |= dict([self.export_input])
        found = [("model.fn", str(self.model.fn), "model_fn")]
        found += [(f"{key}.fn", str(block.fn), "input_fn") for key, block in inputs.items()]
        if self.command in MODEL_COMMANDS:
            found += _functions_of_hooks("train.hooks", self.train.hooks)
            if self.run.preemption_notice not in (None, *CLOUDS):
                found.append(self.notice_function(str(self.run.preemption_notice)))
        if self.command in EVALUATING_COMMANDS and self.input.evals:
            found += _functions_of_hooks("eval.hooks", self.eval.hooks)
        if self.exports and self.export.receiver_fn:
            found.append(("export.receiver_fn", self.export.receiver_fn, "serving_input_receiver_fn"))
        return found

    @staticmethod
    def notice_function(name: str) -> tuple[str, str, str]:
        """Return (config key, dotted name, default function) of a user's `run.preemption_notice`, as in `functions`."""
        return ("run.preemption_notice", name, "preemption_notice")


def _functions_of_hooks(key: str, hooks: Sequence[HookConfig]) -> list[tuple[str, str, str]]:
    return [(f"{key}[{place}].fn", str(hook.fn), "Hook") for place, hook in enumerate(hooks)]


def eval_key(name: str) -> str:
    """Return the config key of the evaluation `name`; the name '' is that of a single evaluation."""
    return f"input.eval.{name}" if name else "input.eval"


def class_at(key: str) -> type | None:
    """Return the dataclass of the settings under `key`; None if any key is allowed there, as in `model.params`."""
    cls: Any = Config
    for part in filter(None, key.split(".")):
        if cls is InputConfig and part == "eval":
            return InputBlock
        if cls is WarmStartConfig and part == "vocabularies":
            return VocabularyConfig
        if not dataclasses.is_dataclass(cls):
            return None
        cls = get_type_hints(cls).get(part)
    return cls if dataclasses.is_dataclass(cls) else None  # type: ignore[return-value]


def setting_at(key: str) -> dataclasses.Field[Any] | None:
    """Return the field of a key or of a group of keys; None if the schema has no such key."""
    parent, _, name = key.rpartition(".")
    owner = class_at(parent)
    if owner is None:
        return None
    for declared in dataclasses.fields(owner):
        if declared.name == name:
            return declared
    return None


# --- as a tree, as text, as a file ----------------------------------------------------------------------------------


def to_tree(config: Config) -> dict[str, Any]:
    """Return the config as plain dicts, as in YAML."""
    tree = dataclasses.asdict(config)
    if set(tree["input"]["eval"] or ()) == {""}:
        tree["input"]["eval"] = tree["input"]["eval"][""]
    return tree


def flatten(tree: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return dotted key -> value, for stores without nesting such as MLflow's parameters.

    An empty mapping counts as a value.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{at}{key}.")
        else:
            flat[f"{at}{key}"] = value
    return flat


def value_at(tree: Any, key: str) -> Any:
    """Return the value of a dotted key in nested mappings; None if there is none."""
    for part in key.split("."):
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(part)
    return tree


def as_yaml(tree: Mapping[str, Any]) -> str:
    """Return the text of a config file."""
    from omegaconf import OmegaConf  # 50 ms, which `--help` of a key would wait for; in `read` as well

    return OmegaConf.to_yaml(OmegaConf.create(dict(tree)))


def save(config: Config, path: Path) -> None:
    """Write the config to a file, all at once or not at all. A file with secrets is readable only by its owner."""
    tree = to_tree(config)
    has_secrets = bool(secrets_of(tree, SecretList.of(config.run.secrets, {})))
    mode = 0o600 if has_secrets else None
    write_atomically(path, as_yaml(tree), mode)


def as_shown(file: Path) -> str:
    """Return the path of a config file as the user would type it: `conf/train/default.yaml`."""
    cwd = Path.cwd()
    if file.is_relative_to(cwd):
        return str(file.relative_to(cwd))
    return str(file)


def text_of(file: Path) -> str:
    """Return the text of a config file of the user's.

    Raises:
      ConfigError: it is not in UTF-8.
    """
    try:
        # "-sig": some editors begin a file with a byte order mark. YAML allows it, `# @package` is not found after it.
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Malformed(
            f"{as_shown(file)} is not text in UTF-8: byte {error.object[error.start]:#04x} at position {error.start}. "
            "Save it as UTF-8."
        ) from error


def read(path: Path) -> dict[str, Any]:
    """Return the unchecked tree in a config file that `save` wrote, in this version or an earlier one.

    Raises:
      ConfigError: the file is damaged.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        tree = OmegaConf.load(path)
        if isinstance(tree, DictConfig):
            changed_keys.update_saved(tree, str(path))
        found: Any = OmegaConf.to_container(tree, resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise Malformed(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise Malformed(f"{path} does not contain a config.")
    return found
