"""The settings of a tf.data service; `runner.data.service` lets it compute an input."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.settings.limits import setting


@dataclass(frozen=True)
class DataService:
    """The tf.data service that computes an input.

    Attributes:
      address: the dispatcher's address: grpc://host:port; None: no service.
      processing_mode: that of `tf.data.experimental.service.distribute`. A script may give a `ShardingPolicy`, so the
        limits are those of the key only.
      job_name: runs with the same job name share the elements; None: only the workers of this run share them.
    """

    address: str | None
    processing_mode: str = setting("distributed_epoch", choices=("distributed_epoch", "parallel_epochs"))
    job_name: str | None = None
