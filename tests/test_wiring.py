"""The proof of wiring: it passes on good models, and each thing that it looks at is noticed when it is spoilt."""

import copy
import dataclasses
import weakref

import numpy as np
import pytest
import torch

from tests import tiny
from vrhlib import attention, wiring
from vrhlib.boxes import TokenGrid
from vrhlib.vlm import WiringError
from vrhlib.wiring import load_vlm, prove

pytestmark = pytest.mark.usefixtures("root")


@pytest.fixture
def broken(vlm):
    """A copy whose modules can be spoilt."""
    broken = copy.copy(vlm)
    broken.model = copy.deepcopy(vlm.model)
    return broken


def test_wiring_is_proven_on_a_good_model(vlm):
    found = prove(vlm)
    assert min(found["layer_effect"].values()) > 0 and len(found["layer_effect"]) == 3
    assert found["rows_times_values"] < 1e-5


def test_a_layer_that_ignores_its_heads_is_noticed(broken):
    torch.nn.init.zeros_(broken.layers[1].self_attn.o_proj.weight)
    with pytest.raises(WiringError, match=r"layers \[1\]"):
        prove(broken)


def test_a_layer_whose_o_proj_is_bypassed_is_noticed(broken, monkeypatch):
    attention = broken.layers[2].self_attn
    monkeypatch.setattr(attention, "forward", lambda hidden_states, **_: (hidden_states, None))
    with pytest.raises(WiringError):
        prove(broken)


def test_heads_of_another_width_are_noticed(broken):
    broken.model.config.get_text_config().num_attention_heads //= 2
    with pytest.raises(WiringError, match="layer 0 reads .* columns, not 4 heads"):
        prove(broken)


def test_another_number_of_layers_is_noticed(broken):
    broken.model.config.get_text_config().num_hidden_layers += 1
    with pytest.raises(WiringError, match="3 attention layers ran, config.json says 4"):
        prove(broken)


def test_a_picture_that_does_not_reach_the_answer_is_noticed(broken):
    features = broken.model.get_image_features

    def constant(*args, **kwargs):
        out = features(*args, **kwargs)
        for part in out.pooler_output:  # one tensor per image, or rows of one tensor
            part.fill_(1)
        for part in getattr(out, "deepstack_features", None) or []:
            for value in part:
                value.fill_(1)
        return out

    broken.model.get_image_features = constant
    with pytest.raises(WiringError):
        prove(broken)


def reordered(vlm, order):
    """The same model, whose captured rows come with the heads in another order."""
    capture = attention._attention_rows
    return lambda *a: capture(*a)[:, order]


@pytest.mark.parametrize("swap", [(0, 1), (0, 7), (3, 4)])
def test_rows_of_another_head_are_noticed(vlm, monkeypatch, swap):
    order = list(range(8))
    order[swap[0]], order[swap[1]] = order[swap[1]], order[swap[0]]
    monkeypatch.setattr(attention, "_attention_rows", reordered(vlm, order))
    with pytest.raises(WiringError, match="another order"):
        prove(vlm)


def test_keys_grouped_in_another_way_are_noticed(vlm, monkeypatch):
    real = attention._attention_rows

    def interleaved(query, key, *rest):  # head h with group h % groups, as some libraries have it
        order = torch.arange(8).view(-1, key.shape[1]).T.flatten()
        return real(query[:, order], key, *rest)[:, order.argsort()]

    monkeypatch.setattr(attention, "_attention_rows", interleaved)
    with pytest.raises(WiringError, match="another order"):
        prove(vlm)


def test_rows_of_the_position_before_are_noticed(vlm, monkeypatch):
    real = attention._attention_rows
    shifted = lambda q, k, mask, local, rows, scaling: real(q, k, mask, local - 1, rows - 1, scaling)  # noqa: E731
    monkeypatch.setattr(attention, "_attention_rows", shifted)
    with pytest.raises(WiringError):
        prove(vlm)


def test_rows_that_do_not_sum_to_one_are_noticed(vlm, monkeypatch):
    real = attention._attention_rows
    monkeypatch.setattr(attention, "_attention_rows", lambda *a: 0.99 * real(*a))
    with pytest.raises(WiringError, match="sum to 1 ± 0.01"):
        prove(vlm)


# ---------------------------------------------------------------- where image tokens look


def test_the_grid_is_proven_cell_by_cell(vlm):
    found = vlm.check(cells=10_000)
    assert found["cells"] == found["rows"] * found["cols"] > 4
    assert found["image_tokens"] >= found["cells"]


ORDERS = {  # what is done to the cells of one tile (or of the whole grid), float [rows, cols, 4]
    "transposed": lambda cells: cells.transpose(1, 0, 2),
    "upside down": lambda cells: cells[::-1],
    "mirrored": lambda cells: cells[:, ::-1],
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_wrong_order_of_image_tokens_is_noticed(vlm, order):
    def wrong(*args):
        grid, resized = vlm.family.grid(*args)
        n, tail = grid.rows * grid.cols, len(grid) - grid.rows * grid.cols
        shape = (-1, int(tail**0.5), int(tail**0.5)) if tail else (1, grid.rows, grid.cols)
        tiles = [ORDERS[order](tile).reshape(-1, 4) for tile in grid.cells[:n].reshape(*shape, 4)]
        return TokenGrid(np.concatenate([*tiles, grid.cells[n:]]), grid.rows, grid.cols, grid.order), resized

    spoilt = copy.copy(vlm)
    spoilt.family = dataclasses.replace(vlm.family, grid=wrong)
    with pytest.raises(WiringError, match="another order"):
        spoilt.check()


def test_loading_proves_the_wiring(tmp_path, monkeypatch):
    monkeypatch.setattr(wiring, "prove", lambda vlm: {"proven": vlm.name})
    folder = tiny.write("qwen3-vl", tmp_path / "model")
    assert load_vlm(folder, device="cpu").wiring == {"proven": str(folder)}


def test_a_thumbnail_in_another_order_is_noticed(tiny_models):
    vlm = copy.copy(tiny_models["internvl3"])

    def wrong(*args):
        grid, resized = vlm.family.grid(*args)
        n = grid.rows * grid.cols
        return TokenGrid(
            np.concatenate([grid.cells[:n], grid.cells[n:][::-1]]), grid.rows, grid.cols, grid.order
        ), resized

    spoilt = copy.copy(vlm)
    spoilt.family = dataclasses.replace(vlm.family, grid=wrong)
    with pytest.raises(WiringError, match="thumbnail"):
        spoilt.check()


def test_a_tower_whose_mixing_modules_are_called_otherwise_is_refused(vlm):
    spoilt = copy.copy(vlm)
    spoilt.family = dataclasses.replace(vlm.family, mixing="no.such.module")
    with pytest.raises(WiringError, match="no.such.module"):
        spoilt.check()


def test_a_tower_that_still_mixes_is_noticed(vlm):
    """If cutting misses the modules that mix, tokens of other cells move: the check must not call that right."""
    spoilt = copy.copy(vlm)
    spoilt.family = dataclasses.replace(vlm.family, mixing="mlp.fc2" if "intern" in vlm.name else "mlp.down_proj")
    with pytest.raises(WiringError):
        spoilt.check()


def test_a_bfloat16_model_is_proven_and_swapped_heads_are_noticed_in_it(vlm, monkeypatch):
    half = copy.copy(vlm)
    half.model = copy.deepcopy(vlm.model).to(torch.bfloat16)
    assert 0 < prove(half)["rows_times_values"] < wiring.TOLERANCE[torch.bfloat16]
    monkeypatch.setattr(attention, "_attention_rows", reordered(vlm, [1, 0, *range(2, 8)]))
    with pytest.raises(WiringError, match="another order"):
        prove(half)


def test_running_out_of_memory_is_not_taken_for_bad_wiring(tmp_path, monkeypatch):
    folder = tiny.write("qwen2.5-vl", tmp_path / "model")

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    monkeypatch.setattr(attention, "sdpa_attention_forward", full)
    with pytest.raises(MemoryError, match="does not fit.*Tried to allocate 1.00 GiB.*instead_of"):
        load_vlm(folder, device="cpu")


def test_a_model_is_freed_before_another_is_read(tmp_path, monkeypatch):
    """Two models of 16 GB each do not share a card of 24."""
    folders = [tiny.write(kind, tmp_path / kind) for kind in ("qwen2.5-vl", "internvl3")]
    vlm = load_vlm(folders[0])
    assert load_vlm(folders[0], instead_of=vlm) is vlm, "the one asked for is kept"
    alive, real = weakref.ref(vlm.model), wiring.load_unproven
    seen = []

    def watched(*args):
        seen.append(alive())
        return real(*args)

    monkeypatch.setattr(wiring, "load_unproven", watched)
    vlm = load_vlm(folders[1], instead_of=vlm)
    assert seen == [None] and vlm.grid == (3, 8)
