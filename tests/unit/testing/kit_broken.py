"""Connectors under names that a command line can say."""

import msgspec
from kit_mutants import CONNECTORS
from kit_subjects import FILES

from ecotone.testing import Capabilities

ForgetsFailedSaves = CONNECTORS["ForgetsFailedSaves"][0]
OneRank = msgspec.structs.replace(FILES, capabilities=Capabilities(roles=("ec_both",), max_ranks=1))
