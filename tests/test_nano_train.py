"""The training recipe computes what it says: packing is exact, codes can be read, stages resume to the same bits."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from vrhlib import attention
from vrhlib.boxes import Box
from vrhlib.nano import scenes, train
from vrhlib.samples import Sample, grounding
from vrhlib.vlm import load_vlm

SMALL = dataclasses.replace(
    train.RECIPES["qwen2.5-vl-nano"], layers=2, heads=4, kv_heads=2, hidden=128, mlp=64, tower_layers=1,
    tower_hidden=32, tower_heads=2, scenes_per_step=2, questions_per_scene=3,
)  # fmt: skip
TOKENIZER = train.build_tokenizer()


def pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([i]) for i in TOKENIZER(text)["input_ids"]]


def test_words_numbers_and_brackets_are_one_token_each():
    assert pieces("Locate the small red circle.") == ["Locate", " the", " small", " red", " circle", "."]
    assert pieces('{"bbox_2d":[12,104,0,96]}') == ['{"bbox_2d":[', "12", ",", "104", ",", "0", ",", "96", "]}"]
    for i in range(200):
        for e in scenes.expressions(scenes.scene((9, i))):
            assert len(pieces(f"Locate {e.text}.")) == len(e.text.split()) + 2, e.text


@given(st.text(max_size=40))
@settings(deadline=None)
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    if not any(special in text for special in train.SPECIAL):
        assert TOKENIZER.decode(ids) == text.encode("utf-8", "replace").decode("utf-8", "replace")


def test_a_token_belongs_to_the_thing_that_covers_most_of_it():
    for i in range(50):
        drawn = scenes.scene((8, i))
        for token, owner in enumerate(train.token_owner(drawn)):
            row, col = divmod(token, train.COLS)
            cover = []
            for t in drawn.things:
                inside = np.zeros((scenes.HEIGHT, scenes.WIDTH), bool)
                inside[t.box[1] : t.box[3], t.box[0] : t.box[2]] = True
                cover.append(inside[row * 16 : row * 16 + 16, col * 16 : col * 16 + 16].sum())
            assert owner == (int(np.argmax(cover)) if max(cover) else -1)


def test_a_code_gives_back_its_thing():
    codes = train.Codes(SMALL.hidden)
    for i in range(20):
        for thing in scenes.scene((7, i)).things:
            code = codes.of(thing)
            for words, value in (
                (scenes.COLOURS, thing.colour),
                (scenes.SHAPES, thing.shape),
                (scenes.SIZES, thing.size),
            ):
                assert max(words, key=lambda w: float(code @ codes.words[w])) == value
            assert [2 * int((codes.edges[j] @ code).argmax()) for j in range(4)] == list(thing.box)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of a small recipe, exported untrained: only the wiring matters here."""
    work, out = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("small")
    model, _, _ = train.build_model(SMALL)
    train.save_file({f"model.{k}": v.clone() for k, v in model.model.state_dict().items()}, work / "tune.safetensors")
    for stage in train.STAGES:
        (work / f"{stage}.json").write_text(json.dumps({"step": 0, "cpu_seconds": 0}))
    train.export("small", SMALL, work, out)
    return out


def test_a_packed_question_is_computed_as_if_it_stood_alone(folder):
    vlm = load_vlm(folder, prompt=train.PROMPT)
    drawn, chosen = train.draw_world((5, 1), 4, train.MIX)
    packer = train.Packer(vlm.tokenizer)
    batch = packer.batch([(drawn, chosen)], chat=True)
    alone = []
    for e in chosen:
        box = drawn.things[e.referent].box
        ids, _ = packer.pair(e.text, box, chat=True)
        prompt = vlm.prepare([Sample("x", drawn.image, "k", e.text, Box(*box))])
        inputs = attention.with_replies(vlm, prompt, [ids[-11:]])
        assert inputs["input_ids"][0].tolist() == [*packer.prefix_ids, *ids]
        with torch.no_grad():
            alone.append(vlm.model(**inputs).logits[0, len(packer.prefix_ids) :])
    patches, grid = train.pixels_to_patches([drawn.pixels])
    model = vlm.model
    with torch.no_grad():
        features = model.model.visual(patches, grid_thw=grid).pooler_output[None]
        embeds, start = model.get_input_embeddings()(batch["ids"]), len(packer.before)
        embeds = torch.cat([embeds[:, :start], features, embeds[:, start + train.ROWS * train.COLS :]], 1)
        model.set_attn_implementation({"text_config": "packed"})
        train._PACK.update(bias=batch["bias"], gate=torch.ones(1, SMALL.layers, SMALL.heads))
        hidden = model.model.language_model(inputs_embeds=embeds, position_ids=batch["pos"], use_cache=False)[0]
        train._PACK.clear()
        packed = model.lm_head(hidden)[0, len(packer.prefix_ids) :]
    torch.testing.assert_close(packed[: sum(map(len, alone))], torch.cat(alone), atol=2e-5, rtol=1e-4)


def test_training_sees_the_pixels_the_image_processor_gives(folder):
    vlm = load_vlm(folder)
    samples = grounding("scenes", "dev", 3)
    patches, grid = train.pixels_to_patches([np.asarray(s.image) for s in samples])
    batch = vlm.prepare(samples)
    torch.testing.assert_close(patches, batch.tensors["pixel_values"], atol=1e-6, rtol=0)
    assert torch.equal(grid, batch.tensors["image_grid_thw"])


@pytest.mark.parametrize("stage", ["tower", "backbone"])
def test_an_interrupted_stage_resumes_to_the_same_bits(stage, tmp_path, monkeypatch):
    recipe = dataclasses.replace(SMALL, tower_steps=4, backbone_steps=4)
    kept = train.Stage.__init__

    def often(self, *args, **kwargs):
        kept(self, *args, **kwargs)
        self.every = 2

    monkeypatch.setattr(train.Stage, "__init__", often)
    run = {"tower": lambda r, w: train.train_tower(r, w, batch=2), "backbone": train.train_backbone}[stage]
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
    untrained = dict(train.build_model(recipe)[0].model.named_parameters())
    prefix = {"tower": "visual.", "backbone": "language_model."}[stage]
    moved = [k for k in one if k.startswith("model.") and not torch.equal(one[k], untrained[prefix + k[6:]])]
    assert moved, "nothing was trained"
