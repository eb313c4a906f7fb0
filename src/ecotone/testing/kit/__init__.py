"""The conformance kit: whether connectors, metadata and executors keep the contracts of the step protocol."""

from ecotone.testing.kit.capabilities import Capabilities, Subject
from ecotone.testing.kit.connector import check_connector
from ecotone.testing.kit.executor import check_executor
from ecotone.testing.kit.metadata import check_worker_metadata
from ecotone.testing.kit.report import Report, Verdict, Violation
from ecotone.testing.kit.rules import CONNECTOR_RULES, EXECUTOR_RULES, METADATA_RULES, Rule

__all__ = [
    "CONNECTOR_RULES",
    "EXECUTOR_RULES",
    "METADATA_RULES",
    "Capabilities",
    "Report",
    "Rule",
    "Subject",
    "Verdict",
    "Violation",
    "check_connector",
    "check_executor",
    "check_worker_metadata",
]
