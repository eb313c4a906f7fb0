"""The command line without a model: usage, errors, exit codes, and that importing it costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ecotone
from ecotone.cli import app as app_module
from ecotone.cli import models
from ecotone.cli.demo import DemoResult
from ecotone.cli.passes import Pass, RankFigures
from ecotone.cli.questions import Digit, load_digits, plan_questions
from ecotone.errors import ModelError

RUNNER = CliRunner()


def output(
    text: str, token: int, *, ttft_s: float = 0.01, encoded: int = 0, loaded: int = 0
) -> ecotone.RequestOutput:
    metrics = ecotone.RequestMetrics(
        ttft_s=ttft_s, total_s=1.0, num_prompt_tokens=5, num_encoded=encoded, num_loaded=loaded, num_cached=0
    )
    return ecotone.RequestOutput(
        request_id="r", text=text, token_ids=(token,), finish_reason="stop", metrics=metrics
    )


@pytest.fixture
def result() -> DemoResult:
    """Two images; the second answer of the uncached pass is wrong."""
    questions = [
        q for q in plan_questions([Digit(Path("a.png"), 3), Digit(Path("b.png"), 4)]) if len(q.images) == 1
    ]
    passes = []
    for name, ttft_s, loads in (("with the cache", 0.002, 1), ("without", 0.006, 0)):
        each = Pass(name, engine=None)  # type: ignore[arg-type]
        each.questions = questions
        each.outputs = [
            output(" " + q.answer, 7, ttft_s=ttft_s, encoded=1 - loads * q.is_repeat, loaded=loads * q.is_repeat)
            for q in questions
        ]
        each.ranks = [
            RankFigures(
                0, 11, encodes=6 - 4 * loads, saves=2 * loads, loads=4 * loads, bytes_saved=8, bytes_loaded=9
            )
        ]
        passes.append(each)
    return DemoResult(Path("model"), 2, 1, *passes)


def test_help_and_version_need_no_torch() -> None:
    code = (
        "import sys, ecotone, ecotone.cli\n"
        "assert 'EngineConfig' in dir(ecotone)\n"
        "assert not {'torch', 'transformers', 'PIL'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there() -> None:
    for name in ecotone.__all__:
        assert getattr(ecotone, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = ecotone.Motor  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", [[], ["demo"], ["generate"], ["inspect"]])
def test_help(command: list[str]) -> None:
    done = RUNNER.invoke(app_module.app, [*command, "--help"])
    assert done.exit_code == 0
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["sing"],
        ["demo", "--images", "1"],
        ["demo", "--images", "many"],
        ["generate"],
        ["generate", "digits"],
        ["--frob"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = RUNNER.invoke(app_module.app, arguments)
    assert done.exit_code == 2
    assert done.stdout == ""


def run_main(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["ecotone", *arguments])
    with pytest.raises(SystemExit) as exit_:
        app_module.main()
    captured = capsys.readouterr()
    return int(exit_.value.code or 0), captured.out, captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "no/model", "--prompt", "hi"], "model 'no/model' is neither a folder nor one of digits"),
        (["generate", "digits", "--prompt", "hi", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "digits", "--prompt", "hi", "--memory", "lots"], "memory='lots' is not a size"),
        (["demo", "--images", "1000"], "1000 images were asked for"),
        (["demo", "--images", "6", "--cache-images", "4"], "at most 3"),
        (["demo", "--model", "/"], "labels.json"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_main(arguments, monkeypatch, capsys)
    assert (code, out) == (1, "")
    *before, last = err.strip().splitlines()
    assert last.startswith("error: ")
    assert says in last
    assert all(line.endswith("...") for line in before)  # what was going on


def test_without_the_engine_extra_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(app_module.demo_command, "run", lambda *_: missing("torch"))
    code, _, err = run_main(["demo"], monkeypatch, capsys)
    assert code == 1
    assert "pip install 'ecotone[engine]'" in err
    monkeypatch.setattr(app_module.demo_command, "run", lambda *_: missing("ecotone.typo"))
    monkeypatch.setattr(sys, "argv", ["ecotone", "demo"])
    with pytest.raises(ModuleNotFoundError, match="typo"):
        app_module.main()


def test_a_checkout_without_the_shipped_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(models.SHIPPED, "digits", tmp_path / "gone")
    with pytest.raises(ModelError, match="comes with a checkout"):
        models.find_model("digits")
    assert models.find_model(str(tmp_path)) == tmp_path


def test_demo_prints_one_json_object_or_tables(result: DemoResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module.demo_command, "run", lambda *_: result)
    done = RUNNER.invoke(app_module.app, ["demo", "--json"])
    assert done.exit_code == 0
    figures = json.loads(done.stdout)
    assert figures["requests"] == figures["correct"] == 6
    assert (figures["encodes"], figures["loads"], figures["saves"]) == (2, 4, 2)
    assert figures["identical_to_uncached"] is True
    assert figures["ttft_pairs"] == 4
    assert (figures["ttft_load_ms"], figures["ttft_encode_ms"]) == (pytest.approx(2), pytest.approx(6))
    assert figures["uncached"]["encodes"] == 6
    assert [rank["pid"] for rank in figures["ranks"]] == [11]
    done = RUNNER.invoke(app_module.app, ["demo"])
    assert done.exit_code == 0
    assert "token-identical" in done.stdout


def test_demo_fails_when_the_answers_differ(result: DemoResult, monkeypatch: pytest.MonkeyPatch) -> None:
    result.uncached.outputs[1] = output("other", 8)
    monkeypatch.setattr(app_module.demo_command, "run", lambda *_: result)
    for arguments in (["demo"], ["demo", "--json"]):
        done = RUNNER.invoke(app_module.app, arguments)
        assert done.exit_code == 1
    assert json.loads(done.stdout)["identical_to_uncached"] is False
    assert json.loads(done.stdout)["uncached"]["correct"] == 5


def test_a_pair_differs_by_one_load_and_nothing_else(result: DemoResult) -> None:
    assert result.paired == [2, 3, 4, 5]
    result.cached.outputs[2] = output("", 7, encoded=1)  # evicted from the node: no load
    result.uncached.outputs[3] = output("", 7)  # still in the encoder cache: no encode
    assert result.paired == [4, 5]


def test_questions_come_back_to_every_image(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    labels = {f"digit{label}_{number}.png": label for label in range(4) for number in range(2)}
    (tmp_path / "images" / "labels.json").write_text(json.dumps(labels))
    digits = load_digits(tmp_path, 6)
    assert [digit.label for digit in digits] == [0, 1, 2, 3, 0, 1]
    questions = plan_questions(digits)
    for digit in digits:
        assert sum(digit.path in question.images for question in questions) == 5
    assert [q.answer for q in questions if q.kind == "sum"] == [
        "The sum is three.", "The sum is one.", "The sum is three.",
    ]  # fmt: skip
    larger = [q.answer for q in questions if q.kind == "larger"]
    assert larger == ["Both digits are zero.", "Both digits are one.", "The larger digit is three."]
    seen: set[Path] = set()
    for question in questions:
        assert question.is_repeat == seen.issuperset(question.images)
        seen.update(question.images)
