"""What the kit's tests check."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from ecotone.connectors.factory import EcotoneConnectorFactory
from ecotone.testing import Capabilities, Subject

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import file_connector

torch.set_num_threads(1)

FILES = file_connector.subject
ECOTONE = Subject(
    factory=EcotoneConnectorFactory(),
    capabilities=Capabilities(zero_copy=True, background=True),
    options={"memory": 4096},
    name="EcotoneConnector",
)
