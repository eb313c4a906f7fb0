"""The pytest plug-in: one test for each rule of the conformance kit.

Say in the ini file what to check (``ecotone_connector = package.module:Factory``, one a line), or on the command
line (``--ecotone-connector``). Nothing of the kit is imported otherwise: pytest loads this module everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

_reports = pytest.StashKey[dict[str, Any]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    text = "check an EC connector, a Subject or a worker metadata type with Ecotone's conformance kit"
    parser.addini("ecotone_connector", f"{text} (MODULE:NAME, one a line)", type="linelist", default=[])
    group = parser.getgroup("ecotone")
    group.addoption("--ecotone-connector", action="append", default=[], metavar="MODULE:NAME", help=text)
    group.addoption("--ecotone-seed", type=int, default=0, help="of the kit's random examples")
    group.addoption("--ecotone-examples", type=int, default=40, help="how many random examples the kit runs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the rules' tests, before any are deselected."""
    for name in (*config.getini("ecotone_connector"), *config.getoption("ecotone_connector")):
        items.extend(_rules(session, name))


def _rules(session: pytest.Session, name: str) -> Iterator[pytest.Item]:
    target = import_module("ecotone.testing.kit.target")
    for rule in target.rules_for(target.find_target(name)):
        yield RuleItem.from_parent(session, name=f"{name}[{rule.name}]", connector=name, rule=rule)


class RuleItem(pytest.Item):
    """One rule. The first one that runs has the kit check them all."""

    def __init__(self, *, connector: str, rule: Any, **options: Any) -> None:
        super().__init__(**options)
        self._connector = connector
        self._rule = rule

    def runtest(self) -> None:
        """Fail where the rule is broken."""
        verdict = self._report().verdict(self._rule.name)
        if verdict.status == "violated":
            raise RuleBrokenError(verdict.explanation)
        if verdict.status != "held":
            pytest.skip(verdict.why or "nothing that was run had to do with it")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any) -> Any:
        """The kit's words alone: where in the kit it was raised helps nobody."""
        if isinstance(excinfo.value, RuleBrokenError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args)

    def reportinfo(self) -> tuple[str, None, str]:
        """See ``pytest.Item``."""
        return self._connector, None, f"{self._connector}: {self._rule.name}"

    def _report(self) -> Any:
        reports = self.config.stash.setdefault(_reports, {})
        if self._connector not in reports:
            target = import_module("ecotone.testing.kit.target")
            reports[self._connector] = target.check_target(
                target.find_target(self._connector),
                seed=self.config.getoption("ecotone_seed"),
                examples=self.config.getoption("ecotone_examples"),
            )
        return reports[self._connector]


class RuleBrokenError(Exception):
    """A rule was broken; the text is the kit's explanation."""
