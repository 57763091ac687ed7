"""The cache of latent steps against a plain list of entries for each row; and what it costs."""

import copy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModel, DynamicCache, StaticCache

from tests.families import adaptive_model, random_ids, text_config, tiny_model
from unspoken import VanillaConfig, VanillaForCausalLM
from unspoken.errors import CacheError
from unspoken.latent.slots import Part, SlotTable, run_cache, slot_table, store, stored_part, written
from unspoken.latent.visibility import Entries

LAYERS, HEADS, DIM = 2, 2, 3


@dataclass
class Lists:
    """Of each row: its entries (time, step, a number that its keys are made of), in the order in which they came."""

    rows: list[list[tuple[int, int, float]]]
    num_tokens: int = 0


@dataclass
class Twin:
    """A cache, and what it should hold."""

    cache: DynamicCache
    lists: Lists
    counter: float = 0.0
    parts: list[Part] = field(default_factory=list)

    def forward(self, depths: list[list[int]]) -> None:
        """What a forward writes: a row's tokens, each with how deep it goes (0: a pad). Rows leave when they may."""
        batch, num_tokens = len(depths), len(depths[0])
        parts, rows = [], None
        columns = torch.arange(num_tokens).expand(batch, -1)
        steps = (torch.tensor(depths) > 0).long()
        for step in range(1, 1 + max(1, *(max(row) for row in depths))):
            if step > 1:
                taking = [[t for t, depth in enumerate(row) if depth >= step] for row in depths]
                kept = [r for r, row in enumerate(taking) if row]
                longest = max(len(row) for row in taking)
                rows = torch.tensor(kept)
                columns = torch.tensor([taking[r] + [0] * (longest - len(taking[r])) for r in kept])
                steps = torch.tensor([[step] * len(taking[r]) + [0] * (longest - len(taking[r])) for r in kept])
            entries = Entries(columns + self.lists.num_tokens, steps)
            numbers = self.counter + torch.arange(columns.numel(), dtype=torch.float64).view(columns.shape)
            self.counter += columns.numel()
            for b, r in enumerate(range(batch) if rows is None else rows.tolist()):
                for q in range(columns.shape[1]):
                    if step == 1 or steps[b, q] > 0:
                        entry = int(entries.times[b, q]), int(steps[b, q]), float(numbers[b, q])
                        self.lists.rows[r].append(entry)
            parts.append(Part(rows, entries, [keys_of(numbers, layer) for layer in range(LAYERS)]))
        store(self.cache, slot_table(self.cache, LAYERS), parts, num_tokens)
        self.lists.num_tokens += num_tokens

    def select(self, rows: list[int]) -> None:
        self.lists.rows = [list(self.lists.rows[row]) for row in rows]

    def check(self) -> None:
        table = self.cache.layers[-1]
        assert isinstance(table, SlotTable)
        assert self.cache.get_seq_length() == table.num_tokens == self.lists.num_tokens
        longest = max(len(row) for row in self.lists.rows)
        part = stored_part(self.cache, table)
        assert len(part.entries) == longest, "rows lie close together, and no slot is left over"
        assert table.used.tolist() == [len(row) for row in self.lists.rows]
        for r, row in enumerate(self.lists.rows):
            found = list(zip(part.entries.times[r].tolist(), part.entries.steps[r].tolist()))
            assert found[: len(row)] == [(time, step) for time, step, _ in row]
            assert all(step == 0 for _, step in found[len(row) :]), "what nobody wrote, nobody reads"
            numbers = torch.tensor([number for _, _, number in row], dtype=torch.float64)
            for layer, (keys, values) in enumerate(part.keys):
                expected_keys, expected_values = keys_of(numbers.unsqueeze(0), layer)
                assert torch.equal(keys[r, :, : len(row)], expected_keys[0])
                assert torch.equal(values[r, :, : len(row)], expected_values[0])
        deeper = [sum(step > 1 for _, step, _ in row) for row in self.lists.rows]
        assert table.latent_steps.tolist() == deeper
        assert table.is_flat is (sum(deeper) == 0)


def keys_of(numbers: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys [b, H, Q, D] and values that tell entry, layer, head and dimension."""
    place = torch.arange(HEADS * DIM, dtype=torch.float64).view(1, HEADS, 1, DIM) / 64
    keys = numbers[:, None, :, None] + place + layer / 8
    return keys, -keys


def twin(batch: int) -> Twin:
    return Twin(DynamicCache(), Lists([[] for _ in range(batch)]))


@st.composite
def histories(draw) -> tuple[int, list[tuple]]:
    """A batch's size, and what happens to its cache. Each forward's depths are for rows as many as there are then."""
    size = draw(st.integers(1, 3))
    batch, tokens, events = size, 0, []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["forward", "forward", "crop", "reorder", "repeat", "select", "reset"]))
        if kind == "forward" or tokens == 0:
            new = draw(st.integers(1, 4))
            row = st.lists(st.integers(0, 3), min_size=new, max_size=new)
            events.append(("forward", [draw(row) for _ in range(batch)]))
            tokens += new
        elif kind == "crop":
            removed = draw(st.integers(0, tokens))
            events.append(("crop", removed))
            tokens -= removed
        elif kind == "repeat":
            events.append(("repeat", draw(st.integers(1, 2))))
            batch *= events[-1][1]
        elif kind == "reset":
            events.append(("reset",))
            tokens = 0
        else:
            count = batch if kind == "reorder" else draw(st.integers(1, batch))
            events.append((kind, [draw(st.integers(0, batch - 1)) for _ in range(count)]))
            batch = count
    return size, events


@given(history=histories())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_whatever_happens_the_cache_holds_what_the_lists_hold(history):
    size, events = history
    both = twin(size)
    for kind, *args in events:
        match kind:
            case "forward":
                both.forward(*args)
            case "crop":
                both.cache.crop(-args[0])
                both.lists.num_tokens -= args[0]
                first = both.lists.num_tokens
                both.lists.rows = [[e for e in row if e[0] < first] for row in both.lists.rows]
            case "reorder":
                both.cache.reorder_cache(torch.tensor(args[0]))
                both.select(args[0])
            case "select":
                both.cache.batch_select_indices(torch.tensor(args[0]))
                both.select(args[0])
            case "repeat":
                both.cache.batch_repeat_interleave(args[0])
                both.select([row for row in range(len(both.lists.rows)) for _ in range(args[0])])
            case "reset":
                both.cache.reset()
                both.lists = Lists([[] for _ in both.lists.rows])
        if both.lists.num_tokens or kind != "reset":
            both.check()
        else:
            assert stored_part(both.cache, both.cache.layers[-1]) is None
            assert both.cache.get_seq_length() == 0


def test_a_flat_row_that_stays_alone():
    """Beams that all go on from the row without latent steps: the slots of the deeper row stayed, the mask of tokens
    did not fit them, and the next forward crashed."""
    model = adaptive_model("llama", exit_threshold=0.5, router_bias=0.0)
    with torch.no_grad():
        ids, more = random_ids(200, 3), random_ids(2, 2, seed=4)
        lengths = model(ids).latents.lengths.sum(-1)
        assert lengths.min() == 0
        rows = ids[torch.stack([lengths.argmin(), lengths.argmax()])]
        cache = model(rows, use_cache=True).cache
        cache.reorder_cache(torch.tensor([0, 0]))
        logits = model(more, cache=cache).logits
        expected = model(torch.cat([rows[[0, 0]], more], dim=1)).logits[:, -2:]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
@torch.no_grad()
def test_a_token_costs_one_slot_and_one_for_each_latent_step(name):
    """Counted in bytes, over a prefill and tokens one by one; pads cost a slot too, whatever lies beside them."""
    model = adaptive_model(name, exit_threshold=0.15, router_bias=0.3)
    ids, mask = random_ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[1, :4] = 0
    cache, total = DynamicCache(config=model.config), torch.zeros(3, dtype=torch.long)
    for part in (slice(0, 7), *(slice(t, t + 1) for t in range(7, 12))):
        lengths = model(ids[:, part], attention_mask=mask[:, : part.stop], cache=cache).latents.lengths
        total += (1 + lengths).sum(-1)
        assert cache.layers[-1].used.tolist() == total.tolist()
        assert cache.get_seq_length() == part.stop
    assert len(set(total.tolist())) == 3, "rows of one length test little"
    table, config = cache.layers[-1], model.config.text_config
    assert table.latent_steps.tolist() == (total - 12).tolist()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in cache.layers[:-1]:
        assert layer.keys.shape == layer.values.shape == (3, config.num_key_value_heads, int(total.max()), head_dim)


@torch.no_grad()
def test_no_latent_step_no_slot():
    model = adaptive_model("llama", max_latent_steps=0)
    cache = model(random_ids(2, 5), use_cache=True).cache
    assert cache.layers[0].keys.shape[2] == 5
    assert cache.layers[-1].is_flat
    assert cache.layers[-1].latent_steps.tolist() == [0, 0]


def test_an_empty_cache_has_taken_no_steps():
    assert slot_table(DynamicCache(), 2).is_flat
    with pytest.raises(CacheError, match="the cache is empty"):
        slot_table(DynamicCache(), 2).latent_steps  # noqa: B018  # a property that raises


@torch.no_grad()
def test_only_what_comes_before_is_removed_by_minus_its_number():
    """A number above zero was the length to keep, once, in transformers."""
    cache = adaptive_model("llama")(random_ids(1, 5), use_cache=True).cache
    for wrong in (2, -6):
        with pytest.raises(ValueError, match=f"minus the number of tokens.*5; got {wrong}"):
            cache.crop(wrong)
    assert cache.get_seq_length() == 5
    cache.crop(0)
    assert cache.get_seq_length() == 5


def test_a_static_cache_is_refused():
    model = adaptive_model("llama", torch.float32)
    for ids in (random_ids(1, 4), random_ids(1, 1)):
        with pytest.raises(CacheError, match=r"StaticCache has one entry a token.*DynamicCache"):
            model(ids, cache=StaticCache(model.config, max_cache_len=16))
        with pytest.raises(CacheError, match=r"StaticCache has one entry a token"):
            model.generate(ids, max_new_tokens=3, cache_implementation="static")


@pytest.mark.parametrize("kind", ["plain", "vanilla", "recycler"])
@torch.no_grad()
def test_a_cache_of_another_model_is_refused(kind):
    ids = random_ids(1, 4)
    others = {
        "plain": lambda: AutoModel.from_config(text_config("llama")),
        "vanilla": lambda: VanillaForCausalLM(VanillaConfig(text_config=text_config("llama"))),
        "recycler": lambda: tiny_model("llama", torch.float32),
    }
    other, model = others[kind]().eval(), adaptive_model("llama", torch.float32)
    theirs = other(ids, cache=DynamicCache(), use_cache=True).cache
    with pytest.raises(CacheError, match="4 tokens of a model without them"):
        model(ids, cache=theirs)
    ours = model(ids, use_cache=True).cache
    with pytest.raises(CacheError):
        other(ids, cache=ours, use_cache=True)


@pytest.mark.parametrize("layers", [1, 3])
@torch.no_grad()
def test_a_cache_of_a_model_with_other_layers_is_refused(layers):
    """It ended in an index out of range, or in the keys of another layer."""
    cache = adaptive_model("llama")(random_ids(1, 4), use_cache=True).cache
    other = adaptive_model("llama", text={"num_hidden_layers": layers})
    with pytest.raises(CacheError, match=f"a model with 2 layers, this one has {layers}"):
        other(random_ids(1, 2), cache=cache)


@torch.no_grad()
def test_copies_go_their_own_ways():
    model, ids = adaptive_model("llama", exit_threshold=0.15, router_bias=0.3), random_ids(2, 5)
    cache = model(ids, use_cache=True).cache
    other = copy.deepcopy(cache)
    model(random_ids(2, 3, seed=1), cache=cache)
    more = random_ids(2, 3, seed=2)
    expected = model(torch.cat([ids, more], dim=1)).logits[:, 5:]
    torch.testing.assert_close(model(more, cache=other).logits, expected, rtol=0, atol=1e-12)


def test_a_run_sees_the_parts_and_keeps_what_it_writes_apart():
    numbers = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    entries = Entries(torch.arange(3).expand(2, -1), torch.ones(2, 3, dtype=torch.long))
    first = Part(None, entries, [keys_of(numbers, layer) for layer in range(LAYERS)])
    cache = run_cache([first], torch.tensor([1]), range(LAYERS))
    assert cache.get_mask_sizes(2, 0) == (5, 0)
    for layer in range(LAYERS):
        keys, values = cache.update(*keys_of(torch.tensor([[7.0, 8.0]], dtype=torch.float64), layer), layer)
        expected = keys_of(torch.tensor([[3.0, 4.0, 5.0, 7.0, 8.0]], dtype=torch.float64), layer)
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])
    assert torch.equal(written(cache)[1][0], keys_of(torch.tensor([[7.0, 8.0]], dtype=torch.float64), 1)[0])


def test_rows_of_rows():
    """A part's rows are a part of the batch's; fewer of them are named by their place in the batch."""
    numbers = torch.arange(3.0, dtype=torch.float64).view(3, 1)
    part = Part(
        torch.tensor([1, 4, 6]),
        Entries(torch.tensor([[1], [4], [6]]), torch.ones(3, 1, dtype=torch.long)),
        [keys_of(numbers, 0)],
    )
    assert part.entries_of(torch.tensor([6])).times.tolist() == [[6]]
    new = keys_of(torch.zeros(2, 1, dtype=torch.float64), 0)
    keys, values = run_cache([part], torch.tensor([4, 6]), range(1)).update(*new, 0)
    assert torch.equal(keys[:, :, :1], keys_of(numbers[1:], 0)[0])
    assert torch.equal(values[:, :, :1], keys_of(numbers[1:], 0)[1])


def test_a_backbone_that_drops_its_cache_is_named():
    """Layers that checkpoint drop it with a warning; what followed was a None in the middle of the next step."""
    model = adaptive_model("llama").train()
    model.model.backbone.gradient_checkpointing_enable()
    with pytest.raises(CacheError, match="gradient_checkpointing_disable"):
        model(random_ids(1, 4), labels=random_ids(1, 4))
