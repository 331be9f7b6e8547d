"""What a run's config may say: the schema of every group.

These dataclasses are what the rest of the program sees. The YAML files under `conf/` hold the same keys with a comment
over each; Hydra merges them into this schema, and `runner.parsing` checks what comes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import Container, OmegaConf

from runner.files import write_atomically

COMMANDS = ("train_and_evaluate", "train", "evaluate", "predict", "dry_run", "inspect")
TRAINING_COMMANDS = ("train_and_evaluate", "train", "dry_run")
"""Those that need an input to train on; the others read what a run left in its model_dir."""
STRATEGY_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "one_device": ("devices", "virtual_devices"),
    "mirrored": ("devices", "num_gpus", "virtual_devices", "cross_device_ops", "num_packs"),
    "central_storage": ("devices", "num_gpus", "virtual_devices"),
}
"""Strategy name -> the options that mean something for it."""


class ConfigError(ValueError):
    """The config is wrong; the message names the key, the value, what is allowed and the nearest valid name."""


def _setting(default: Any, *, choices: tuple[str, ...] = (), minimum: int | None = None, auto: bool = False) -> Any:
    """A field with its limits: one of `choices`; at least `minimum`; a number or the word auto."""
    return field(default=default, metadata={"choices": choices, "minimum": minimum, "auto": auto})


@dataclass(frozen=True)
class ModelConfig:
    """Which model_fn, and the `params` it is called with."""

    fn: str | None = None
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InputBlock:
    """One input: which input_fn, its params, and how its examples are divided. `batch_size` is global."""

    fn: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    batch_size: int | None = _setting(None, minimum=1)
    shard: str = _setting("auto", choices=("auto", "files", "examples", "input_fn", "off"))
    shuffle_seed: int | None = None


@dataclass(frozen=True)
class InputConfig:
    """The inputs of a run. `eval` in YAML is one block, or a mapping of names to blocks: several evaluations.

    Attributes:
      eval: None: no evaluation. Once parsed, read `evals` instead.
      predict: what command=predict reads.
    """

    train: InputBlock = field(default_factory=InputBlock)
    eval: dict[str, Any] | None = field(default_factory=dict)
    predict: InputBlock = field(default_factory=InputBlock)

    @property
    def evals(self) -> dict[str, InputBlock]:
        """The input of each evaluation by its name; a single one has the name ''. Of a parsed config only."""
        return self.eval or {}


@dataclass(frozen=True)
class StrategyConfig:
    """A tf.distribute strategy and its options; None: TensorFlow's own default. `name` None: as for training."""

    name: str | None = _setting("default", choices=tuple(STRATEGY_OPTIONS))
    devices: list[str] | None = None
    num_gpus: int | None = _setting(None, minimum=0)
    virtual_devices: int | None = _setting(None, minimum=1)
    cross_device_ops: str | None = _setting(
        None, choices=("auto", "nccl", "hierarchical_copy", "reduction_to_one_device")
    )
    num_packs: int | None = _setting(None, minimum=0)


@dataclass(frozen=True)
class RunSettings:
    """What holds for the whole run."""

    seed: int | None = _setting(1, minimum=0)
    deterministic: bool = False
    progress: str = _setting("auto", choices=("auto", "rich", "plain", "off"))
    inline: bool = False


@dataclass(frozen=True)
class TrainConfig:
    """How long to train, and what is said on the way."""

    max_steps: int | None = _setting(None, minimum=1)
    steps_per_loop: Any = _setting("auto", minimum=1, auto=True)
    nan: str = _setting("stop", choices=("stop", "ignore"))
    log_steps: int | None = _setting(100, minimum=1)
    summary_steps: int | None = _setting(100, minimum=1)


@dataclass(frozen=True)
class EvalConfig:
    """How much is evaluated, and how often."""

    steps: int | None = _setting(None, minimum=1)
    throttle_secs: int = _setting(0, minimum=0)


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written and how many are kept. Both cadences None: only at the end."""

    save_steps: int | None = _setting(None, minimum=1)
    save_secs: int | None = _setting(600, minimum=1)
    keep_max: int | None = _setting(5, minimum=1)


@dataclass(frozen=True)
class TrackingConfig:
    """Where the run is recorded."""

    backend: str = _setting("mlflow", choices=("mlflow", "none"))
    uri: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PredictConfig:
    """What command=predict writes. `output` None: predictions.jsonl in model_dir; `keys` None: all of them."""

    output: str | None = None
    keys: list[str] | None = None


@dataclass(frozen=True)
class SweepConfig:
    """Where the jobs of a sweep live and how they are ranked. `dir` None: by the sweep's identity."""

    dir: str | None = None
    metric: str | None = None
    mode: str = _setting("min", choices=("min", "max"))
    parallel: int = _setting(1, minimum=1)


@dataclass(frozen=True)
class Config:
    """A whole run, checked."""

    command: str = _setting("train_and_evaluate", choices=COMMANDS)
    model_dir: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    input: InputConfig = field(default_factory=InputConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    eval_strategy: StrategyConfig = field(default_factory=lambda: StrategyConfig(name=None))
    run: RunSettings = field(default_factory=RunSettings)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def functions(self) -> Iterator[tuple[str, str, str]]:
        """(config key, dotted name, default function) of each function of the user that this run calls."""
        if self.command == "inspect":
            return
        assert self.model.fn is not None
        yield "model.fn", self.model.fn, "model_fn"
        if self.command in TRAINING_COMMANDS:
            yield "input.train.fn", str(self.input.train.fn), "input_fn"
        if self.command == "predict":
            yield "input.predict.fn", str(self.input.predict.fn), "input_fn"
        if self.command in ("train_and_evaluate", "evaluate", "dry_run"):
            for name, block in self.input.evals.items():
                yield f"{eval_key(name)}.fn", str(block.fn), "input_fn"


def eval_key(name: str) -> str:
    """The config key of the evaluation `name`; '' is the only one."""
    return f"input.eval.{name}" if name else "input.eval"


def register_schema() -> None:
    """Makes the schema known to Hydra: `conf/config.yaml` starts from it."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="schema", name="config", node=schema(), package="_global_", provider="runner")


def schema() -> Any:
    """The schema as an OmegaConf node: `params` and `tags` take any key, everything else only what is declared."""
    node = thawed(OmegaConf.structured(Config))
    for free in (node.model.params, node.input.train.params, node.input.eval, node.input.predict.params, node.tracking.tags):
        OmegaConf.set_struct(free, False)
    return node


def to_tree(config: Config) -> dict[str, Any]:
    """The config as plain dicts, as it is written in YAML."""
    tree = dataclasses.asdict(config)
    if set(tree["input"]["eval"] or ()) == {""}:
        tree["input"]["eval"] = tree["input"]["eval"][""]
    return tree


def save(config: Config, path: Path) -> None:
    """Writes the config where a child, a rerun or a person reads it; never leaves half a file."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(to_tree(config))))


def flatten(config: Config) -> dict[str, Any]:
    """Dotted key -> value, for what has no nesting (MLflow's parameters). An empty mapping is itself a value."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key, child in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), child)
        else:
            flat[prefix] = value

    walk("", to_tree(config))
    return flat


def thawed(node: Any) -> Any:
    """Frozen dataclasses make read-only nodes; what Hydra merges into must not be."""
    OmegaConf.set_readonly(node, None)
    for key in () if node._is_none() else node:
        child = node._get_node(key)
        if isinstance(child, Container):
            thawed(child)
    return node
