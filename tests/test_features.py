"""Pictures are looked at once: in a batch, and, where features are kept on disk, across batches and processes."""

import dataclasses
import os
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny
from vrhlib import features, store
from vrhlib.samples import Sample
from vrhlib.vlm import VLM

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def looks(vlm):
    """How many pictures the vision tower was shown, call by call."""
    seen, real = [], vlm.model.get_image_features

    def counted(pixel_values, image_grid_thw=None, **more):
        seen.append(len(image_grid_thw) if image_grid_thw is not None else len(pixel_values))
        return real(
            pixel_values=pixel_values, **({} if image_grid_thw is None else {"image_grid_thw": image_grid_thw}), **more
        )

    vlm.model.get_image_features = counted
    yield seen
    del vlm.model.get_image_features


def pictures(*texts: str, size=(56, 56)) -> list[Sample]:
    """One picture, several expressions."""
    (sample,) = tiny.samples(size)
    return [dataclasses.replace(sample, id=f"s{i}", text=text) for i, text in enumerate(texts)]


def same(one, other) -> bool:
    return all(torch.allclose(a, b, atol=1e-6) for x, y in zip(one, other) for a, b in zip(x, y, strict=True))


def test_expressions_of_one_picture_share_a_look(vlm, looks):
    asked = [*pictures("the circle", "the red square over there"), tiny.samples((56, 112))[0]]
    got = vlm.see(vlm.prepare([asked[0], asked[2], asked[1]])).features
    alone = [vlm.see(vlm.prepare([s])).features[0] for s in (asked[0], asked[2], asked[1])]
    assert same(got, alone) and got[0][0] is got[2][0]
    assert len(looks) == 4 and looks[0] == looks[1] + looks[2], "two pictures of three samples"


def test_other_pixels_under_one_name_are_looked_at(vlm, looks):
    first, second = pictures("the circle", "the circle")
    turned = dataclasses.replace(second, image=second.image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert first.image_key == turned.image_key
    got = vlm.see(vlm.prepare([first, turned])).features
    assert not torch.allclose(got[0][0], got[1][0], atol=1e-3)


def test_logits_are_those_of_pixels_whatever_is_shared(vlm):
    batch = vlm.prepare([*pictures("the circle", "a square"), *tiny.samples((100, 60))])
    with torch.no_grad():
        want = vlm.model(**batch.tensors).logits
        got = vlm.model(**vlm.inputs(batch)).logits
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_nothing_is_kept_unless_asked(vlm, root):
    vlm.see(vlm.prepare(tiny.samples()))
    assert not list(root.rglob("*.safetensors"))


def test_kept_features_are_found_by_later_batches(vlm, looks, root, monkeypatch):
    monkeypatch.setenv("VRHLIB_FEATURES_GB", "1")
    shown = tiny.samples()
    want = vlm.see(vlm.prepare(shown)).features
    assert len(list((root / "data/runs/nano/features").glob("*.safetensors"))) == len(shown)
    looks.clear()
    assert same(vlm.see(vlm.prepare(shown[::-1])).features, want[::-1]) and looks == []
    one_more = [*pictures("the circle", size=(84, 56)), *shown]
    assert same(vlm.see(vlm.prepare(one_more)).features[1:], want) and len(looks) == 1


@pytest.mark.parametrize("change", ["revision", "pixels", "limits", "versions"])
def test_other_features_are_not_found_under_the_same_key(vlm, looks, monkeypatch, change):
    monkeypatch.setenv("VRHLIB_FEATURES_GB", "1")
    sample = tiny.samples((56, 56))[0]
    vlm.see(vlm.prepare([sample]))
    looks.clear()
    if change == "revision":
        vlm.revision = "another"
    elif change == "versions":
        monkeypatch.setattr(store, "versions", lambda: {"torch": "0.0.1"})
    elif change == "limits":
        monkeypatch.setattr(VLM, "image_limits", {"size": 1})
    else:
        sample = dataclasses.replace(sample, image=Image.fromarray(255 - np.asarray(sample.image)))
    vlm.see(vlm.prepare([sample]))
    assert len(looks) == 1


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 100])
def test_a_spoiled_file_is_looked_at_again_and_replaced(vlm, looks, root, monkeypatch, content):
    monkeypatch.setenv("VRHLIB_FEATURES_GB", "1")
    sample = tiny.samples((56, 56))
    want = vlm.see(vlm.prepare(sample)).features
    (path,) = (root / "data/runs/nano/features").glob("*.safetensors")
    path.write_bytes(content)
    looks.clear()
    assert same(vlm.see(vlm.prepare(sample)).features, want) and len(looks) == 1
    assert same(vlm.see(vlm.prepare(sample)).features, want) and len(looks) == 1


def test_the_least_recently_used_make_way(root, monkeypatch):
    monkeypatch.setenv("VRHLIB_FEATURES_GB", str(3.5 * 4096e-9))
    values = (torch.zeros(1000),)  # 4,000 bytes and a header
    for i, key in enumerate("abc"):
        features.save("nano", key, values)
        os.utime(root / f"data/runs/nano/features/{key}.safetensors", (i, i))
    assert features.load("nano", "a", torch.device("cpu")) is not None  # used now
    features.save("nano", "d", values)
    assert [key for key in "abcd" if features.load("nano", key, torch.device("cpu")) is not None] == ["a", "c", "d"]
    features.save("nano", "large", (torch.zeros(10_000),))
    assert features.load("nano", "large", torch.device("cpu")) is None, "what has no room at all is not kept"
    assert features.load("nano", "d", torch.device("cpu")) is not None


def test_a_full_disk_costs_a_line_and_no_result(vlm, monkeypatch, capsys):
    monkeypatch.setenv("VRHLIB_FEATURES_GB", "1")
    monkeypatch.setattr(store, "_SAID", set())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_atomic", full)
    assert len(vlm.see(vlm.prepare(tiny.samples())).features) == 3
    assert capsys.readouterr().out.count("Vision features are not kept") == 1


@pytest.mark.parametrize("text", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_no_size_is_refused(monkeypatch, text):
    monkeypatch.setenv("VRHLIB_FEATURES_GB", text)
    with pytest.raises(ValueError, match="VRHLIB_FEATURES_GB.*gigabytes"):
        features.limit_gb()


def test_batches_are_prepared_by_a_thread_while_the_model_runs_each_once(vlm, monkeypatch):
    """The loop of a sweep, word for word."""
    chunks = [
        tiny.samples((100, 60), (56, 56)),
        tiny.samples((70, 150))[:1],
        tiny.samples((56, 112), (64, 64), (90, 90)),
    ]
    chunks = [[dataclasses.replace(s, id=f"{i} {s.id}") for s in chunk] for i, chunk in enumerate(chunks)]
    want = [vlm.prepare(chunk) for chunk in chunks]
    prepared, real = [], VLM._prepared

    def noted(self, samples):
        prepared.append((threading.current_thread() is threading.main_thread(), [s.id for s in samples]))
        return real(self, samples)

    monkeypatch.setattr(VLM, "_prepared", noted)
    for chunk, then in zip(chunks, [*chunks[1:], None]):
        vlm.soon(chunk)
        vlm.soon(then)
        vlm.prepare(chunk)
    assert [main for main, _ in prepared] == [True] * 3 and not vlm._begun, "on a CPU it would only take turns"
    prepared.clear()
    monkeypatch.setattr(VLM, "threaded", True)
    for chunk, then, whole in zip(chunks, [*chunks[1:], None], want):
        vlm.soon(chunk)
        vlm.soon(then)
        got = vlm.prepare(chunk)
        assert all(torch.equal(got.tensors[k], whole.tensors[k]) for k in whole.tensors)
    assert prepared == [(False, [s.id for s in chunk]) for chunk in chunks] and not vlm._begun


def test_a_batch_that_is_cut_otherwise_or_asks_otherwise_is_prepared_again(vlm, monkeypatch):
    monkeypatch.setattr(VLM, "threaded", True)
    one = tiny.samples((100, 60), (56, 56))
    vlm.soon(one)
    assert [s.id for s in vlm.prepare(one[:1]).samples] == [one[0].id]
    renamed = [dataclasses.replace(s, text="another") for s in one]
    assert vlm.prepare(renamed).samples == renamed, "of the same name, and another question"
    vlm.rows = 1  # fewer sequences at once: the first piece is what will be asked for
    vlm.soon(one)
    assert list(vlm._begun) == [(vlm.prompt, one[0].id)]
    for i in range(4):
        vlm.soon([dataclasses.replace(one[0], id=str(i))])
    assert len(vlm._begun) <= 2, "what is never asked for does not pile up"


def test_the_thread_has_a_tokenizer_of_its_own(vlm, monkeypatch):
    monkeypatch.setattr(VLM, "threaded", True)
    asides, real = [], VLM._prepared
    monkeypatch.setattr(VLM, "_prepared", lambda self, samples: asides.append(self) or real(self, samples))
    vlm.soon(tiny.samples())
    vlm.prepare(tiny.samples())
    assert asides[0].processor is not vlm.processor and asides[0].tokenizer is not vlm.tokenizer
    assert asides[0].model is vlm.model


def test_the_thread_asks_by_the_prompt_of_now(vlm, monkeypatch):
    """It is in the run key as it is when a run begins: what was prepared with an older one would stand under it."""
    monkeypatch.setattr(VLM, "threaded", True)
    shown = tiny.samples((100, 60))
    vlm.soon(shown)
    before = vlm.prepare(shown)
    vlm.prompt = f"{vlm.prompt} Please."
    vlm.soon(shown)
    begun = list(vlm._begun.values())[-1]
    got = vlm.prepare(shown)
    assert got is begun.result() and got.length > before.length
    assert torch.equal(got.tensors["input_ids"], vlm.prepare(shown).tensors["input_ids"])


def test_a_model_that_is_given_up_is_held_by_nothing_that_was_prepared_ahead(vlm, monkeypatch):
    monkeypatch.setattr(VLM, "threaded", True)
    model = vlm.model
    vlm.soon(tiny.samples())
    begun = list(vlm._begun.values())
    begun[0].result()
    vlm.release()
    assert vlm.model is None and not vlm._begun
    assert not any(isinstance(kept, VLM) for kept in vlm._aside)
    vlm.model = model  # for the check of what a test leaves behind


def test_features_of_another_number_of_tokens_are_not_used(vlm, looks, root, monkeypatch):
    monkeypatch.setenv("VRHLIB_FEATURES_GB", "1")
    sample = tiny.samples((56, 56))
    want = vlm.see(vlm.prepare(sample)).features
    (path,) = (root / "data/runs/nano/features").glob("*.safetensors")
    features.save("nano", path.stem, tuple(v[..., :1, :] for v in want[0]))
    looks.clear()
    assert same(vlm.see(vlm.prepare(sample)).features, want) and len(looks) == 1
