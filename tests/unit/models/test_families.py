"""Every family, through the real scheduler, rank and connector: in chunks that cut items, with rows encoded in
batches and alone and loaded from the node's region, decoding, and with other requests in the same step, each
token's logits are those of transformers' plain forward; and each thing broken on purpose moves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from family_cases import CasePrompt, Draw, Medium, media, prompt, reference_logits
from family_engine import Outcome, WatchedModel, run
from torch import Tensor

from ecotone.testing.tiny_models import make_tiny_model, tiny_families
from ecotone.worker.models import ModelAdapter, load_model
from ecotone.worker.models.families import SUPPORTED_ARCHITECTURES

# Rounding, where a matmul has another number of rows than in the reference: 8e-6 at most where this was written.
# Whatever is broken moves logits by more than MOVED: by 1.4 at least.
ROUNDING = 2e-5
MOVED = 0.1
NUM_TOKENS = 5
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
CPU = torch.device("cpu")


class Loaded:
    """A family's tiny model twice: as transformers runs it, and behind an adapter."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = make_tiny_model(name, folder)
        self.adapter: ModelAdapter = load_model(str(folder), device=CPU, dtype=None)
        kind = getattr(transformers, self.adapter.info.architecture)
        self.reference: Any = kind.from_pretrained(folder).eval()
        self.model_type: str = self.reference.config.model_type

    def media(self, seed: int = 0) -> list[Medium]:
        return media(self.name, self.reference.config, seed)

    def prompt(self, *parts: Medium | int, seed: int = 0) -> CasePrompt:
        return prompt(self.model_type, self.reference.config, parts, seed)

    def prompts(self) -> dict[str, CasePrompt]:
        """Items with text around them; text alone; the same items in another order, one of them twice, and a new
        one among them."""
        first, *others = self.media()
        fresh = self.media(seed=7)[-1]
        between = [part for medium in others for part in (medium, 6)]
        return {
            "first": self.prompt(5, first, 4, *between, seed=1),
            "text": self.prompt(23, seed=2),
            "again": self.prompt(3, *reversed(others), 2, first, 7, fresh, 4, first, 3, seed=3),
        }

    def run(self, prompts: dict[str, CasePrompt], mutation: str | None = None, **options: Any) -> Outcome:
        rows = [item.num_rows for item in prompts["first"].items]
        # Not all items of a request can be held at once: what comes back is loaded.
        given = {"max_num_batched_tokens": 20, "encoder_cache_rows": max(sum(rows) - 1, max(rows)), **options}
        return run(self.folder, WatchedModel(self.adapter, mutation), prompts, num_tokens=NUM_TOKENS, **given)

    def difference(self, prompts: dict[str, CasePrompt], outcome: Outcome) -> dict[str, float]:
        return {
            name: float((self.plain(case, outcome.output[name]) - outcome.logits[name]).abs().max())
            for name, case in prompts.items()
        }

    def plain(self, case: CasePrompt, output: list[int]) -> Tensor:
        """The last token's logits are never computed here either: nothing follows it."""
        return reference_logits(self.reference, case, output[:-1])


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache: dict[str, Loaded] = {}

    def get(name: str) -> Loaded:
        if name not in cache:
            cache[name] = Loaded(name, tmp_path_factory.mktemp(name))
        return cache[name]

    return get


def cut_items(case: CasePrompt, outcome: Outcome, req_id: str) -> int:
    ends = [
        s.num_computed_tokens + s.num_tokens
        for step in outcome.steps
        for s in step.scheduled
        if s.req_id == req_id
    ]
    return sum(item.offset < end < item.end for item in case.items for end in ends)


def test_every_supported_architecture_has_a_tiny_model(loaded: Any) -> None:
    made = {loaded(name).adapter.info.architecture for name in tiny_families()}
    assert made == set(SUPPORTED_ARCHITECTURES)


@pytest.mark.parametrize("name", tiny_families())
def test_every_logit_is_that_of_the_plain_forward(name: str, loaded: Any) -> None:
    family: Loaded = loaded(name)
    prompts = family.prompts()
    outcome = family.run(prompts)
    differences = family.difference(prompts, outcome)
    assert max(differences.values()) <= ROUNDING, differences
    assert {len(outcome.logits[n]) for n in prompts} == {len(c.ids) + NUM_TOKENS - 1 for c in prompts.values()}

    # And that it went all the ways there are.
    keys = {item.item_id for case in prompts.values() for item in case.items}
    assert len(outcome.ordered("encode")) == len(keys)
    assert outcome.ordered("load")
    decoding = [{s.num_tokens == 1 for s in step.scheduled} for step in outcome.steps]
    assert {True, False} in decoding
    cuts = sum(cut_items(prompts[n], outcome, n) for n in ("first", "again"))
    assert (cuts == 0) == family.adapter.info.atomic_items


@pytest.mark.parametrize("name", tiny_families())
@pytest.mark.parametrize("budget", [16, 33, 512])
def test_other_budgets(name: str, budget: int, loaded: Any) -> None:
    """Other chunks; in one step at 512, where items of the same shapes share an encoder call."""
    family: Loaded = loaded(name)
    prompts = family.prompts()
    outcome = family.run(prompts, max_num_batched_tokens=budget, encoder_cache_rows=512)
    differences = family.difference(prompts, outcome)
    assert max(differences.values()) <= ROUNDING, differences
    if name in ("llava", "gemma3", "qwen2_vl") and budget == 512:
        assert max(len(call) for call in outcome.encoder_calls) > 1


@pytest.mark.parametrize("name", tiny_families())
def test_bfloat16(name: str, loaded: Any) -> None:
    """Coarser, and still far from anything broken."""
    family: Loaded = loaded(name)
    prompts = family.prompts()
    adapter = load_model(str(family.folder), device=CPU, dtype=torch.bfloat16)
    assert adapter.info.encoder.dtype == "bfloat16"
    outcome = run(family.folder, WatchedModel(adapter), prompts, num_tokens=NUM_TOKENS, max_num_batched_tokens=20)
    differences = family.difference(prompts, outcome)
    assert max(differences.values()) <= 0.5, differences


@pytest.mark.parametrize("name", tiny_families())
def test_encoded_together_or_alone(name: str, loaded: Any) -> None:
    family: Loaded = loaded(name)
    items = [item for case in family.prompts().values() for item in case.items]
    together = family.adapter.encode(items)
    for item, rows in zip(items, together, strict=True):
        [alone] = family.adapter.encode([item])
        assert isinstance(rows, Tensor)
        assert isinstance(alone, Tensor)
        assert rows.shape == (item.num_rows, family.adapter.info.encoder.width)
        assert (rows - alone).abs().max() <= ROUNDING


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        *((name, "rows shifted by one") for name in tiny_families()),
        *((name, "plain positions") for name in MROPE),
        ("qwen3_vl", "no levels"),
        ("gemma3", "causal only"),
        ("gemma3", "blocks cut"),
    ],
)
def test_what_is_broken_is_noticed(name: str, mutation: str, loaded: Any) -> None:
    family: Loaded = loaded(name)
    prompts = family.prompts()
    outcome = family.run(prompts, mutation)
    differences = family.difference(prompts, outcome)
    assert min(differences["first"], differences["again"]) > MOVED, differences
    assert differences["text"] <= ROUNDING


@pytest.mark.parametrize("name", tiny_families())
def test_same_seed_same_model(name: str, loaded: Any, tmp_path: Path) -> None:
    made = make_tiny_model(name, tmp_path / "same")
    other = make_tiny_model(name, tmp_path / "other", seed=1)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (loaded(name).folder, made, other)]
    assert weights[0] == weights[1] != weights[2]


def test_positions_of_families_with_three_of_them(loaded: Any) -> None:
    for name in MROPE:
        family: Loaded = loaded(name)
        case = family.prompts()["first"]
        positions, delta = family.adapter.positions(case.ids, case.items)
        assert positions.shape == (3, len(case.ids))
        assert delta < 0  # an image advances time by its longer side, not by its number of rows
        positions, delta = family.adapter.positions(case.ids[:5], [])
        assert positions.tolist() == [list(range(5))] * 3
        assert delta == 0


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3", "voxtral"])
def test_preempted_and_begun_again(name: str, loaded: Any) -> None:
    """Four blocks beside those of the first request let the second one begin, and not end."""
    family: Loaded = loaded(name)
    prompts = {}
    for seed, request in enumerate(("first", "second")):
        parts = [part for medium in family.media(seed) for part in (medium, 6)]
        prompts[request] = family.prompt(7, *parts, seed=seed)
    blocks = -(-(len(prompts["first"].ids) + NUM_TOKENS) // 8) + 4
    outcome = family.run(prompts, kv_blocks=blocks)
    announced = [data.req_id for step in outcome.steps for data in step.new_requests]
    assert announced.count("first") == 1
    assert announced.count("second") > 1
    differences = family.difference(prompts, outcome)
    assert max(differences.values()) <= ROUNDING, differences


def test_levels_travel_with_the_rows(loaded: Any) -> None:
    spec = loaded("qwen3_vl").adapter.info.encoder
    assert (spec.levels, spec.width) == (2, 3 * spec.hidden_size)


def test_what_sees_both_ways_is_each_image(loaded: Any) -> None:
    family: Loaded = loaded("gemma3")
    case = family.prompts()["first"]
    groups = family.adapter.block_groups(case.ids)
    assert groups is not None
    for number, item in enumerate(case.items):
        assert groups[item.offset : item.end].unique().tolist() == [number]
    assert (groups >= 0).sum() == sum(item.num_rows for item in case.items)
    assert all(loaded(n).adapter.block_groups(case.ids) is None for n in tiny_families() if n != "gemma3")


def test_an_image_in_crops_is_several_blocks_and_one_item(loaded: Any) -> None:
    """Gemma 3 may add crops to an image: blocks that see both ways, each for itself, with text between."""
    family: Loaded = loaded("gemma3")
    plain = family.media()[0]
    crops = Draw(family.reference.config, 5).floats(3, 3, 32, 32)
    span = [*plain.span, *[40] * 4, *plain.span, 41, *plain.span]
    image = Medium("image", span, plain.placeholder, {"pixel_values": crops})
    prompts = {"first": family.prompt(9, plain, 2, image, 3), "text": family.prompt(11, seed=1)}
    outcome = family.run(prompts, max_num_batched_tokens=len(span), encoder_cache_rows=48)
    differences = family.difference(prompts, outcome)
    assert max(differences.values()) <= ROUNDING, differences
    assert cut_items(prompts["first"], outcome, "first") == 0
