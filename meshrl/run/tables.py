"""Iterate over the tables of a configuration, however deep."""

from collections.abc import Iterator

from meshrl.config import Config, Keys


def tables_of(config: Config, above: Keys = ()) -> Iterator[tuple[Keys, Config]]:
    """Yield the configuration and each table in it, with its keys."""
    yield above, config
    for name in type(config).model_fields:
        value: object = getattr(config, name)
        if isinstance(value, Config):
            yield from tables_of(value, (*above, name))


def reads_reference(config: Config) -> bool:
    """True if the reference is read: the weight of a KL penalty is above 0."""
    weights = [getattr(table, key) for _, table in tables_of(config) for key in type(table).model_fields if key == "kl"]
    return any(weights) or not weights
