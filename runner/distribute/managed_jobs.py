"""Managed training jobs, of Vertex AI and of Amazon SageMaker: the folders that they offer, and SageMaker's hosts.

Nothing is taken outside of such a job, because notebooks and images of both set some of these variables, too. The roles
in a job of Vertex AI stand in its TF_CONFIG.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.config.schema import ConfigError
from runner.system.files import read_json

CHECKPOINTS = "/opt/ml/checkpoints"
"""The folder of each host that SageMaker copies to S3 while a job runs, and back when it is started again."""
MODEL = "/opt/ml/model"
"""The folder of each host that SageMaker packs as the model of a job."""
RESOURCES = "/opt/ml/input/config/resourceconfig.json"
"""The file of SageMaker with the hosts of a job, also in images without its toolkit, which sets the SM_ variables."""

_OF_VERTEX = {"model_dir": "AIP_CHECKPOINT_DIR", "export.dir": "AIP_MODEL_DIR"}


def folders(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return config key -> (folder or URL that this job offers for it, who says so); {} outside of such a job.

    Raises:
      ConfigError: as `sagemaker_hosts`.
    """
    hosts, _ = sagemaker_hosts(env)
    is_vertex = "CLUSTER_SPEC" in env or "CLOUD_ML_JOB_ID" in env
    found: dict[str, tuple[str, str]] = {}
    variables: Mapping[str, str] = {}
    if hosts:
        found["export.dir"] = (MODEL, "SageMaker")
        variables = {"export.dir": "SM_MODEL_DIR"}
    elif is_vertex:
        variables = _OF_VERTEX
    # Each host has a folder of checkpoints for itself, but the tasks of a run need one that all of them share.
    if len(hosts) == 1:
        found["model_dir"] = (CHECKPOINTS, "SageMaker")
    for key, variable in variables.items():
        if env.get(variable):
            found[key] = (env[variable], variable)
    return found


def sagemaker_hosts(env: Mapping[str, str]) -> tuple[list[str], str]:
    """Return (the names of the hosts of this SageMaker training job, in the same order on each; that of this host);
    ([], ''): this is none.

    Raises:
      ConfigError: SM_HOSTS is no list of names.
    """
    if not env.get("TRAINING_JOB_NAME"):
        return [], ""
    resources: Mapping[str, Any] = {}
    if "SM_HOSTS" not in env:
        resources = read_json(Path(RESOURCES)) or {}
    given = env.get("SM_HOSTS") or json.dumps(resources.get("hosts", []))
    try:
        hosts = sorted(json.loads(given))
    except (ValueError, TypeError):
        raise ConfigError(f'SM_HOSTS={given} is no list of names. SageMaker writes ["algo-1", "algo-2"].') from None
    return hosts, env.get("SM_CURRENT_HOST", resources.get("current_host", ""))
