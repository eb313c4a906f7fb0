"""``ecotone check`` and the pytest plug-in, as their users meet them."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ecotone.cli.app import app

EXAMPLES = Path(__file__).parents[3] / "examples"
HERE = Path(__file__).parent


@pytest.fixture
def check(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.chdir(EXAMPLES)

    def run(*arguments):
        return CliRunner().invoke(app, ["check", *arguments])

    return run


def test_a_right_connector(check):
    result = check("kit_broken:OneRank", "--examples", "1")
    assert result.exit_code == 0, result.output
    assert "found-after-restart          skipped   without durable" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("passed: 2")


def test_a_broken_connector_is_explained_and_can_be_replayed(check):
    arguments = ("kit_broken:ForgetsFailedSaves", "--only", "encode fails (0)")
    result = check(*arguments)
    assert result.exit_code == 1
    assert "rests-when-done: has_pending_work() ends once" in result.stdout
    assert "after these events:" in result.stdout
    assert "replay: seed 0, example encode fails (0)" in result.stdout
    plain = json.loads(check(*arguments, "--json").stdout)
    broken = [verdict for verdict in plain["verdicts"] if verdict["status"] == "violated"]
    assert not plain["ok"]
    assert [verdict["rule"]["name"] for verdict in broken] == ["rests-when-done"]
    assert broken[0]["violation"]["example"] == "encode fails (0)"


def test_a_factory_with_its_options(check):
    options = json.dumps({"directory": "{scratch}"})
    result = check("file_connector:FileConnectorFactory", "--options", options, "--only", "hit (0)")
    assert result.exit_code == 0, result.output
    refused = check("file_connector:FileConnectorFactory", "--only", "hit (0)")
    assert refused.exit_code == 1
    assert "validate raised ConfigError" in refused.stdout


def test_a_metadata_type(check):
    assert check("file_connector:Ended").exit_code == 0
    result = check("kit_mutants:Concatenates", "--json")
    assert result.exit_code == 1
    statuses = {v["rule"]["name"]: v["status"] for v in json.loads(result.stdout)["verdicts"]}
    assert statuses["metadata-is-idempotent"] == statuses["metadata-is-commutative"] == "violated"
    assert statuses["metadata-is-associative"] == "held"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "neither MODULE:NAME nor one of EcotoneConnector"),
        (["nowhere:Thing"], "cannot be imported"),
        (["file_connector:Thing"], "has no 'Thing'"),
        (["file_connector:Path"], "is no ECConnectorFactory, no Subject"),
        (["EcotoneConnector", "--options", "x"], "--options is no JSON"),
        (["EcotoneConnector", "--options", "[1]"], "must be a JSON object"),
        (["EcotoneConnector", "--only", "x"], "there is no example 'x'"),
    ],
)
def test_wrong_usage(check, arguments, said):
    result = check(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\nsubject = Nothing()\n", "NameError: name 'Nothing' is not defined (raises_1.py, line 2)"),
        ("subject = (\n", "SyntaxError: '(' was never closed (raises_2.py, line 1)"),
    ],
)
def test_a_module_that_raises_is_named_with_the_line(check, tmp_path, monkeypatch, text, said):
    monkeypatch.syspath_prepend(str(tmp_path))
    name = said[said.index("(raises") + 1 : said.index(".py")]
    tmp_path.joinpath(f"{name}.py").write_text(text)
    result = check(f"{name}:subject")
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.fixture
def run_pytest(check, capsys, tmp_path):
    """Another pytest within this one; its return code and what it printed."""
    known = any(point.name == "ecotone" for point in entry_points(group="pytest11"))
    plugin = [] if known else ["-p", "ecotone.testing.pytest_plugin"]
    quiet = [
        f"-pno:{name}" for name in ("timeout", "cacheprovider", "pytest_cov", "faulthandler", "hypothesispytest")
    ]

    def run(ini, *arguments):
        tmp_path.joinpath("pytest.ini").write_text(f"[pytest]\n{ini}\n")
        where = [
            f"--rootdir={tmp_path}",
            f"-c{tmp_path / 'pytest.ini'}",
            "-s",
            "-v",
            "-rs",
            "--ecotone-examples=0",
        ]
        code = pytest.main([*plugin, *quiet, *where, *arguments, str(tmp_path)])
        return code, capsys.readouterr().out

    return run


def test_the_plug_in_has_one_test_for_each_rule(run_pytest):
    code, said = run_pytest("ecotone_connector = kit_broken:OneRank")
    assert code == 0, said
    assert "kit_broken:OneRank[right-rows] PASSED" in said
    assert "kit_broken:OneRank[metadata-round-trips] PASSED" in said
    assert "without zero_copy" in said
    assert "nothing that was run had to do with it" in said


def test_the_plug_in_shows_what_the_kit_found(run_pytest):
    code, said = run_pytest("", "--ecotone-connector=kit_mutants:Concatenates", "-kidempotent or associative")
    assert code == 1
    assert "1 failed, 1 passed, 5 deselected" in said
    assert "metadata-is-idempotent: a.aggregate(a) == a" in said
    assert "Traceback" not in said
