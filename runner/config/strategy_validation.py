"""Checks for settings of strategies and clusters that do not work together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from runner.config import schema
from runner.config.mistakes import ConfigError, Conflict, Empty, NoEffect, NotAllowed, NotSet, OutOfRange, Twice
from runner.config.schema import Config, EvalStrategyConfig
from runner.config.settings.limits import MOST_COUNTED


def check_strategies(config: Config) -> Iterator[ConfigError]:
    """Yield the mistakes in `strategy`, `eval_strategy` and `cluster`, and in a batch size that does not fit them."""
    yield from _check_cluster(config)
    yield from _check_strategy("strategy", config.strategy)
    yield from _check_strategy("eval_strategy", config.eval_strategy)
    yield from _check_eval_strategy(config)
    train = config.strategy.virtual_devices
    evaluation = config.eval_strategy.virtual_devices
    if train is not None and evaluation is not None and train != evaluation:
        yield Conflict(
            f"strategy.virtual_devices={train} and eval_strategy.virtual_devices={evaluation} differ, but TensorFlow "
            "splits the CPU of a process only once. Set both to the same number."
        )
    num_workers = config.cluster.num_workers if config.cluster.resolver == "local" else 1
    check_batch_divides(config, num_workers)
    check_min_workers(config)
    yield from _check_found_accumulation(config)


def _check_cluster(config: Config) -> Iterator[ConfigError]:
    """Yield messages about a resolver that does not work with the strategy, and settings that the resolver ignores."""
    resolver = config.cluster.resolver
    strategy = config.strategy.name
    if resolver == "tpu" and strategy != "tpu":
        yield Conflict(f"cluster.resolver=tpu works with strategy=tpu only, not with strategy={strategy}.")
    if strategy == "tpu" and resolver not in ("auto", "tpu"):
        yield Conflict(f"cluster.resolver={resolver} with strategy=tpu: use auto or tpu.")
    for name, resolvers in (("port", ("slurm", "sagemaker", "kubernetes")), ("service", ("kubernetes",))):
        value = getattr(config.cluster, name)
        if value is not None and resolver not in ("auto", *resolvers):
            only = " or ".join(resolvers)
            yield NoEffect(f"cluster.{name}={value} has no effect with cluster.resolver={resolver}, only with {only}.")


def _check_strategy(key: str, strategy: EvalStrategyConfig) -> Iterator[ConfigError]:
    """Yield messages about options that the chosen strategy would ignore, and options that exclude each other."""
    if strategy.name is None and key == "strategy":
        yield NotSet("strategy.name=null: name a strategy, such as default.")
    yield from _check_options(key, strategy)
    yield from _check_devices(key, strategy)
    if strategy.num_packs is not None and strategy.cross_device_ops not in schema.PACKED_OPS:
        yield NoEffect(
            f"{key}.num_packs={strategy.num_packs} has no effect with {key}.cross_device_ops="
            f"{strategy.cross_device_ops or 'null'}. Use cross_device_ops={' or '.join(schema.PACKED_OPS)}."
        )


def _check_options(key: str, strategy: EvalStrategyConfig) -> Iterator[ConfigError]:
    """Yield messages about options of other strategies, and about a `cross_device_ops` that is not known."""
    allowed = schema.STRATEGY_OPTIONS.get(strategy.name or "", ())
    for option, value in vars(strategy).items():
        if option != "name" and value is not None and option not in allowed:
            chosen = strategy.name or "same"
            options = ", ".join(allowed) or "none"
            yield NoEffect(f"{key}.{option}={value} has no effect with {key}={chosen}. Its options: {options}.")
    ops = strategy.cross_device_ops
    if ops is not None and ops not in schema.CROSS_DEVICE_OPS and "." not in ops:
        yield NotAllowed(
            f"{key}.cross_device_ops={ops} is not allowed. Allowed: {', '.join(schema.CROSS_DEVICE_OPS)}, or "
            "package.module.Class of your own tf.distribute.CrossDeviceOps."
        )


def _check_devices(key: str, strategy: EvalStrategyConfig) -> Iterator[ConfigError]:
    """Yield messages about a wrong list of devices, and about several keys that each choose the devices."""
    devices = strategy.devices
    num_gpus = strategy.num_gpus
    virtual_devices = strategy.virtual_devices
    if devices is not None and not devices:
        yield Empty(f"{key}.devices=[] names no device. Use null for all devices.")
    if devices and len(set(devices)) < len(devices):
        yield Twice(f"{key}.devices={devices} names a device twice. Remove one of them.")
    if strategy.name == "one_device" and devices and len(devices) != 1:
        yield OutOfRange(
            f"{key}.devices={devices}: one_device takes exactly one device. Use {key}=mirrored for several."
        )
    if devices and num_gpus is not None:
        yield Conflict(f"{key}.devices and {key}.num_gpus exclude each other. Set one of them.")
    if num_gpus and virtual_devices is not None:
        yield Conflict(
            f"{key}.num_gpus={num_gpus} and {key}.virtual_devices={virtual_devices} exclude each other. Set one of "
            "them to null."
        )


def _check_eval_strategy(config: Config) -> Iterator[ConfigError]:
    """Yield a message if eval_strategy needs several processes or a TPU and is not the strategy of training."""
    name = config.eval_strategy.name
    if name not in (*schema.CLUSTER_STRATEGIES, "tpu"):
        return
    instead = "set eval_strategy=same, the strategy of training"
    if name != config.strategy.name:
        instead = (
            f"evaluate in a separate run, command=evaluate strategy={name} model_dir=..., or choose same, default, "
            "one_device, mirrored or central_storage"
        )
    yield Conflict(
        f"eval_strategy={name} with strategy={config.strategy.name}: a run can use only one strategy that needs "
        f"several processes or a TPU. Instead, {instead}."
    )


def check_min_workers(config: Config, num_replicas: int | None = None, why: str = "") -> None:
    """Check that training comes to the same numbers with any number of workers from `cluster.min_workers` to all.

    Args:
      config: the config.
      num_replicas: replicas per worker; None: as the config says, because only TensorFlow knows the GPUs.
      why: a sentence that says who started the workers; '': this command does, unless `cluster.resolver` denies it.

    Raises:
      ConfigError: it may not.
    """
    least = config.cluster.min_workers
    most = config.cluster.num_workers
    if least is None or config.command not in schema.TRAINING_COMMANDS:
        return
    given = f"cluster.min_workers={least}"
    if config.strategy.name != "multi_worker":
        raise NoEffect(f"{given} has no effect with strategy={config.strategy.name}, only with multi_worker.")
    if not why and config.cluster.resolver not in ("auto", "local"):
        why = f"cluster.resolver={config.cluster.resolver}."
    if why:
        raise Conflict(
            f"{given}: {why} Only a command that starts all workers itself may go on with fewer; Slurm and Kubernetes "
            "start lost ones again. Remove the key."
        )
    if least > most:
        raise OutOfRange(f"{given} is more than cluster.num_workers={most}. Use 1 to {most}.")
    if least < most:
        _check_fewer_workers(config, least, num_replicas)


def _check_fewer_workers(config: Config, least: int, num_replicas: int | None) -> None:
    """Check that a step has the same examples and the same learning rate when workers are lost.

    Args:
      config: the config.
      least: `cluster.min_workers`, fewer than all.
      num_replicas: as in `check_min_workers`.

    Raises:
      ConfigError: it may not.
    """
    most = config.cluster.num_workers
    train = config.input.train
    given = f"cluster.min_workers={least}, with which {most} workers may become {least}"
    if train.shard != "examples":
        raise Conflict(
            f"{given}: with input.train.shard={train.shard} fewer workers may not go on at the next example. Set "
            "input.train.shard=examples."
        )
    if config.train.learning_rate_scaling != "none":
        raise Conflict(
            f"{given}: train.learning_rate_scaling={config.train.learning_rate_scaling} would change the learning rate "
            "with them. Set it to none, and the rate in the model."
        )
    if train.batch_size is None:
        raise NotSet(f"{given}: with input.train.batch_size=null a step would have other examples. Set a batch size.")
    # The parts that one worker makes of its rows: replicas x micro-batches.
    parts = (num_replicas or config.strategy.virtual_devices or 1) * config.train.first_accumulation
    refused_counts = [count for count in range(most, least - 1, -1) if train.batch_size % (count * parts)]
    if refused_counts:
        unit = math.lcm(*range(least, most + 1)) * parts
        use = f"a multiple of {unit}, or " if unit <= MOST_COUNTED else ""
        counts = ", ".join(map(str, refused_counts[:9]))
        raise OutOfRange(
            f"{given}: input.train.batch_size={train.batch_size} does not divide over {counts} workers x {parts} "
            f"(replicas x micro-batches of each). Use {use}a larger cluster.min_workers."
        )


def check_batch_divides(config: Config, num_workers: int, why: str = "") -> None:
    """Check that the training batch divides over the replicas, if their number is known without TensorFlow.

    Args:
      config: the config.
      num_workers: number of workers of strategy=multi_worker; 1 if only the environment tells the number.
      why: a sentence that says where that number comes from; '': from the config.

    Raises:
      ConfigError: the batch size does not divide.
    """
    size = config.input.train.batch_size
    strategy = config.strategy
    num_micro_batches = config.train.first_accumulation
    replicas = 1
    if strategy.name in ("mirrored", "central_storage"):
        num_devices = len(strategy.devices or ())
        replicas = num_devices or strategy.num_gpus or strategy.virtual_devices or 1
    if strategy.name == "multi_worker":
        replicas = num_workers * (strategy.virtual_devices or 1)
    unit = replicas * num_micro_batches
    if size is None or size % unit == 0 or config.command not in schema.TRAINING_COMMANDS:
        return
    below = size // unit * unit
    above = below + unit
    use = f"{below} or {above}" if below else f"{above}"
    over = f"{replicas} replicas"
    if num_micro_batches != 1:
        over = f"{replicas} x {num_micro_batches} parts (train.gradient_accumulation={num_micro_batches})"
    message = f"input.train.batch_size={size} does not divide over {over}. Use {use}."
    if why:
        message = f"{message} {why}"
    raise OutOfRange(message)


def next_accumulation(number: int, batch_size: int | None, num_replicas: int) -> int | None:
    """Return the number of micro-batches to try where `number` of them need too much memory.

    It is twice the number, or the next larger one over which the batch divides.

    Args:
      number: the number of micro-batches of each replica so far.
      batch_size: the global batch size; None: batches are those of the input function, which divide over any number.
      num_replicas: number of replicas, over all workers.

    Returns:
      The number; None: each micro-batch has a single example, so with more of them one would be empty.
    """
    if batch_size is None:
        return 2 * number
    examples = batch_size // num_replicas
    for larger in range(2 * number, examples + 1):
        if examples % larger == 0:
            return larger
    return None


def _check_found_accumulation(config: Config) -> Iterator[ConfigError]:
    """Yield messages about settings with which the supervisor cannot find the number of micro-batches."""
    if not config.train.finds_accumulation or config.command not in schema.TRAINING_RUNS:
        return
    given = "train.gradient_accumulation=auto"
    if config.run.inline:
        yield Conflict(
            f"run.inline=true with {given}: no other process can start the run again with smaller micro-batches. Set "
            "train.gradient_accumulation to a number."
        )
    least = config.cluster.min_workers
    if least is not None and least < config.cluster.num_workers:
        yield Conflict(
            f"cluster.min_workers={least} with {given}: the batch may not divide over the "
            "micro-batches of fewer workers. Set train.gradient_accumulation to a number."
        )
    if config.strategy.name == "parameter_server" and config.input.train.batch_size is None:
        yield NotSet(
            f"{given} with strategy=parameter_server and input.train.batch_size=null: the coordinator does not see how "
            "many examples a batch has. Set input.train.batch_size, or train.gradient_accumulation to a number."
        )
