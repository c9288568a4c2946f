"""Put registered choices into Hydra's store, under the name of their group."""

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from optrun.config import registry
from optrun.config.groups import foreign_choices

_PROVIDER = "optrun registry"


def publish(group: str) -> None:
    """Replace the registered choices of a group in Hydra's store, with their schemas.

    Their values are their schemas' defaults.
    """
    store = ConfigStore.instance()
    stored = store.repo.get(group, {})
    for file, node in list(stored.items()):
        if getattr(node, "provider", None) == _PROVIDER:
            del stored[file]
    for name, row in foreign_choices(group).items():
        schema = OmegaConf.structured(row.schema)
        store.store(group=group, name=f"{name}_schema", node=schema, provider=_PROVIDER)
        store.store(
            group=group, name=name, node=OmegaConf.merge(schema, row.values()), provider=_PROVIDER
        )


def publish_chosen(config_path: str) -> bool:
    """Import a choice of an installed package, and put it into Hydra's store.

    Args:
        config_path: The choice, or its schema, for Hydra, such as `optimizer/my_lion`.

    Returns:
        Whether a package has such a choice.

    Raises:
        ConfigError: It cannot be imported.
    """
    group, _, name = config_path.removesuffix(".yaml").removesuffix("_schema").partition("/")
    if group not in registry.GROUPS or registry.find(registry.GROUPS[group], name) is None:
        return False
    publish(group)
    return True
