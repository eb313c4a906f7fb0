"""What the kit's tests check."""

from __future__ import annotations

import sys
from pathlib import Path

from ecotone.testing.kit.own import BUILT_IN

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import file_connector

FILES = file_connector.subject
ECOTONE = BUILT_IN["EcotoneConnector"]
DISK = BUILT_IN["EcotoneConnector-disk"]
NODE = BUILT_IN["EcotoneConnector-node"]
HOSTED = BUILT_IN["EcotoneConnector-hosted"]
