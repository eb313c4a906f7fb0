"""Who takes part in EC transfers, checked once."""

from __future__ import annotations

from ecotone.errors import ConfigError
from ecotone.protocol.connector import Participant


def check_participants(participants: tuple[Participant, ...]) -> tuple[int, ...]:
    """The ranks that take part, in order.

    Raises:
        ConfigError: nobody takes part, a rank is listed twice, or they are on more than one host.
    """
    ranks = tuple(sorted(p.rank for p in participants))
    hosts = sorted({p.host for p in participants})
    if not ranks:
        raise ConfigError("an EC connector is configured, but no rank has an encoder cache")
    if len(set(ranks)) != len(ranks):
        raise ConfigError(f"ranks {list(ranks)}: each may take part in EC transfers once")
    if len(hosts) > 1:
        raise ConfigError(
            f"ranks that share an encoder cache are on {len(hosts)} hosts ({', '.join(hosts)}): "
            "a node's region reaches one host, so all of them must be on one"
        )
    return ranks
