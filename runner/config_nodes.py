"""The schema as Hydra and OmegaConf take it: a node that files and overrides are merged into."""

from __future__ import annotations

from typing import Any

from omegaconf import Container, OmegaConf

from runner.config import Config


def register_schema() -> None:
    """Makes the schema known to Hydra: `conf/config.yaml` starts from it."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group="schema", name="config", node=schema(), package="_global_", provider="runner")


def schema() -> Any:
    """The schema as an OmegaConf node: only what it declares; `params`, `tags` and names of variables are free."""
    node = thawed(OmegaConf.structured(Config))
    inputs = node.input
    free = [node.model.params, inputs.train.params, inputs.eval, inputs.predict.params, node.tracking.tags]
    for mapping in (*free, node.train.warm_start.rename, node.train.warm_start.vocabularies):
        OmegaConf.set_struct(mapping, False)
    return node


def thawed(node: Any) -> Any:
    """Frozen dataclasses make read-only nodes; what Hydra merges into must not be."""
    OmegaConf.set_readonly(node, None)
    for key in () if node._is_none() else node:
        child = node._get_node(key)
        if isinstance(child, Container):
            thawed(child)
    return node
