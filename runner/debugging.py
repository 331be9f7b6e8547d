"""run.debug: a config that tries things out, made of one that trains."""

from __future__ import annotations

import dataclasses

from runner.config import Config, ConfigError
from runner.step_range import parse_step_range

FAST_DEV_STEPS = 2


def debugged(config: Config) -> Config:
    """`config` with what `run.debug` changes in it; rewriting it again changes nothing.

    fast_dev: two steps of training, one batch of each evaluation, and no tracking.
    overfit: the first batch again and again (`runner.build` sees to that), for `train.max_steps`.

    Raises:
      ConfigError: overfit, and nothing says when to stop; fast_dev, and steps are to be profiled that it does not take.
    """
    train = config.train
    if config.run.debug == "fast_dev":
        if config.run.profile is not None and parse_step_range(config.run.profile).last > FAST_DEV_STEPS:
            raise ConfigError(
                f"run.profile={config.run.profile}: run.debug=fast_dev takes no more than {FAST_DEV_STEPS} steps. "
                "Set one of them to null."
            )
        return dataclasses.replace(
            config,
            train=dataclasses.replace(train, max_steps=min(train.max_steps or FAST_DEV_STEPS, FAST_DEV_STEPS)),
            eval=dataclasses.replace(config.eval, steps=1),
            tracking=dataclasses.replace(config.tracking, backend="none"),
        )
    if config.run.debug == "overfit":
        if train.max_steps is None:
            raise ConfigError(
                "run.debug=overfit trains on one batch without end, and train.max_steps=null does not end it. "
                "Set train.max_steps."
            )
        return dataclasses.replace(config, train=dataclasses.replace(train, max_epochs=None))
    return config
