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
_OF_SAGEMAKER = {"export.dir": "SM_MODEL_DIR"}


def folders(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return config key -> (folder or URL that this job offers for it, who says so); {} outside of such a job.

    Raises:
      ConfigError: as `sagemaker_hosts`.
    """
    hosts, is_vertex = sagemaker_hosts(env), "CLUSTER_SPEC" in env or "CLOUD_ML_JOB_ID" in env
    names = _OF_VERTEX if is_vertex else _OF_SAGEMAKER if hosts else {}
    found = {key: (env[name], name) for key, name in names.items() if env.get(name)}
    return {"model_dir": (CHECKPOINTS, "SageMaker"), **found} if len(hosts) == 1 else found


def sagemaker_hosts(env: Mapping[str, str]) -> list[str]:
    """Return the names of the hosts of this SageMaker training job, in the same order on each; []: this is none.

    Raises:
      ConfigError: SM_HOSTS is no list of names.
    """
    given = env.get("SM_HOSTS", "[]") if env.get("TRAINING_JOB_NAME") else "[]"
    try:
        return sorted(json.loads(given))
    except (ValueError, TypeError):
        raise ConfigError(f'SM_HOSTS={given} is no list of names. SageMaker writes ["algo-1", "algo-2"].') from None
