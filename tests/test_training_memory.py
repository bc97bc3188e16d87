"""The memory that training is said to take, against what classes, optimiser, adapters and TRL's head really hold.

The real models are built on the meta device, at their true sizes and without weights. What a training step holds at its
worst moment is counted on small models, storage by storage.
"""

import subprocess
import sys
from dataclasses import astuple, fields, replace
from functools import cache

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModel, AutoModelForImageTextToText, Qwen2Config, Qwen3Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import checkpoints, tiny
from vrhlib import plan, training
from vrhlib.profiles import MODELS
from vrhlib.training import SHAPES, Shape

REAL = checkpoints.NAMES
PROJECTIONS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)"

# The widths that tests/checkpoints.py makes small, as the models' configs have them.
QWEN_2_5 = {"hidden_size": 3584, "intermediate_size": 18944}
QWEN_3 = {"hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}
INTERN_VIT = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
TEXT = {
    "qwen2.5-vl-7b": QWEN_2_5 | {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    "qwen3-vl-8b": QWEN_3,
    "internvl3-8b": QWEN_2_5,
    "internvl3.5-8b": QWEN_3,
}
VISION = {
    "qwen2.5-vl-7b": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3-vl-8b": {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    "internvl3-8b": INTERN_VIT,
    "internvl3.5-8b": INTERN_VIT,
}  # fmt: skip


@cache
def real(name: str):
    """The model at its true size, on the meta device."""
    config = checkpoints.CONFIGS[name]
    if "text_config" in config:
        config = config | {"text_config": config["text_config"] | TEXT[name]}
    else:
        config = config | TEXT[name]
    config = config | {"vision_config": config["vision_config"] | VISION[name]}
    config = config | {"tie_word_embeddings": False}  # InternVL's says it of its text alone
    with torch.device("meta"):
        built = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        return AutoModelForImageTextToText.from_config(built, dtype=torch.bfloat16)


def count(*modules: torch.nn.Module) -> int:
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize("name", REAL)
def test_parameters_are_those_of_the_real_class_at_its_true_size(name):
    model, shape = real(name), SHAPES[name]
    assert training.language_parameters(shape) == count(model.model.language_model, model.lm_head)
    assert shape.total == count(model)
    assert (shape.layers, shape.heads) == MODELS[name].grid
    assert shape.tied is (model.lm_head.weight is model.model.language_model.embed_tokens.weight)
    assert 2 * shape.total / 1e9 == pytest.approx(MODELS[name].gb, abs=0.05)


def test_tied_embeddings_are_counted_once():
    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, vocab_size=100, tie_word_embeddings=True, attention_bias=False,
    )  # fmt: skip
    from transformers import AutoModelForCausalLM

    shape = Shape(2, 32, 4, 2, 16, 48, 100, True, True, (0, 0), 0)
    assert training.language_parameters(shape) == count(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("name", REAL)
def test_the_vision_towers_size_is_that_of_the_real_class(name):
    tower = getattr(real(name).model, "visual", None) or real(name).model.vision_tower
    blocks = tower.blocks if hasattr(tower, "blocks") else tower.encoder.layer
    assert SHAPES[name].vision == (len(blocks), VISION[name]["hidden_size"])


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("rank", [1, 16])
def test_adapters_have_as_many_parameters_as_peft_makes(name, rank):
    model = get_peft_model(real(name), LoraConfig(r=rank, target_modules=PROJECTIONS))
    try:
        adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert training.lora_parameters(SHAPES[name], rank) == adapters
    finally:
        model.unload()


def test_adapters_are_float32_on_a_bfloat16_model(small):
    adapters = get_peft_model(small("qwen3-vl"), LoraConfig(r=4, target_modules=PROJECTIONS))
    assert {p.dtype for p in adapters.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in adapters.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.fixture
def small(tmp_path):
    def load(kind: str):
        tiny.write(kind, tmp_path / kind)
        return AutoModelForImageTextToText.from_pretrained(
            tmp_path / kind, dtype=torch.bfloat16, attn_implementation="sdpa"
        )

    return load


# ---------------------------------------------------------------- optimiser


@pytest.mark.parametrize(("method", "dtype"), [("full", torch.float32), ("lora", torch.float32)])
def test_the_optimisers_states_are_those_of_adamw(method, dtype):
    p = torch.nn.Parameter(torch.ones(1000, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimiser = torch.optim.AdamW([p], fused=True)
    optimiser.step()
    states = [s for s in optimiser.state[p].values() if s.numel() > 1]
    m = training.memory("qwen3-vl-8b", method)
    assert m.optimiser * 1e9 / m.trained == sum(s.nbytes for s in states) / 1000
    assert m.gradients * 1e9 / m.trained == p.grad.nbytes / 1000


def test_a_step_of_the_papers_size_is_lost_in_bfloat16_and_not_in_float32():
    weights = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 0.02
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        p = torch.nn.Parameter(weights.to(dtype))
        before, optimiser = p.detach().clone(), torch.optim.AdamW([p], lr=2e-7, weight_decay=0)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimiser.step()
        moved[dtype] = before.abs()[p.detach() != before]
    assert len(moved[torch.float32]) > 0.99 * len(weights)
    assert len(moved[torch.bfloat16]) < 0.01 * len(weights) and moved[torch.bfloat16].max() < 6.2e-5


# ---------------------------------------------------------------- activations


class Live(TorchDispatchMode):
    """Bytes of storages that are alive beside those known before: now, and at most."""

    def __init__(self, known):
        super().__init__()
        self.known, self.live, self.most = {t.untyped_storage()._cdata for t in known}, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.live = {key: held for key, held in self.live.items() if not held[0].expired()}
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, torch.Tensor)):
            if storage._cdata not in self.known:
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.most = max(self.most, self.now)
        return out

    @property
    def now(self) -> int:
        return sum(size for _, size in self.live.values())


WIDE = Shape(8, 64, 8, 2, 8, 320, 64, False, False, (0, 0), 0)


def held(shape: Shape, method: str, sequences: int, tokens: int, checkpointing: bool = True) -> tuple[int, int]:
    """Bytes held after the forward pass, and at most, of one real step on the backbone; gradients exist already."""
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.mlp, vocab_size=shape.vocab,
    )  # fmt: skip
    config = Qwen3Config(**sizes, head_dim=shape.head_dim) if shape.qk_norm else Qwen2Config(**sizes)
    dtype = torch.float32 if method == "full" else torch.bfloat16
    backbone = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = backbone
    if method == "lora":
        model = get_peft_model(backbone, LoraConfig(r=2, target_modules=r".*\.(q_proj|k_proj|v_proj|o_proj)"))
        model.enable_input_require_grads()
    if checkpointing:
        backbone.gradient_checkpointing_enable()
    model.train()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    ids, mask = torch.randint(0, shape.vocab, (sequences, tokens)), torch.ones(sequences, tokens, dtype=torch.long)
    mask[0, -3:] = 0
    known = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
    with Live([*known, ids, mask]) as live:
        with torch.autocast("cpu", torch.bfloat16):
            state = backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        after = live.now
        state[:, -2:].float().sum().backward()
    return after, live.most


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("method", training.METHODS)
@pytest.mark.parametrize("changed", [{}, {"layers": 2}, {"mlp": 96}, {"hidden": 128, "head_dim": 16}, {"kv_heads": 8}])
def test_a_step_holds_what_is_said_and_no_more(method, qk_norm, changed):
    """To 7 percent. (The head and the vision tower, which this model has not, are tested below.)"""
    shape = replace(WIDE, qk_norm=qk_norm, **changed)
    said = 2 * size_of(method) * training._states(shape, 200) + 2 * 200 * training._layer(shape, 200)
    if method == "full":  # a layer's weights in bfloat16, which autocast makes: of the weights, not the activations
        said += training.BF16 * training._layer_parameters(shape)
    assert 0.93 * said <= held(shape, method, 2, 200)[1] <= said


def size_of(method: str) -> int:
    return training.FP32 if method == "full" else training.BF16


@pytest.mark.parametrize("method", training.METHODS)
def test_checkpoints_are_one_hidden_state_a_layer_and_token(method):
    """After the forward pass; and without checkpointing, each layer keeps its inside: what is said is not said of any
    training whatever."""
    state = 2 * 100 * WIDE.hidden * size_of(method)  # bytes of a hidden state of two sequences
    weights = training.BF16 * training._layer_parameters(WIDE) if method == "full" else 0  # that autocast makes
    few, many = (held(replace(WIDE, layers=n), method, 2, 100)[0] for n in (4, 12))
    assert (many - few) / 8 - weights == pytest.approx(state, rel=0.1)
    more, less = (training.activations(replace(WIDE, layers=n), method, 2, 100, 1) for n in (12, 4))
    assert more - less == 8 * state
    few, many = (held(replace(WIDE, layers=n), method, 2, 100, checkpointing=False)[0] for n in (4, 12))
    assert (many - few) / 8 - weights > 5 * state


@pytest.mark.parametrize("kind", tiny.CLASSES)
@pytest.mark.parametrize("method", training.METHODS)
def test_the_vision_towers_checkpoints_are_kept_whether_it_is_trained_or_not(small, kind, method):
    from vrhlib import load_vlm

    model = small(kind)
    model = model.float() if method == "full" else model
    batch = load_vlm(model.config._name_or_path, device="cpu").prepare(tiny.samples()[:2]).tensors
    inner = model
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules=PROJECTIONS))
        model.enable_input_require_grads()  # as TRL does
    inner.gradient_checkpointing_enable()
    model.train()
    tower = getattr(inner.model, "visual", None) or inner.model.vision_tower
    blocks, kept, sizes = tower.blocks if hasattr(tower, "blocks") else tower.encoder.layer, {}, []

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor  # held, so that no address is given twice
        return tensor

    for block in blocks:
        block.register_forward_pre_hook(lambda _, inputs, named: sizes.append(_first(inputs, named)), with_kwargs=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        inner.model(**batch, use_cache=False)
    assert len(sizes) == len(blocks)
    assert all(state.untyped_storage()._cdata in kept for state in sizes)
    # one a layer, of the tower's width, for each patch and, at most, one token more a tile
    width, grid = sizes[0].shape[-1], batch.get("image_grid_thw")
    patches = int(grid.prod(-1).sum()) if grid is not None else len(batch["pixel_values"]) * 17
    # (Qwen's towers keep what autocast gives them, which is bfloat16; what is said is then too much, by 0.3 GB.)
    size = training.BF16 if kind.startswith("qwen") else size_of(method)
    assert [state.nbytes for state in sizes] == [patches * width * size] * len(blocks)
    tokens = int((batch["input_ids"] == inner.config.image_token_id).sum())
    assert patches == tokens * training.PATCHES + (0 if grid is not None else len(batch["pixel_values"]))


def _first(inputs, named) -> torch.Tensor:
    return inputs[0] if inputs else named["hidden_states"]


@pytest.mark.parametrize("method", training.METHODS)
def test_trls_head_holds_tiles_and_the_gradient_of_a_trained_head(method):
    """By the sizes that it allocates: on a CPU, it makes copies beside them that a GPU does not."""
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    assert chunked_logprob.TOKEN_CHUNK_SIZE == training.HEAD_TOKENS
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == training.HEAD_COLUMNS
    reply, shape = 6, Shape(1, 16, 1, 1, 16, 16, 70_000, False, False, (0, 0), 0)
    dtype = torch.float32 if method == "full" else torch.bfloat16
    state = torch.randn(reply, shape.hidden, dtype=dtype, requires_grad=True)
    head = torch.randn(shape.vocab, shape.hidden, dtype=dtype, requires_grad=method == "full")
    targets = torch.arange(reply)
    made = []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            made.extend((tuple(t.shape), t.dtype) for t in tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    with torch.autocast("cpu", torch.bfloat16):
        chosen = chunked_logprob.ChunkedLogProbFunction.apply(
            state, head, None, targets, 1.0, training.HEAD_COLUMNS, None, 1.0, ("log_probs",)
        )[0]
    with Made():
        chosen.sum().backward()
    gradient = (shape.vocab, shape.hidden)
    expected = {((reply, training.HEAD_COLUMNS), torch.bfloat16), ((reply, shape.hidden), torch.float32)}
    rows = ((training.HEAD_COLUMNS, shape.hidden), torch.bfloat16)  # of a float32 head
    expected |= {(gradient, torch.float32), rows} if method == "full" else set()
    assert expected <= set(made)
    assert method == "full" or not [m for m in made if m[0] == gradient and m[1] == torch.float32]
    assert not [m for m in made if m[0] == (reply, shape.vocab)], "all logits at once"
    said = sum(rows * columns * dtype.itemsize for (rows, columns), dtype in expected)
    assert training._head(shape, method, reply) == said


def test_the_head_and_a_layer_are_not_held_together():
    """The head is behind when the last layer is recomputed: the larger of them counts."""
    shape, long = SHAPES["internvl3-8b"], (2, 3516, 128)
    small = replace(shape, vocab=1000)
    kept = training.activations(small, "lora", *long) - 2 * 3516 * training._layer(small, 3516)
    assert training.activations(shape, "lora", *long) == training.activations(small, "lora", *long)
    assert training._head(shape, "full", 256) > 2 * 3516 * training._layer(shape, 3516)
    assert training.activations(shape, "full", *long) == 2 * kept + training._head(shape, "full", 256)
    assert training.activations(shape, "full", *long) > training.activations(shape, "lora", *long)


# ---------------------------------------------------------------- the whole


@pytest.mark.parametrize("name", REAL)
def test_memory_adds_up(name):
    full, lora, shape = training.memory(name, "full"), training.memory(name, "lora"), SHAPES[name]
    assert full.total == pytest.approx(sum(astuple(full)[2:])) and lora.total == pytest.approx(sum(astuple(lora)[2:]))
    assert [f.name for f in fields(full)][:2] == ["parameters", "trained"]
    assert (full.parameters, full.trained) == (shape.total, shape.total)
    assert (lora.parameters, lora.trained) == (shape.total, training.lora_parameters(shape, 16))
    assert full.states == pytest.approx(20 * shape.total / 1e9)  # weights twice, reference, gradients, states
    assert lora.states == pytest.approx((2 * shape.total + 16 * lora.trained) / 1e9)
    assert (full.reference, lora.reference) == (pytest.approx(full.weights / 3), 0)


def test_constants_are_those_of_the_plan():
    assert (training.CONTEXT_GB, training.TEXT) == (plan.CONTEXT_GB, plan.TEXT)
    assert set(SHAPES) == {name for name, pin in MODELS.items() if pin.profile == "paper"}


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("method", training.METHODS)
def test_more_pairs_tokens_or_rank_never_take_less(name, method):
    def takes(**changed):
        return training.memory(name, method, **({"tokens": 600} | changed))

    for knob, steps in (("pairs", (1, 2, 5, 16)), ("tokens", (1, 100, 600, 3000, 9000)), ("rank", (1, 8, 16, 256))):
        sizes = [takes(**{knob: step}) for step in steps]
        pairs = list(zip(sizes, sizes[1:]))
        if knob == "rank":
            assert all((a.total < b.total) is (method == "lora") for a, b in pairs)
            assert len({m.activations for m in sizes}) == 1
        else:
            assert all(a.activations < b.activations and a.states == b.states for a, b in pairs), knob


def test_tokens_are_those_of_picture_prompt_and_the_longest_reply():
    for name in REAL:
        pin = MODELS[name]
        own = training.memory(name, "lora", tokens=pin.visual_tokens + 60 + pin.max_new_tokens)
        assert training.memory(name, "lora") == own


def test_the_papers_recipe_fits_no_card_of_48_gb_and_adapters_fit_all():
    header, rows = training.memory_rows(REAL)
    assert header[-1] == "on 48 GB" and len(rows) == 2 * len(REAL) and {len(row) for row in rows} == {len(header)}
    for model, recipe, *_, verdict in rows:
        number = 6 if model == "internvl3.5-8b" else 5
        assert verdict == (f"needs {number} x 48 GB (sharded)" if recipe == "full" else "fits"), model
    assert training.memory("qwen2.5-vl-7b", "full").total == pytest.approx(171.3, abs=0.05)
    assert training.memory("internvl3.5-8b", "lora").total == pytest.approx(25.0, abs=0.1)
    assert "10,092,544" in plan.table(header, rows)


def test_the_table_says_when_fewer_pairs_fit_and_when_nothing_does():
    def verdicts(name, **given):
        return [row[-1] for row in training.memory_rows([name], **given)[1]]

    fitting = [n for n in range(1, 9) if training.memory("internvl3-8b", "lora", pairs=n).total <= 48]
    assert 1 < len(fitting) < 8
    assert verdicts("internvl3-8b", pairs=8)[1] == f"fits with {fitting[-1]} pairs at once"
    assert verdicts("internvl3-8b", pairs=fitting[-1])[1] == "fits"
    few = "needs 6 x 48 GB (sharded) with 1 pair at once"
    assert verdicts("internvl3.5-8b", pairs=8)[0] == few
    assert [training.cards("internvl3.5-8b", "full", pairs=n) for n in (1, 2, 3)] == [6, 8, 12]
    assert verdicts("internvl3-8b", pairs=1, tokens=40_000)[1] == "too small for one pair"
    assert verdicts("qwen3-vl-8b", card_gb=141) == ["needs 2 x 141 GB (sharded)", "fits"]


@pytest.mark.parametrize("name", REAL)
def test_a_sharded_run_fits_its_cards_and_not_one_card_less(name):
    def a_card(n):
        m, shape = training.memory(name, "full"), SHAPES[name]
        layer = training.language_parameters(replace(shape, layers=1)) - training.language_parameters(
            replace(shape, layers=0)
        )
        return m.states / n + m.activations + m.context + 4 * (layer + shape.vocab * shape.hidden) / 1e9

    n = training.cards(name, "full")
    assert a_card(n) <= 48 < a_card(n - 1)
    assert training.cards(name, "lora") == 1


def test_unknown_names_and_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match="internvl3-8b.*Did you mean 'qwen3-vl-8b'"):
        training.memory("qwen3-vl", "lora")
    with pytest.raises(ValueError, match="Unknown method 'Lora'; there are 'full', 'lora'"):
        training.memory("qwen3-vl-8b", "Lora")
    for wrong in ({"rank": 0}, {"pairs": 0}, {"tokens": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            training.memory("qwen3-vl-8b", "lora", **wrong)


def test_a_run_that_is_too_large_is_refused_with_what_helps():
    need = training.memory("qwen2.5-vl-7b", "full").total
    training.refuse_if_too_large("qwen2.5-vl-7b", "full", need)
    with pytest.raises(
        MemoryError, match=r"needs 171\.3 GB .* and 47\.0 GB are free.*RECIPE=method=lora.* 19\.6 GB"
    ) as full:
        training.refuse_if_too_large("qwen2.5-vl-7b", "full", 47.0)
    assert "fewer pairs" not in str(full.value)  # there is one already
    with pytest.raises(MemoryError, match=r"8 pairs at once.*fewer pairs.*with 1 it takes 23\.2 GB") as lora:
        training.refuse_if_too_large("internvl3-8b", "lora", 48.0, pairs=8)
    assert "METHOD" not in str(lora.value)
    with pytest.raises(MemoryError, match="1 pair at once.*a larger GPU"):
        training.refuse_if_too_large("internvl3-8b", "lora", 20.0)
    training.refuse_if_too_large("internvl3-8b", "lora", 24.0)
    with pytest.raises(MemoryError):
        training.refuse_if_too_large("internvl3-8b", "lora", 24.0, tokens=8000)
    training.refuse_if_too_large("nano-qwen3-vl", "full", 0.1)  # not known here


def test_the_table_needs_no_torch():
    block = "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\nimport vrhlib.training as t\n"
    done = subprocess.run(
        [sys.executable, "-c", block + "t.memory_rows(list(t.SHAPES))"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
