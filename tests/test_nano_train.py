"""The training recipe computes what it says: packing is exact, codes can be read, stages resume to the same bits."""

import dataclasses
import functools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

from vrhlib import attention
from vrhlib.benchmarks import BENCHMARKS, answering, grounding
from vrhlib.nano import pack, scenes, train
from vrhlib.nano.models import BACKBONES, KINDS, Nano, Shape, numerals, picture
from vrhlib.nano.questions import QUESTIONS, draw_question, facts
from vrhlib.samples import Sample
from vrhlib.wiring import load_vlm

SHAPE = Shape(layers=2, heads=4, kv_heads=2, mlp=64, tower_layers=1, tower_hidden=32, tower_heads=2)
SMALL = dataclasses.replace(train.RECIPES["A"], shape=SHAPE, scenes_per_step=3, questions_per_scene=3)


@functools.cache
def nano(name):
    return Nano(name, SHAPE)


def pieces(name, text):
    tokenizer = nano(name).tokenizer
    return [tokenizer.decode([i]) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("name", KINDS)
def test_every_word_of_every_benchmark_is_one_token(name):
    texts = {s.text for b in BENCHMARKS.values() if b.profile == "nano"
             for s in (grounding if b.family == "grounding" else answering)(b.name, "dev", 40)}  # fmt: skip
    for text in texts:
        marks = sum(text.count(c) for c in ".,:?\n")
        assert len(pieces(name, " " + text.replace("\n", "\n "))) == len(text.split()) + marks, text


def test_a_tokenizer_is_the_same_in_every_process():
    """Python's hash seed changes the order of sets; a run key holds the bytes of the tokenizer's file."""
    code = (
        "from vrhlib.nano.models import *; print(build_tokenizer(KINDS['nano-internvl3']).backend_tokenizer.to_str())"
    )
    written = {
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True,
                       text=True, check=True).stdout
        for seed in "12"
    }  # fmt: skip
    assert len(written) == 1 and "Locate" in written.pop()


def test_the_fixed_parts_of_prompts_and_boxes_are_one_token_each():
    assert pieces("nano-qwen2.5-vl", '{"bbox_2d":[12,104,0,96]}') == [
        '{"bbox_2d":[',
        *"12 , 104 , 0 , 96".split(),
        "]}",
    ]
    assert pieces("nano-internvl3", "<box>[[94,31,0,1000]]</box>") == [
        "<box>", "[[", *"94 , 31 , 0 , 1000".split(), "]]", "</box>"]  # fmt: skip
    for name in KINDS:
        speech = pack.Speech(nano(name))
        for text in (speech.family.prompt, speech.family.question_prompt):
            assert len(pieces(name, text.replace("{expression}", " red"))) <= 6


@pytest.mark.parametrize("name", KINDS)
@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=40)
def test_any_text_survives_the_tokenizer(name, text):
    tokenizer = nano(name).tokenizer
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not any(special in text for special in KINDS[name].special):
        assert tokenizer.decode(ids) == text.encode("utf-8", "replace").decode("utf-8", "replace")


@pytest.mark.parametrize("name", KINDS)
def test_every_box_of_a_scene_can_be_written_and_read_back(name):
    speech, known = pack.Speech(nano(name)), numerals(KINDS[name].permille)
    for i in range(40):
        for thing in scenes.scene((6, i)).things:
            written = speech.box(thing.box, 1.0)
            numbers = [p for p in pieces(name, written) if p.isdigit()]
            assert len(numbers) == 4 and set(numbers) <= set(known), written
            side = [128, 96, 128, 96] if KINDS[name].permille else [128] * 4
            assert np.allclose([known[n] for n in numbers], np.array(thing.box) * 128 / side, atol=0.07)


@pytest.mark.parametrize(("rows", "cols"), [(6, 8), (8, 8)])
def test_a_token_belongs_to_the_thing_that_covers_most_of_it(rows, cols):
    for i in range(50):
        drawn = scenes.scene((8, i))
        seen = picture(drawn, rows, cols, False)
        high, wide = 96 // rows, 128 // cols
        for token, owner in enumerate(seen.owner):
            row, col = divmod(token, cols)
            cover = []
            for t in drawn.things:
                inside = np.zeros((scenes.HEIGHT, scenes.WIDTH), bool)
                inside[t.box[1] : t.box[3], t.box[0] : t.box[2]] = True
                cover.append(inside[row * high : row * high + high, col * wide : col * wide + wide].sum())
            assert owner == (int(np.argmax(cover)) if max(cover) else -1)
        assert seen.centre.sum() >= len(drawn.things) - 2 and not (seen.centre & (seen.owner < 0)).any()


@pytest.mark.parametrize("permille", [False, True])
def test_a_code_gives_back_its_thing(permille):
    codes = nano("A").codes
    for i in range(20):
        drawn = (scenes.scene, scenes.signs, scenes.document)[i % 3]((7, i))
        seen, code = picture(drawn, 6, 8, permille), codes.of(picture(drawn, 6, 8, permille))
        for token, owner in enumerate(seen.owner):
            if owner < 0:
                continue
            strength = code[token] @ codes.directions.T
            names = {codes.names[j] for j in strength.topk(3).indices.tolist()} | {"centre"}
            assert set(seen.names[owner]) <= {codes.names[j] for j in (strength > 8).nonzero().ravel().tolist()} | names
            line = torch.arange(0, 128.5, 0.5)
            for edge in range(4):
                table = codes.waves(line) @ codes.edge_bases[edge]
                assert abs(float(line[(table @ code[token]).argmax()]) - seen.lines[owner][edge]) <= 0.5
            assert np.allclose(
                np.array(seen.lines[owner]) * ([1, 0.75, 1, 0.75] if permille else 1), drawn.things[owner].box
            )


def test_a_model_inherits_layers_words_and_numbers_of_its_backbone():
    old, new = Nano("A", SHAPE, 3), Nano("nano-internvl3", SHAPE, 4)
    before = new.language.layers[1].mlp.up_proj.weight.clone()
    new.inherit(old)
    assert torch.equal(new.language.layers[1].mlp.up_proj.weight, old.language.layers[1].mlp.up_proj.weight)
    assert not torch.equal(new.language.layers[1].mlp.up_proj.weight, before)
    assert torch.equal(new.table()[new.id("Ġcircle")], old.table()[old.id("Ġcircle")])
    assert torch.equal(new.table()[new.id("500")], old.table()[old.id("64")])  # half a side is pixel 64 of 128
    halfway = 0.5 * (old.table()[old.id("2")] + old.table()[old.id("4")])
    torch.testing.assert_close(new.table()[new.id("23")] if "23" in numerals(True) else halfway, halfway)


# ---------------------------------------------------------------- packing is exact


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    """A model of a small recipe, exported untrained: only the wiring matters here."""
    out = tmp_path_factory.mktemp(request.param)
    made = Nano(request.param, SHAPE)
    made.export(out, {})
    return request.param, out


def small(folder):
    name, path = folder
    made = Nano(name, SHAPE)
    made.model.load_state_dict(load_vlm(path).model.state_dict())
    made.mixed_precision = False  # full precision
    return made, load_vlm(path)


def test_a_packed_question_is_computed_as_if_it_stood_alone(folder):
    """Picture and text worlds in one batch, questions of different lengths; against the stock model, one at a time."""
    made, vlm = small(folder)
    packer = pack.Packer(made)
    mix = dataclasses.replace(train.TUNED, vqa=0.4)
    worlds = [
        pack.draw_world((5, i), dataclasses.replace(mix, worlds={w: 1.0}), packer.speech, 4, packer.stretch, False)
        for i, w in enumerate(("scene", "facts", "document", "scene"))
    ]
    batch = packer.batch(worlds)
    P, S, L = batch["shape"]
    seen = [w.scene for w in worlds if w.scene is not None]
    with torch.no_grad():
        made.model.float()
        features, deep = made.see([s.pixels for s in seen])
        made.model.set_attn_implementation({"text_config": "packed"})
        hidden, _ = pack.run(made, batch, features, torch.ones(len(worlds), SHAPE.layers, SHAPE.heads), deep)
        packed = made.model.lm_head(hidden)
    checked = 0
    for b, world in enumerate(worlds):
        for s, (kind, text, reply) in enumerate(world.pairs):
            ids, _ = packer.pair(kind, text, reply)
            image = None if world.scene is None else world.scene.image
            sample = Sample("x", image, "k", world.facts + text, task="answer", answer="")
            prompt = vlm.prepare([sample])
            written = packer.encode(f"{reply}<|im_end|>\n")
            inputs = attention.with_replies(vlm, prompt, [written])
            prefix = batch["ids"][b, :P][batch["text_bias"][b, 0, 0, 0, :P] == 0].tolist()
            assert inputs["input_ids"][0].tolist() == [*prefix, *ids]
            with torch.no_grad():
                alone = vlm.model(**inputs).logits[0, len(prefix) :]
            here = packed[b, P + s * L : P + s * L + len(ids)]
            torch.testing.assert_close(here, alone, atol=1e-3, rtol=1e-3)
            checked += 1
    assert checked >= 8


def test_training_sees_what_the_image_processor_gives(folder):
    made, vlm = small(folder)
    made.model.float()
    samples = grounding("scenes", "dev", 3)
    with torch.no_grad():
        features, deep = made.see([np.asarray(s.image) for s in samples])
    pooled, *deepstack = map(torch.stack, zip(*vlm.see(vlm.prepare(samples)).features))
    torch.testing.assert_close(features, pooled.reshape_as(features), atol=2e-4, rtol=1e-3)
    assert len(deepstack) == len(deep)
    if deep:
        torch.testing.assert_close(deep[0], deepstack[0], atol=2e-4, rtol=1e-3)


def test_large_pictures_become_tiles_and_a_thumbnail_for_internvl_only(folder):
    name, path = folder
    vlm = load_vlm(path)
    sample = grounding("scenes", "dev", 1)[0]
    large = Sample("large", sample.image.resize((256, 192)), "large", sample.text, sample.box.scaled(2, 2))
    tokens = [len(vlm.prepare([s]).grids[0]) for s in (sample, large)]
    assert tokens == ([64, 5 * 64] if "internvl" in name else [48, 4 * 48])
    if "internvl" in name:  # and training saw exactly these tiles
        made, _ = small(folder)
        made.model.float()
        doubled = Sample("x", sample.image.resize((256, 192), Image.Resampling.BICUBIC), "x", "a")
        there = vlm.see(vlm.prepare([doubled])).features[0][0]
        with torch.no_grad():
            here, _ = made.see([np.asarray(sample.image)], large=True)
        torch.testing.assert_close(here[0], there.flatten(0, 1), atol=2e-4, rtol=1e-3)
        prefix = pack.Packer(made, tiles=5).batch([pack.World([("count", "a", "1")], scenes.scene((1, 1)))])["ids"][0]
        assert (prefix == made.id("<IMG_CONTEXT>")).sum() == 320


# ---------------------------------------------------------------- losses and stages


def test_only_the_reply_is_learned_and_numbers_count_in_full():
    packer = pack.Packer(nano("nano-qwen2.5-vl"))
    ids, weights = packer.pair("attribute", "Locate the ring", '{"bbox_2d":[4,6,20,22]}')
    learned = [packer.nano.tokenizer.decode([i]) for i, w in zip(ids, weights) if w == 1]
    assert learned == ["4", "6", "20", "22"] and sum(w > 0 for w in weights) == 10
    ids, weights = packer.pair("count", "How many rings are there?", "4")
    assert [packer.nano.tokenizer.decode([i]) for i, w in zip(ids, weights) if w == pack.ANSWER] == ["4"]


def test_head_dropout_and_hidden_tokens_reach_the_forward_pass():
    made = Nano("A", SHAPE)
    made.model.set_attn_implementation({"text_config": "packed"})
    source = pack.Batches(pack.Packer(made, bare=True), 0, 2, 3)
    worlds = source.worlds("train", 0, train.backbone_mix(SMALL, 2000))
    worlds = [w for w in worlds if w.scene is not None] or source.worlds("train", 1, train.backbone_mix(SMALL, 0))
    codes, ones = source.codes(worlds, 0.0, 0), torch.ones(len(worlds), SHAPE.layers, SHAPE.heads)
    with torch.no_grad():
        plain, looks = pack.run(made, source.packer.batch(worlds), codes, ones)
        gated, _ = pack.run(made, source.packer.batch(worlds), codes, ones * 0)
        shown = np.zeros((len(worlds), source.packer.image_tokens), bool)
        hidden, dark = pack.run(made, source.packer.batch(worlds, shown), codes, ones)
    assert not torch.equal(plain, gated) and not torch.equal(plain, hidden)
    assert looks.shape == (SHAPE.layers, SHAPE.heads) and (looks > 0).all() and dark.max() < 1e-6


STAGES = {"tower-qwen2.5": lambda r, w: train.train_tower("qwen2.5", r, w, batch=7),
          "backbone-A": lambda r, w: train.train_backbone("A", r, w)}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_an_interrupted_stage_resumes_to_the_same_bits(stage, tmp_path, monkeypatch):
    recipe = dataclasses.replace(SMALL, tower_steps=4, backbone_steps=4)
    kept = train.Stage.__init__

    def often(self, *args, **kwargs):
        kept(self, *args, **kwargs)
        self.every = 2

    monkeypatch.setattr(train.Stage, "__init__", often)
    run = STAGES[stage]
    (tmp_path / "straight").mkdir()
    run(recipe, tmp_path / "straight")
    (tmp_path / "broken").mkdir()
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def killed(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return clip(*args, **kwargs)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", killed)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "broken")
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    run(recipe, tmp_path / "broken")
    one, two = (load_file(tmp_path / name / f"{stage}.safetensors") for name in ("straight", "broken"))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    made = Nano("A", SHAPE, recipe.seed) if stage == "backbone-A" else Nano("nano-qwen2.5-vl", SHAPE, recipe.seed)
    untrained = (made.language if stage == "backbone-A" else made.vision).state_dict()
    moved = [k for k in one if k.startswith("model.") and not torch.equal(one[k], untrained[k[6:]])]
    assert moved, "nothing was trained"


@pytest.mark.parametrize("name", ["nano-internvl3.5", "nano-qwen3-vl"])
def test_tuning_moves_the_language_stack_and_leaves_the_tower(name, tmp_path):
    recipe = dataclasses.replace(SMALL, tower_steps=1, backbone_steps=1, tune_steps=2)
    train.train_backbone("B", recipe, tmp_path)
    train.train_tower(KINDS[name].tower, recipe, tmp_path, batch=7)
    train.train_tune(name, recipe, tmp_path)
    tower, tuned, backbone = (load_file(tmp_path / f"{s}.safetensors")
                              for s in (f"tower-{KINDS[name].tower}", f"tune-{name}", "backbone-B"))  # fmt: skip
    path = {"nano-qwen3-vl": "model.visual.", "nano-internvl3.5": "model.vision_tower."}[name]
    same = [torch.equal(v, tuned[path + k[len("model.tower.") :]]) for k, v in tower.items()
            if k.startswith("model.tower.") and "deepstack" not in k]  # fmt: skip
    assert same and all(same)
    layers = [k for k in backbone if k.startswith("model.layers.")]
    assert any(not torch.equal(backbone[k], tuned["model.language_model." + k[6:]]) for k in layers)


# ---------------------------------------------------------------- the questions


def test_every_kind_of_question_is_drawn_and_its_answer_is_among_the_choices():
    rng = np.random.default_rng(0)
    for kind in QUESTIONS:
        drawn = [draw_question(scenes.scene((5, i), 1 if kind == "single" else 6), rng, {kind: 1.0}) for i in range(60)]
        asked = [q for q in drawn if q]
        assert len(asked) > 50 and {q.kind for q in asked} == {kind}
        assert all(q.answer in q.choices for q in asked if q.choices)
        assert len({q.answer for q in asked}) > 1


def test_facts_are_different_and_hold_the_answer():
    for i in range(50):
        known = facts((4, i))
        assert len(set(known.owners)) == len(known.owners) == len(set(known.words))
        assert all(f"{o} {w}" in known.text for o, w in zip(known.owners, known.words))


def test_backbones_never_see_a_picture(tmp_path, monkeypatch):
    """Only codes and text: a backbone that touched pixels would not be one."""
    monkeypatch.setattr(scenes.Scene, "pixels", property(lambda self: pytest.fail("a backbone asked for pixels")))
    for which in BACKBONES:
        train.train_backbone(
            which, dataclasses.replace(SMALL, backbone_steps=2, sparse_steps=1, caption_steps=1), tmp_path
        )
        assert train.told(tmp_path / f"backbone-{which}.safetensors")["step"] == 2


def test_calmed_parameters_take_a_share_of_a_step(tmp_path):
    def trained(calm):
        torch.manual_seed(0)
        pair = torch.nn.ModuleList([torch.nn.Linear(4, 4, bias=False) for _ in range(2)])
        start = [m.weight.detach().clone() for m in pair]
        stage = train.Stage("it", tmp_path, SMALL, 3, pair, [torch.optim.SGD(pair.parameters(), lr=0.1)],
                            calmed=[pair[0].weight], calm=(1, calm))  # fmt: skip
        stage.run(lambda step: pair[1](pair[0](torch.ones(1, 4))).square().sum(), lambda step: "")
        return start, [m.weight.detach() for m in pair]

    (start, half), (_, full), (_, none) = trained(0.5), trained(1.0), trained(0.0)
    assert not torch.equal(half[0], full[0]) and not torch.equal(half[0], none[0])
    first = trained(0.0)[1][0]  # after the first, full step nothing moves it
    assert not torch.equal(first, start[0]) and torch.equal(first, none[0])


def test_the_check_compares_bits_and_finds_a_difference(tmp_path, monkeypatch, capsys):
    less = {"shape": SHAPE, "scenes_per_step": 2, "questions_per_scene": 2}
    small = {k: dataclasses.replace(r, **less) for k, r in train.RECIPES.items()}
    monkeypatch.setattr(train, "RECIPES", small)
    train.check(tmp_path / "same", steps=1)
    assert capsys.readouterr().out.count("twice the same bits") == 3
    kept, calls = train.train_tower, []

    def drifting(which, recipe, work):
        calls.append(1)
        kept(which, dataclasses.replace(recipe, seed=recipe.seed + len(calls)), work)

    monkeypatch.setattr(train, "train_tower", drifting)
    with pytest.raises(AssertionError, match="tower-qwen2.5 differs"):
        train.check(tmp_path / "other", steps=1)


def test_a_checkpoint_of_another_recipe_is_refused_and_an_unfinished_one_is_not_exported(tmp_path, monkeypatch):
    small = {k: dataclasses.replace(SMALL, backbone_steps=1, tower_steps=1, tune_steps=1) for k in train.RECIPES}
    monkeypatch.setattr(train, "RECIPES", small)
    for stage, (run, which) in train.stages("nano-internvl3").items():
        run(which, small[which], tmp_path)
        assert train.told(tmp_path / f"{stage}.safetensors")["step"] == 1
    train.export("nano-internvl3", tmp_path, tmp_path / "out")
    about = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert list(about["stages"]) == list(train.stages("nano-internvl3")) and about["git_commit"]
    with pytest.raises(ValueError, match="another recipe"):
        train.train_backbone("A", dataclasses.replace(small["A"], muon_lr=0.5), tmp_path)
    path = tmp_path / "tune-nano-internvl3.safetensors"
    unfinished = train.told(path) | {"step": 0}
    train.save_file(load_file(path), path, {"about": json.dumps(unfinished)})
    with pytest.raises(ValueError, match="step 0 of 1"):
        train.export("nano-internvl3", tmp_path, tmp_path / "out")


def test_a_stage_of_another_model_is_refused_in_words(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train", "nano-internvl3", "--stage", "tower-qwen3"])
    with pytest.raises(SystemExit):
        train.main()
    assert "no stage 'tower-qwen3' of nano-internvl3" in capsys.readouterr().err
