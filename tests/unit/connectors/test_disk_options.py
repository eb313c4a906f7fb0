"""The connector's options of the disk tier."""

from __future__ import annotations

from typing import Any

import pytest

from ecotone.connectors.config import parse_options
from ecotone.errors import ConfigError
from ecotone.node.disk import DiskConfig


def test_without_a_disk_there_is_none() -> None:
    assert parse_options({}).disk_config is None


def test_a_disk_has_a_place_a_size_and_a_policy() -> None:
    assert parse_options({"disk": "/d"}).disk_config == DiskConfig(root="/d", budget=10 * 2**30, fsync="none")
    options = {"disk": "/d", "disk_size": "1MiB", "fsync": "data"}
    assert parse_options(options).disk_config == DiskConfig(root="/d", budget=2**20, fsync="data")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"disk": "/d", "disk_size": "much"}, "disk_size='much'"),
        ({"disk": "/d", "disk_size": 0}, "above 0"),
        ({"disk": "/d", "fsync": "always"}, "fsync='always' is not one of none, data"),
        ({"disk": "/d", "disk_size": "9" * 400}, "is not a size"),
        ({"disk_size": "1MiB"}, "disk_size='1MiB' is of a disk: say with 'disk' in which directory"),
        ({"fsync": "none"}, "fsync='none' is of a disk"),
        ({"disk": 7}, "disk"),
        ({"disk": ""}, "disk='' is not the path of a directory"),
        ({"disk": "/d\0"}, "is not the path of a directory"),
        ({"node": "unix:/s", "disk": "/d"}, "disk='/d'.*ecotone node"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_options(options)
