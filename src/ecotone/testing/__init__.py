"""Test doubles, and the conformance kit: what holds connectors, their metadata and executors to the contracts."""

from ecotone.testing.kit import (
    Capabilities,
    Report,
    Rule,
    Subject,
    Verdict,
    Violation,
    check_connector,
    check_worker_metadata,
)

__all__ = [
    "Capabilities",
    "Report",
    "Rule",
    "Subject",
    "Verdict",
    "Violation",
    "check_connector",
    "check_worker_metadata",
]
