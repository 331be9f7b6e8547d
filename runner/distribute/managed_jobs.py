"""Managed training jobs, of Vertex AI and of Amazon SageMaker: the folders that they offer, and SageMaker's hosts.

Nothing is taken outside of such a job, because notebooks and images of both set some of these variables, too. The roles
in a job of Vertex AI stand in its TF_CONFIG.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from runner.config.schema import ConfigError

CHECKPOINTS = "/opt/ml/checkpoints"
"""The folder of each host that SageMaker copies to S3 while a job runs, and back when it is started again."""

_OF_VERTEX = {"model_dir": "AIP_CHECKPOINT_DIR", "export.dir": "AIP_MODEL_DIR"}


def folders(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return config key -> (folder or URL that this job offers for it, who says so); {} outside of such a job.

    Raises:
      ConfigError: as `sagemaker_hosts`.
    """
    hosts, found = sagemaker_hosts(env), dict[str, tuple[str, str]]()
    if len(hosts) == 1:
        found["model_dir"] = (CHECKPOINTS, "SageMaker")
    in_vertex = not env.keys().isdisjoint(("CLUSTER_SPEC", "CLOUD_ML_JOB_ID"))
    for key, name in (_OF_VERTEX if in_vertex else {"export.dir": "SM_MODEL_DIR"} if hosts else {}).items():
        if env.get(name):
            found[key] = (env[name], name)
    return found


def sagemaker_hosts(env: Mapping[str, str]) -> list[str]:
    """Return the names of the hosts of this SageMaker training job, the same on each of them; []: this is none.

    Raises:
      ConfigError: SM_HOSTS is no list of names.
    """
    given = env.get("SM_HOSTS", "") if env.get("TRAINING_JOB_NAME") else ""
    try:
        hosts = json.loads(given or "[]")
        return sorted(hosts)
    except (ValueError, TypeError):
        raise ConfigError(f'SM_HOSTS={given} is no list of names. SageMaker writes ["algo-1", "algo-2"].') from None
