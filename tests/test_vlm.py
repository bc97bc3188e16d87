"""Prompts, image tokens and boxes of the four classes; loading.

The strongest guard is the perturbation check: with attention cut in the vision tower an image token sees
only its own cell, so painting one cell must move exactly the tokens that `TokenGrid` says look there.
"""

import copy
import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tests import tiny
from vrhlib.boxes import Box, TokenGrid, read_box
from vrhlib.samples import Sample
from vrhlib.vlm import FAMILIES, load_processor
from vrhlib.wiring import load_vlm

pytestmark = pytest.mark.usefixtures("root")
# Width, height: exact multiples of the class's unit, so that resizing is the identity. Portrait, landscape, square, two
# extreme aspects; for InternVL seven tilings.
SIZES = {
    "qwen2.5-vl": [(84, 140), (140, 56), (28, 84), (112, 112), (560, 28), (28, 448)],
    "qwen3-vl": [(96, 160), (160, 64), (32, 96), (128, 128), (640, 32), (32, 512)],
    "internvl3": [(112, 56), (56, 168), (168, 112), (56, 56), (112, 112), (336, 56), (112, 168)],
}
SIZES["internvl3.5"] = SIZES["internvl3"]


def kind_of(vlm) -> str:
    return next(k for k in sorted(tiny.CLASSES, key=len, reverse=True) if f"/{k}" in vlm.name)


@pytest.fixture
def deaf(vlm):
    """The same model with attention cut in its vision tower."""
    deaf = copy.copy(vlm)
    deaf.model = copy.deepcopy(vlm.model)
    tower = deaf.model.get_submodule(vlm.family.vision)
    cut = [m for name, m in tower.named_modules() if name.endswith(("attn.proj", "attention.projection_layer"))]
    assert len(cut) == len(getattr(tower, "blocks", None) or tower.encoder.layer)
    for module in cut:
        torch.nn.init.zeros_(module.weight)
        torch.nn.init.zeros_(module.bias)
    return deaf


@torch.inference_mode()
def image_embeddings(vlm, samples) -> list[np.ndarray]:
    """Per sample float [V, hidden]: what the text model is given in the columns of the sample's image tokens."""
    batch, seen = vlm.prepare(samples), []
    text = vlm.model.model.language_model
    handle = text.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["inputs_embeds"]), with_kwargs=True)
    vlm.model(**vlm.inputs(batch))
    handle.remove()
    return [seen[0][b, columns].numpy() for b, columns in enumerate(batch.image_columns)]


def inverted(sample: Sample, box: Box) -> Sample:
    """The sample with the pixels of a box (rounded inwards) inverted."""
    image = sample.image.copy()
    corners = (int(np.ceil(box.x0)), int(np.ceil(box.y0)), int(box.x1), int(box.y1))
    image.paste(ImageOps.invert(image.crop(corners)), corners)
    return Sample(sample.id, image, "inverted", sample.text, sample.box)


def tiles_of(grid: TokenGrid) -> int:
    """Number of tokens before the thumbnail."""
    return grid.rows * grid.cols


def test_inverting_one_cell_moves_only_the_tokens_that_look_there(vlm, deaf):
    samples = tiny.samples(*SIZES[kind_of(vlm)])
    grids = vlm.prepare(samples).grids
    plain = image_embeddings(deaf, samples)
    for v in range(max(tiles_of(g) for g in grids)):
        cells = [Box(*g.cells[v % tiles_of(g)]) for g in grids]
        moved = image_embeddings(deaf, [inverted(s, c) for s, c in zip(samples, cells)])
        for a, b, grid, cell in zip(plain, moved, grids, cells):
            shift, n = np.linalg.norm(a - b, axis=1), tiles_of(grid)
            assert np.flatnonzero(shift[:n] > 1e-5).tolist() == [v % n]
            assert np.flatnonzero(grid.tokens_in(cell)[:n]).tolist() == [v % n]
            if len(grid) > n:  # the thumbnail is resized, so neighbours move a little too
                strongest = n + int(shift[n:].argmax())
                assert shift[strongest] > 0 and grid.tokens_in(cell)[strongest]


def test_the_grid_has_the_shape_of_the_picture(vlm):
    for (width, height), grid in zip(SIZES[kind_of(vlm)], vlm.prepare(tiny.samples(*SIZES[kind_of(vlm)])).grids):
        assert grid.cols * height == grid.rows * width
        assert grid.order.shape == (grid.rows, grid.cols)


# The last two are larger than the tiny processors' limit (60 tokens, 6 tiles), and resized down.
@pytest.mark.parametrize("size", [(100, 61), (61, 133), (201, 67), (90, 90), (500, 30), (430, 330), (200, 640)])
def test_painting_one_cell_of_a_resized_picture_moves_the_tokens_that_look_there_most(vlm, deaf, size):
    sample = tiny.samples(size)[0]
    grid = vlm.prepare([sample]).grids[0]
    plain, n = image_embeddings(deaf, [sample])[0], tiles_of(grid)
    for v in range(n):
        shift = np.linalg.norm(plain - image_embeddings(deaf, [inverted(sample, Box(*grid.cells[v]))])[0], axis=1)
        assert shift[:n].argmax() == v
        x, y = grid.cells[:, [0, 2]].mean(1), grid.cells[:, [1, 3]].mean(1)
        width, height = grid.cells[v, 2:] - grid.cells[v, :2]
        far = (abs(x - x[v]) > 1.9 * width) | (abs(y - y[v]) > 1.9 * height)
        assert not (shift[:n] > 1e-5)[far[:n]].any()
        if len(grid) > n:
            assert grid.tokens_in(Box(*grid.cells[v]))[n + shift[n:].argmax()]


def test_a_thumbnail_is_there_if_and_only_if_there_are_several_tiles(tiny_models):
    for kind in ("internvl3", "internvl3.5"):
        batch = tiny_models[kind].prepare(tiny.samples(*SIZES[kind]))
        tiles = [2, 3, 6, 1, 4, 6, 6]
        assert [len(g) for g in batch.grids] == [4 * (t + 1) if t > 1 else 4 for t in tiles]
        assert all((g.cells[-4:, :2].min(0) == 0).all() for g in batch.grids)


# ---------------------------------------------------------------- columns


def test_image_columns_are_the_image_tokens_and_as_many_as_the_grid(vlm, batch):
    for b, (columns, grid) in enumerate(zip(batch.image_columns, batch.grids)):
        ids = batch.tensors["input_ids"][b]
        assert columns.tolist() == [i for i, t in enumerate(ids) if t == vlm.model.config.image_token_id]
        assert len(columns) == len(grid) > 0


def test_prompts_are_left_padded(vlm, batch):
    for mask in batch.tensors["attention_mask"].tolist():
        assert mask == sorted(mask)
    assert batch.length == max(batch.tensors["attention_mask"].sum(1)) == batch.tensors["input_ids"].shape[1]


PLAIN = ["red dot", "bbox coordinates", "image", "a"]
ODD = ["the große 猫 — naïve 🐱", "{0} {expression} {{x}}", '"quoted"', "two\nlines"]


def with_text(text: str) -> Sample:
    return Sample(text, tiny.samples()[0].image, "noise", text)


@pytest.mark.parametrize("expression", PLAIN + ODD)
def test_expression_columns_decode_to_the_expression(vlm, expression):
    batch = vlm.prepare([with_text(expression), with_text("a much longer expression, so that the first row is padded")])
    ids = batch.tensors["input_ids"][0, batch.expression_columns[0]]
    assert vlm.tokenizer.decode(ids) == expression


def test_an_expression_that_repeats_the_prompt_is_found_where_it_stands_for_itself(vlm):
    before = vlm.prompt.split("{expression}")[0]
    word = before.split()[0]  # "Locate" or "Please": stands in the instruction too
    batch = vlm.prepare([with_text(word)])
    columns = batch.expression_columns[0]
    ids = batch.tensors["input_ids"][0].tolist()
    after = vlm.tokenizer.decode(ids[columns[-1] + 1 :])
    assert after.startswith(vlm.prompt.split("{expression}")[1])
    assert vlm.tokenizer.decode(ids[: columns[0]]).endswith(before)


def test_an_expression_that_is_the_whole_instruction_is_found(vlm):
    text = vlm.prompt.replace("{expression}", "a dog")
    batch = vlm.prepare([with_text(text)])
    assert vlm.tokenizer.decode(batch.tensors["input_ids"][0, batch.expression_columns[0]]) == text


def test_an_expression_with_an_image_token_in_it_is_refused(vlm):
    token = vlm.tokenizer.convert_ids_to_tokens(vlm.model.config.image_token_id)
    with pytest.raises(ValueError):
        vlm.prepare([with_text(f"the {token} dog")])


def test_the_prompt_is_the_familys_with_the_expression_in_it(vlm):
    text, span = vlm.chat("the red dog")
    assert text[span.start : span.stop] == "the red dog"
    assert vlm.prompt.format(expression="the red dog") in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("prompt", ['Give {"box": []} for {expression}.', "{a, b}: {expression}", "{{x}} {expression}"])
def test_a_prompt_may_hold_other_braces(vlm, prompt):
    vlm.prompt = prompt
    batch = vlm.prepare([with_text("a {0} dog")])
    text = vlm.tokenizer.decode(batch.tensors["input_ids"][0])
    assert prompt.replace("{expression}", "a {0} dog") in text
    assert vlm.tokenizer.decode(batch.tensors["input_ids"][0, batch.expression_columns[0]]) == "a {0} dog"


@pytest.mark.parametrize("task", ["locate", "question", "answer"])
def test_every_task_has_its_prompt_and_the_text_is_found_in_it(vlm, task):
    kind = {"answer": "red"} if task == "answer" else {}
    sample = dataclasses.replace(with_text("What is left of the red dog?"), task=task, **kind)
    batch = vlm.prepare([sample])
    prompt = {"locate": vlm.family.prompt, "question": vlm.family.question_prompt, "answer": "{expression}"}[task]
    text = vlm.tokenizer.decode(batch.tensors["input_ids"][0])
    assert prompt.replace("{expression}", sample.text) in text
    assert sample.text in vlm.tokenizer.decode(batch.tensors["input_ids"][0, batch.expression_columns[0]])


def test_a_question_without_a_picture_is_plain_text(vlm):
    texts = ["red cat, blue dog. What is red?", "a b. What?"]
    asked = [Sample(f"text {i}", None, f"t{i}", t, task="answer", answer="cat") for i, t in enumerate(texts)]
    batch = vlm.prepare(asked)
    assert all(len(g) == 0 and len(c) == 0 for g, c in zip(batch.grids, batch.image_columns))
    assert not (batch.tensors["input_ids"] == vlm.model.config.image_token_id).any()
    ids = vlm.model.generate(**vlm.inputs(batch, copies=2), max_new_tokens=3, do_sample=False)
    alone = vlm.model.generate(**vlm.inputs(vlm.prepare(asked[:1])), max_new_tokens=3, do_sample=False)
    length = alone.shape[1] - min(3, alone.shape[1])
    assert torch.equal(ids[0], ids[1]) and ids[0, -3:].tolist() == alone[0, length:].tolist()


def test_a_batch_with_and_without_pictures_is_refused(vlm):
    with pytest.raises(ValueError, match="apart"):
        vlm.prepare([with_text("a dog"), Sample("text", None, "t", "what?", task="answer", answer="x")])


def test_a_prompt_without_a_place_for_the_expression_is_refused(tiny_models):
    for prompt in ("Locate it.", "{expression} or {expression}"):
        with pytest.raises(ValueError, match="once"):
            load_vlm(tiny_models["qwen3-vl"].name, device="cpu", prompt=prompt)


def test_a_picture_in_another_mode_is_read_as_rgb(vlm):
    grey = Sample("grey", tiny.samples()[0].image.convert("L"), "grey", "dog")
    palette = Sample("palette", grey.image.convert("RGB").convert("P"), "palette", "dog")
    batch = vlm.prepare([grey, palette])
    assert batch.tensors["pixel_values"].shape[0] > 0 and len(batch.grids[0]) == len(batch.grids[1])


def test_padding_changes_nothing(vlm, batch):
    for b, sample in enumerate(batch.samples):
        alone = vlm.prepare([sample])
        with torch.no_grad():
            got, want = vlm.model(**batch.tensors).logits[b, -1], vlm.model(**alone.tensors).logits[0, -1]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert (batch.image_columns[b] - batch.length).tolist() == (alone.image_columns[0] - alone.length).tolist()
        assert (batch.grids[b].cells == alone.grids[0].cells).all() and batch.resized[b] == alone.resized[0]


# ---------------------------------------------------------------- features


@torch.inference_mode()
def test_features_computed_once_give_the_same_logits_as_pixels(vlm, batch):
    want = vlm.model(**batch.tensors).logits
    calls = []
    handle = vlm.model.get_submodule(vlm.family.vision).register_forward_hook(lambda *_: calls.append(1))
    for _ in range(2):
        assert torch.equal(vlm.model(**vlm.inputs(batch)).logits, want)
    copies = vlm.model(**vlm.inputs(batch, copies=3)).logits
    handle.remove()
    assert len(calls) == 1
    visible = batch.tensors["attention_mask"].repeat_interleave(3, 0) == 1
    torch.testing.assert_close(copies[visible], want.repeat_interleave(3, 0)[visible], atol=1e-5, rtol=0)


def test_the_templates_end_token_ends_a_reply_whatever_the_generation_config_says(vlm):
    vlm.model = copy.copy(vlm.model)
    end = vlm.tokenizer.eos_token_id
    for given, stops in ((None, {end}), (5, {5, end}), ([5, 6], {5, 6, end}), (end, {end})):
        vlm.model.generation_config = copy.copy(vlm.model.generation_config)
        vlm.model.generation_config.eos_token_id = given
        vlm.__dict__.pop("stop_ids", None)
        assert vlm.stop_ids == stops
    vlm.__dict__.pop("stop_ids", None)


def test_inputs_work_where_gradients_are_on(vlm, batch):
    assert vlm.model(**vlm.inputs(batch)).logits.isfinite().all()


def test_decoding_stops_at_the_stop_token_and_says_whether_there_was_one(vlm):
    ids = vlm.tokenizer("ab [1]", add_special_tokens=False)["input_ids"]
    (stop,) = vlm.stop_ids
    assert vlm.decode(ids) == ("ab [1]", False)
    assert vlm.decode([*ids, stop, ids[0]]) == ("ab [1]", True)
    assert vlm.decode([]) == ("", False) and vlm.decode([stop]) == ("", True)


# ---------------------------------------------------------------- boxes, at the sizes of the real processors

REAL = {  # the real processors' limits and, per picture size, (resized, cols, rows, tokens)
    "qwen2.5-vl": {
        (640, 480): ((644, 476), 23, 17, 391), (640, 428): ((644, 420), 23, 15, 345),
        (500, 375): ((504, 364), 18, 13, 234), (640, 640): ((644, 644), 23, 23, 529),
        (640, 361): ((644, 364), 23, 13, 299), (1792, 1344): ((1792, 1344), 64, 48, 3072),
    },
    "qwen3-vl": {
        (640, 480): ((640, 480), 20, 15, 300), (640, 428): ((640, 416), 20, 13, 260),
        (500, 375): ((512, 384), 16, 12, 192), (640, 640): ((640, 640), 20, 20, 400),
        (640, 361): ((640, 352), 20, 11, 220), (1792, 1344): ((1792, 1344), 56, 42, 2352),
    },
    "internvl3": {
        (640, 480): ((640, 480), 64, 48, 3328), (640, 428): ((640, 428), 48, 32, 1792),
        (500, 375): ((500, 375), 64, 48, 3328), (640, 640): ((640, 640), 32, 32, 1280),
        (640, 361): ((640, 361), 32, 16, 768), (448, 448): ((448, 448), 16, 16, 256),
    },
}  # fmt: skip
REAL["internvl3.5"] = REAL["internvl3"]


@pytest.fixture
def real_sizes(vlm):
    """The tiny model with the real model's image processor settings."""
    vlm.processor = copy.copy(vlm.processor)
    vlm.processor.image_processor = image = copy.deepcopy(vlm.processor.image_processor)
    if kind_of(vlm) == "qwen2.5-vl":
        image.size = {"shortest_edge": 3136, "longest_edge": 12_845_056}
    elif kind_of(vlm) == "qwen3-vl":
        image.size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
    else:
        image.size, image.max_patches, vlm.processor.image_seq_length = {"height": 448, "width": 448}, 12, 256
    return vlm


def test_real_pictures_get_the_grid_of_the_real_model(real_sizes):
    for size, (resized, cols, rows, tokens) in REAL[kind_of(real_sizes)].items():
        batch = real_sizes.prepare([Sample("x", Image.new("RGB", size), "x", "dog")])
        grid = batch.grids[0]
        assert (batch.resized[0], grid.cols, grid.rows, len(grid)) == (resized, cols, rows, tokens), size
        assert grid.cells[:, 2].max() == pytest.approx(size[0]) and grid.cells[:, 3].max() == pytest.approx(size[1])


@pytest.mark.parametrize("vlm", ["internvl3", "internvl3.5"], indirect=True)
def test_at_most_six_tiles_give_the_published_token_counts(real_sizes):
    real_sizes.processor.image_processor.max_patches = 6
    published = {(640, 480): 1792, (500, 375): 1792, (640, 640): 1280, (640, 361): 768, (1792, 1344): 1792}
    for size, tokens in published.items():
        assert len(real_sizes.prepare([Sample("x", Image.new("RGB", size), "x", "dog")]).grids[0]) == tokens


def test_a_written_box_is_read_back(real_sizes):
    vlm = real_sizes
    for width, height in [*REAL[kind_of(vlm)], (427, 640)]:
        resized = vlm.prepare([Sample("x", Image.new("RGB", (width, height)), "x", "dog")]).resized[0]
        for box in [(0.23, 0.32, 0.961, 0.97), (0.01, 0.02, 0.31, 0.4), (0, 0, 1, 1), (0.5, 0.1, 0.7, 0.33)]:
            box = Box(box[0] * width, box[1] * height, box[2] * width, box[3] * height)
            text = vlm.write_box(box, (width, height), resized)
            reply = vlm.read(text, (width, height), resized)
            assert reply.failure is None and reply.box.iou(box) >= 0.97, (text, reply)
            assert vlm.read(f"Sure: {text} there.", (width, height), resized).box == reply.box


@pytest.mark.parametrize("size", [(1000, 30), (30, 1000), (6000, 3000)])
def test_a_box_comes_back_where_a_forgotten_rescale_would_show(real_sizes, size):
    """Very thin pictures, and one beyond every size limit (12.8 and 16.8 megapixels): original and resized differ most
    there. Reading the numbers in another frame must fail."""
    vlm, (width, height) = real_sizes, size
    resized = vlm.prepare([Sample("x", Image.new("RGB", size), "x", "dog")]).resized[0]
    thin = width < 100, height < 100  # a box over a thin side's whole length, or rounding is all one sees
    box = Box(0 if thin[0] else 0.6 * width, 0 if thin[1] else 0.5 * height, width if thin[0] else 0.9 * width, height)
    text = vlm.write_box(box, size, resized)
    assert vlm.read(text, size, resized).box.iou(box) >= 0.97, text
    if vlm.family.frame == "permille":
        assert read_box(text, vlm.family.style, "resized", size, size).box.iou(box) < 0.5
    elif resized != size:
        forgotten = vlm.read(text, size, size).box.iou(box)
        assert forgotten < (0.75 if size == (6000, 3000) else 0.95), (resized, forgotten)


def test_a_written_box_is_read_back_at_tiny_sizes(vlm, batch):
    for sample, resized in zip(batch.samples, batch.resized):
        reply = vlm.read(vlm.write_box(sample.box, sample.image.size, resized), sample.image.size, resized)
        tolerance = 0.51 * sample.image.size[0] / (resized[0] if vlm.family.frame == "resized" else 1000)
        assert np.abs(np.subtract(reply.box, sample.box))[[0, 2]].max() <= tolerance


CARROTS = Box(146, 137, 615, 415)  # "bowl of carrots" on a COCO picture of 640 x 428
WRITTEN = {
    "qwen2.5-vl": '```json\n[{"bbox_2d": [147, 134, 619, 407], "label": "bowl of carrots"}]\n```',
    "qwen3-vl": '```json\n[{"bbox_2d": [228, 320, 961, 970], "label": "bowl of carrots"}]\n```',
    "internvl3": "<ref>bowl of carrots</ref><box>[[228, 320, 961, 970]]</box>",
}
WRITTEN["internvl3.5"] = WRITTEN["internvl3"]


def test_replies_in_each_familys_own_words_are_read(real_sizes):
    vlm, kind, size = real_sizes, kind_of(real_sizes), (640, 428)
    resized = REAL[kind][size][0]
    assert vlm.read(WRITTEN[kind], size, resized).box.iou(CARROTS) > 0.99
    numbers = [int(n) for n in vlm.write_box(CARROTS, size, resized).split("[")[-1].split("]")[0].split(",")]
    assert numbers == json.loads("[" + WRITTEN[kind].split("[")[-1].split("]")[0] + "]"), "to the last digit"


# Reckoned by hand: cells of 27.8 x 28.5, 32 x 32.9, 13.3 x 13.4 and, in the thumbnail, 40 x 26.75 pixels.
TOUCHED = {"qwen2.5-vl": (range(4, 15), range(5, 23)), "qwen3-vl": (range(4, 13), range(4, 20)),
           "internvl3": (range(10, 32), range(10, 47)), "internvl3.5": (range(10, 32), range(10, 47))}  # fmt: skip


def test_the_image_tokens_of_a_real_box_are_those_of_a_hand_drawn_grid(real_sizes):
    grid = real_sizes.prepare([Sample("x", Image.new("RGB", (640, 428)), "x", "dog")]).grids[0]
    rows, cols = TOUCHED[kind_of(real_sizes)]
    near = grid.tokens_in(CARROTS)
    drawn = grid.picture(near)
    assert np.argwhere(drawn).tolist() == [[r, c] for r in rows for c in cols]
    thumbnail = near[tiles_of(grid) :].reshape(-1, 16) if len(grid) > tiles_of(grid) else np.zeros((0, 16))
    expected = [[r, c] for r in range(5, 16) for c in range(3, 16)] if len(thumbnail) else []
    assert np.argwhere(thumbnail).tolist() == expected


def test_a_box_tag_survives_decoding_as_the_model_writes_it(tiny_models):
    """`<box>` is a special token and is dropped in decoding; the brackets stay."""
    vlm = tiny_models["internvl3"]
    ids = vlm.tokenizer(WRITTEN["internvl3"], add_special_tokens=False)["input_ids"]
    text, _ = vlm.decode(ids)
    assert vlm.read(text, (640, 428), (640, 428)).box.iou(CARROTS) > 0.99


# ---------------------------------------------------------------- loading


@pytest.fixture
def folder(tmp_path, tiny_models):
    """A copy of a good model folder, to be spoilt."""
    return shutil.copytree(tiny_models["qwen2.5-vl"].name, tmp_path / "model")


def edit_json(path, **changes):
    value = json.loads(path.read_text())
    for key, change in changes.items():
        value[key] = value.get(key, {}) | change if isinstance(change, dict) else change
    path.write_text(json.dumps(value))


def refused(folder) -> str:
    """The message of the refusal; it must be one line that names the model and the next step."""
    with pytest.raises((ValueError, OSError)) as caught:
        load_vlm(folder, device="cpu")
    message = str(caught.value)
    assert type(caught.value) in (ValueError, OSError) and "\n" not in message
    assert str(folder) in message
    return message


def test_missing_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    message = refused(folder)
    assert "missing: model.safetensors" in message and "Next:" in message


def test_only_safetensors_are_accepted(folder, tiny_models):
    torch.save(tiny_models["qwen2.5-vl"].model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "missing: model.safetensors" in refused(folder)


def test_truncated_weights_are_refused(folder):
    path = folder / "model.safetensors"
    for length in (path.stat().st_size // 2, 5, 0):
        path.write_bytes(path.read_bytes()[:length])
        assert "Next:" in refused(folder)


def test_garbled_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"not safetensors at all" * 9)
    assert "Next:" in refused(folder)


def test_weights_of_another_shape_are_refused_by_name(folder):
    edit_json(folder / "config.json", text_config={"intermediate_size": 80})
    message = refused(folder)
    assert "do not fit" in message and "mlp" in message


@pytest.mark.parametrize("layers", [2, 4])
def test_weights_of_another_depth_are_refused_by_name(folder, layers):
    kinds = ["full_attention"] * layers
    edit_json(folder / "config.json", text_config={"num_hidden_layers": layers, "layer_types": kinds})
    message = refused(folder)
    assert "do not fit" in message and "layers." in message


def test_a_contradictory_config_is_refused(folder):
    edit_json(folder / "config.json", text_config={"num_hidden_layers": 2})  # but three layer_types
    assert "Next:" in refused(folder)


def test_garbled_json_is_refused(folder):
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        good = (folder / name).read_bytes()
        for bad in (b"{ not json", b"\xff\xfe\x00", b""):
            (folder / name).write_bytes(bad)
            assert "Next:" in refused(folder), (name, bad)
        (folder / name).write_bytes(good)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "preprocessor_config.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    assert f"missing: {name}" in refused(folder)


def test_an_unknown_name_is_refused_with_the_nearest_one():
    with pytest.raises(ValueError, match="Did you mean 'nano-qwen2.5-vl'"):
        load_vlm("nano-qwen25-vl")
    with pytest.raises(ValueError, match="nano-qwen2.5-vl"):
        load_vlm("xyz")


def test_a_shipped_model_whose_folder_is_gone_is_not_looked_for_on_the_network(root, monkeypatch):
    monkeypatch.chdir(root)

    def network(*args, **kwargs):
        raise AssertionError("went to the network")

    monkeypatch.setattr("socket.socket.connect", network)
    with pytest.raises((ValueError, OSError), match="git checkout") as caught:
        load_vlm("nano-qwen2.5-vl", device="cpu")
    assert "data/nano/nano-qwen2.5-vl" in str(caught.value)


def test_a_model_that_is_not_of_a_known_family_is_refused(folder):
    edit_json(folder / "config.json", model_type="qwen2_vl")
    assert all(name in refused(folder) for name in FAMILIES)
    edit_json(folder / "config.json", model_type="no_such_type")
    assert "no_such_type" in refused(folder)


def test_remote_code_is_never_run(folder):
    (folder / "evil.py").write_text("raise SystemExit('ran remote code')")
    edit_json(folder / "config.json", model_type="no_such_type", auto_map={"AutoConfig": "evil.Config"})
    refused(folder)


def test_a_processor_of_another_model_is_refused(folder, tiny_models):
    """Same files, other merge size: the image tokens in the prompt no longer match the grid."""
    edit_json(folder / "preprocessor_config.json", merge_size=1)
    refused(folder)


def test_the_revision_of_a_folder_changes_with_any_file_that_decides_outputs(folder):
    seen = {load_vlm(folder, device="cpu").revision}
    assert load_vlm(folder, device="cpu").revision in seen
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    seen.add(load_vlm(folder, device="cpu").revision)
    edit_json(folder / "preprocessor_config.json", image_mean=[0.4, 0.5, 0.5])
    seen.add(load_vlm(folder, device="cpu").revision)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "Assistant"))
    seen.add(load_vlm(folder, device="cpu").revision)
    assert len(seen) == 4


def test_a_loaded_model_is_stock(vlm):
    config = vlm.model.config
    assert not vlm.model.training and vlm.model.dtype == torch.float32
    assert {c._attn_implementation for c in (config, config.text_config, config.vision_config)} == {"sdpa"}
    assert type(vlm.model).__module__.startswith("transformers.models.")
    assert vlm.grid == (3, 8) and vlm.wiring["layer_effect"].keys() == {0, 1, 2}


def test_what_decides_how_a_picture_is_resized_or_tiled_is_part_of_the_identity(vlm, tiny_models):
    before = json.dumps(vlm.identity(), sort_keys=True)
    limits = json.loads(before)["image_limits"]
    if kind_of(vlm).startswith("qwen"):
        assert limits["size"].keys() == {"shortest_edge", "longest_edge"} and limits["merge_size"] == 2
        with pytest.raises(ValueError, match="leave out tiles=2"):
            load_vlm(tiny_models[kind_of(vlm)].name, device="cpu", tiles=2)
        return
    assert limits["size"] == {"height": 56, "width": 56} and limits["max_patches"] == 6
    fewer = load_vlm(tiny_models[kind_of(vlm)].name, device="cpu", tiles=2)
    assert json.dumps(fewer.identity(), sort_keys=True) != before
    assert len(fewer.prepare(tiny.samples((168, 112))).grids[0]) == 4 * 3 < 4 * 7


def test_a_model_of_another_shape_is_not_taken_for_the_one_named(root, monkeypatch):
    """A local copy stands for a Hub id only if it is that model."""
    tiny.write("qwen2.5-vl", root / "data/local/Qwen/Qwen2.5-VL-7B-Instruct")
    with pytest.raises(ValueError, match=r"3 layers x 8 heads, qwen2.5-vl-7b has 28 x 28: it is another model"):
        load_vlm("qwen2.5-vl-7b", device="cpu")


def test_the_processor_loads_without_its_video_part(vlm):
    assert type(vlm.processor).__name__ == type(load_processor(vlm.name)).__name__
    assert vlm.image_backend == type(vlm.processor.image_processor).__name__
