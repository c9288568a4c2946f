"""Registered choices as Hydra knows them: in its store, under the name of their group."""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from optrun import registry
from optrun.config.groups import complete_choices


def publish(group: str) -> None:
    """Put the registered choices of a group into Hydra's store: their values are their schemas' defaults."""
    for name, row in complete_choices(group).items():
        node = OmegaConf.merge(OmegaConf.structured(row.schema), row.values())
        ConfigStore.instance().store(group=group, name=name, node=node, provider=str(row.origin))
        schema = OmegaConf.structured(row.schema)
        ConfigStore.instance().store(group=group, name=f"{name}_schema", node=schema, provider=str(row.origin))


def publish_chosen(config_path: str) -> bool:
    """Import and publish the choice of an entry point that a defaults list or the command line names.

    Args:
        config_path: Such as `optimizer/my_lion`.

    Returns:
        Whether there is one.

    Raises:
        ConfigError: It cannot be imported.
    """
    group, _, name = config_path.removesuffix(".yaml").removesuffix("_schema").partition("/")
    if group not in registry.GROUPS or registry.find(registry.GROUPS[group], name) is None:
        return False
    publish(group)
    return True
