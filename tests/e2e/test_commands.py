"""The commands as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from digit_questions import MODEL, WORDS, Digit
from typer.testing import CliRunner

from ecotone.cli import app as app_module
from ecotone.node.server.node import SharedNode

pytestmark = pytest.mark.e2e

ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}
ECOTONE = [str(Path(sys.executable).parent / "ecotone")]
RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command sets for its process ends with the test."""
    for name in ("OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_VERBOSITY"):
        monkeypatch.setenv(name, ENV[name])


def run(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *arguments], capture_output=True, text=True, env=ENV, timeout=100)


def test_demo_as_json() -> None:
    done = run(ECOTONE, "demo", "--json", "--images", "6", "--cache-images", "2")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["requests"] == 24
    assert figures["correct"] >= 22
    assert figures["identical_to_uncached"] is True
    assert figures["images"] == figures["encodes"] == figures["saves"] == 6
    assert figures["loads"] == 24  # twelve about one image, six about two
    assert figures["uncached"]["encodes"] == 30
    assert figures["bytes_loaded"] == 4 * figures["bytes_saved"] > 0
    assert figures["ttft_pairs"] == 12
    assert figures["ttft_encode_ms"] > 0
    assert figures["ttft_load_ms"] > 0
    [rank] = figures["ranks"]
    assert rank["pid"] > 0
    assert (rank["encodes"], rank["loads"]) == (6, 24)
    assert "Traceback" not in done.stderr


def test_demo_as_tables() -> None:
    done = RUNNER.invoke(app_module.app, ["demo", "--images", "4", "--cache-images", "2"])
    assert done.exit_code == 0, done.stderr
    assert "token-identical" in done.stdout
    assert "loads from the node" in done.stdout


def test_generate_streams_the_answer(digits: list[Digit]) -> None:
    a, b = digits[3], digits[5]
    asked = ("--prompt", "What is the sum of the digits?", "--image", str(a.path), "--image", str(b.path))
    done = run([sys.executable, "-m", "ecotone"], "generate", str(MODEL), *asked)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"The sum is {WORDS[a.label + b.label]}.\n"
    assert "loading" in done.stderr


def test_a_raw_prompt_without_the_cache(digits: list[Digit]) -> None:
    raw = "USER: <image> What digit is this? ASSISTANT:"
    arguments = ["generate", "digits", "--raw", "--no-cache", "--prompt", raw, "--image", str(digits[3].path)]
    done = RUNNER.invoke(app_module.app, arguments)
    assert (done.exit_code, done.stdout) == (0, f"The digit is {WORDS[digits[3].label]}.\n")


def test_a_broken_image_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG\r\n\x1a\n")
    monkeypatch.setattr(
        sys, "argv", ["ecotone", "generate", "digits", "-p", "What digit is this?", "-i", str(broken)]
    )
    with pytest.raises(SystemExit) as exit_:
        app_module.main()
    captured = capsys.readouterr()
    assert (exit_.value.code, captured.out) == (1, "")
    assert captured.err.splitlines()[-1].startswith("error: image")
    assert "loading" not in captured.err  # it is said before a large model is loaded


def test_generate_says_what_was_encoded_and_a_disk_is_used_by_the_next_run(
    tmp_path: Path, digits: list[Digit]
) -> None:
    arguments = ["generate", "digits", "-p", "What digit is this?", "-i", str(digits[3].path)]
    last_lines = []
    for _ in range(2):
        done = RUNNER.invoke(app_module.app, [*arguments, "--disk", str(tmp_path / "cache"), "--memory", "1MiB"])
        assert (done.exit_code, done.stdout) == (0, f"The digit is {WORDS[digits[3].label]}.\n")
        last_lines.append(done.stderr.splitlines()[-1])
    assert last_lines[0].startswith("1 encoded, 0 loaded; first token after ")
    assert last_lines[1].startswith("0 encoded, 1 loaded; first token after ")


def test_generate_over_a_node(tmp_path: Path, digits: list[Digit], monkeypatch, capsys) -> None:
    arguments = ["generate", "digits", "-p", "What digit is this?", "-i", str(digits[3].path)]
    arguments += ["--node", str(tmp_path / "node")]
    with SharedNode(tmp_path / "node", {"": 2**20}) as node:
        thread = threading.Thread(target=node.run)
        thread.start()
        try:
            said = [RUNNER.invoke(app_module.app, arguments).stderr.splitlines()[-1] for _ in range(2)]
        finally:
            node.stop()
            thread.join()
    assert [line.partition(";")[0] for line in said] == ["1 encoded, 0 loaded", "0 encoded, 1 loaded"]
    monkeypatch.setattr(sys, "argv", ["ecotone", *arguments, "--memory", "1MiB"])
    with pytest.raises(SystemExit):
        app_module.main()
    assert "memory='1MiB': a shared node has its own" in capsys.readouterr().err
