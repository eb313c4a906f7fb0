"""Every family, divided in every way, says what it says whole."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import CasePrompt, media, prompt
from threaded_ranks import ThreadedRanks

from ecotone.engine.engine import Engine
from ecotone.errors import ConfigError, UnsupportedModelError
from ecotone.executor.base import Executor
from ecotone.protocol.outputs import ModelRunnerOutput
from ecotone.protocol.params import PoolingParams, SamplingParams
from ecotone.testing.steps import OrderedRequest, Steps
from ecotone.testing.tiny_configs import architectures
from ecotone.testing.tiny_models import make_tiny_model, tiny_families
from ecotone.testing.tiny_processors import processors
from ecotone.worker.models.loading import load_model
from ecotone.worker.parallel.division import check_division, layers_of_stage
from ecotone.worker.parallel.group import share_of
from ecotone.worker.parallel.tensor import tensor_parallel_plan

# Sums over ranks are sums in another order: 4e-6 at most where this was written.
ROUNDING = 5e-5
FORMS = {
    "tp2": (2, 1, "weights"),
    "tp2, images divided": (2, 1, "data"),
    "pp2": (1, 2, "weights"),
    "pp3": (1, 3, "weights"),
    "tp2 x pp2, images divided": (2, 2, "data"),
}
BLOCKS = {"a": tuple(range(24)), "b": tuple(range(24, 48))}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("families")

    @functools.cache
    def get(name: str) -> Any:
        path: Path = make_tiny_model(name, folder / name)
        kind = load_model(str(path), device=torch.device("cpu"), dtype=None).info.architecture
        return getattr(transformers, kind).from_pretrained(path).eval()

    return get


def prompts(name: str, model: Any) -> tuple[CasePrompt, CasePrompt]:
    items = media(name, model.config)
    kind = model.config.model_type
    first = prompt(kind, model.config, [3, *[part for item in items for part in (item, 4)]], 1)
    second = prompt(kind, model.config, [2, *media(name, model.config, seed=5)[-1:], 6], 2)
    return first, second


def answers(name: str, model: Any, ranks: ThreadedRanks) -> list[ModelRunnerOutput]:
    """A prompt in two chunks beside another in one, then both decoding."""
    cases = prompts(name, model)
    params = SamplingParams(temperature=0, logprobs=5, ignore_eos=True)
    a, b = (
        OrderedRequest(req_id, case.ids, case.items, params=params, block_ids=BLOCKS[req_id])
        for req_id, case in zip("ab", cases, strict=True)
    )
    steps = Steps(ranks.run)
    item = a.data.items[0]
    cut = item.end if ranks.models[0].info.atomic_items else item.offset + 2
    every = range(len(a.data.items))
    outputs = [
        steps.step((a, a.order(cut, encode=every[:1])), (b, b.order(encode=(0,)))),
        steps.step((b, b.order()), (a, a.order(encode=every[1:]))),
        *(steps.step((a, a.order()), (b, b.order())) for _ in range(2)),
    ]
    ranks.close()
    return outputs


@functools.cache
def whole(name: str, get: Any) -> list[ModelRunnerOutput]:
    return answers(name, get(name), ThreadedRanks(get(name), 1, 1))


# Qwen3-VL adds encoder rows in its first two layers: these cannot be on two stages.
CASES = [(name, form) for name in tiny_families() for form in FORMS if (name, form) != ("qwen3_vl", "pp3")]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_divided_it_says_what_it_says_whole(name: str, form: str, model: Any) -> None:
    tp, pp, mode = FORMS[form]
    ranks = ThreadedRanks(model(name), tp, pp, mode=mode)
    for got, want in zip(answers(name, model(name), ranks), whole(name, model), strict=True):
        assert (got.req_ids, got.sampled_token_ids) == (want.req_ids, want.sampled_token_ids)
        assert not got.request_errors
        for own, reference in zip(got.logprobs, want.logprobs, strict=True):
            for one, other in zip(own, reference, strict=True):
                assert abs(one.sampled - other.sampled) <= ROUNDING
                distance = abs(one.top_logprobs.to_numpy() - other.top_logprobs.to_numpy()).max()
                assert distance <= ROUNDING
    # It really was divided: layers by stages, heads by ranks, and encoder rows are on the first stage alone.
    head_bytes = 2 * 64 * 8 * 8 * 4  # keys and values of 64 blocks of 8 tokens, 8 wide, in float32
    for rank, runner in enumerate(ranks.runners):
        layers = len(layers_of_stage(3, pp, rank // tp))
        assert runner.statistics()["kv_cache_bytes"] == layers * (2 // tp) * head_bytes
        assert (runner.statistics()["encoder_cache_rows"] > 0) == (rank < tp)


def test_pooled_vectors_are_the_same(model: Any) -> None:
    def pooled(ranks: ThreadedRanks) -> list[float]:
        case = prompts("llava", model("llava"))[0]
        request = OrderedRequest("a", case.ids, case.items, params=PoolingParams())
        steps = Steps(ranks.run)
        steps.step((request, request.order(9, encode=(0,))))
        steps.step((request, request.order(encode=(1,))))
        ranks.close()
        assert request.pooled is not None
        return request.pooled

    want = torch.tensor(pooled(ThreadedRanks(model("llava"), 1, 1, pooling=True)))
    for tp, pp, mode in ((2, 1, "data"), (2, 2, "weights")):
        ranks = ThreadedRanks(model("llava"), tp, pp, mode=mode, pooling=True)
        assert (torch.tensor(pooled(ranks)) - want).abs().max() <= ROUNDING


def test_biases_count_once(tmp_path: Path) -> None:
    """None of the families has one behind a row-wise layer; a checkpoint may."""
    config = architectures()["llava"].config(processors()["llava"].save(tmp_path))
    config.text_config.attention_bias = config.text_config.mlp_bias = True
    torch.manual_seed(1)
    made = transformers.LlavaForConditionalGeneration(config).eval()
    for name, parameter in made.get_decoder().named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    assert made.get_decoder().layers[0].mlp.down_proj.bias is not None
    want = answers("llava", made, ThreadedRanks(made, 1, 1))
    for got, reference in zip(answers("llava", made, ThreadedRanks(made, 2, 1)), want, strict=True):
        for own, other in zip(got.logprobs, reference.logprobs, strict=True):
            assert [one.sampled for one in own] == pytest.approx([one.sampled for one in other], abs=ROUNDING)


def test_shares_of_what_does_not_divide() -> None:
    """261 of Qwen's rows among 2 are 131 and 130, above. What is left over makes the last shares shorter."""
    assert [share_of(261, 4, rank) for rank in range(4)] == [(0, 66), (66, 132), (132, 198), (198, 261)]
    assert [share_of(5, 4, rank) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [share_of(1, 3, rank) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]


def test_what_cannot_be_divided_is_refused(model: Any) -> None:
    llava, qwen3_vl = model("llava").config, model("qwen3_vl").config
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 does not divide .* 4 attention heads"):
        check_division(llava, tensor=3, stages=1)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=4: the model has 3 layers"):
        check_division(llava, tensor=1, stages=4)
    with pytest.raises(ConfigError, match="first 2 layers, and all of these must be on the first stage"):
        check_division(qwen3_vl, tensor=1, stages=3)
    check_division(llava, tensor=2, stages=3)


def test_what_cannot_be_divided_is_refused_before_there_is_a_rank(tmp_path: Path) -> None:
    make_tiny_model("llava", tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size=100 does not divide"):
        Engine(tmp_path, tensor_parallel_size=100, executor_factory=no_executor)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=9: the model has 3 layers"):
        Engine(tmp_path, pipeline_parallel_size=9, executor_factory=no_executor)


def no_executor(*_: object) -> Executor:
    raise AssertionError("an executor was made for what cannot be divided")


def test_plans_are_of_the_language_model_alone(model: Any) -> None:
    for name in tiny_families():
        plan = tensor_parallel_plan(model(name))
        assert any(rule.endswith("layers.*.self_attn.q_proj") for rule in plan), name
        assert not any("vision" in rule or "audio" in rule or "visual" in rule for rule in plan), name


def test_a_plan_that_is_not_there_or_not_understood_is_refused(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(model("llava"))
    monkeypatch.setattr(kind, "tp_plan", {"lm_head": "colwise_gather_output"})
    with pytest.raises(UnsupportedModelError, match="no tensor-parallel plan for its layers"):
        tensor_parallel_plan(model("llava"))
    monkeypatch.setattr(kind, "tp_plan", {"model.language_model.layers.*.mlp.experts": "grouped_gemm"})
    with pytest.raises(UnsupportedModelError, match="the style 'grouped_gemm'; known are colwise"):
        tensor_parallel_plan(model("llava"))


def test_layers_of_stages() -> None:
    assert [layers_of_stage(5, 3, stage) for stage in range(3)] == [range(2), range(2, 4), range(4, 5)]
    assert [list(layers_of_stage(4, 2, stage)) for stage in range(2)] == [[0, 1], [2, 3]]
