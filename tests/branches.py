"""Fail where a room's tests take less than the promised share of its branches.

Usage: ``python tests/branches.py coverage.json``, after ``pytest --cov --cov-report=json``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROMISED = 0.90
ROOMS = ("protocol", "node", "connectors", "engine")


def shares(report: Path) -> dict[str, float]:
    """The covered share of each room's branches."""
    files = json.loads(report.read_text())["files"]
    found = {}
    for room in ROOMS:
        summaries = [f["summary"] for name, f in files.items() if f"/ecotone/{room}/" in name]
        total = sum(s["num_branches"] for s in summaries)
        found[room] = sum(s["covered_branches"] for s in summaries) / total if total else 0.0
    return found


def main() -> int:
    """Print the shares; 1 when one is too small."""
    found = shares(Path(sys.argv[1]))
    for room, share in found.items():
        verdict = "" if share >= PROMISED else f"   below the promised {PROMISED:.0%}"
        print(f"branches taken in {room:11s} {share:6.1%}{verdict}")
    return int(min(found.values()) < PROMISED)


if __name__ == "__main__":
    sys.exit(main())
