"""Boxes against pixel counting, parsers against literal replies, token grids against hand-drawn ones."""

import math
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from vrhlib.boxes import (
    Box,
    Reply,
    TokenGrid,
    box_of_mask,
    decode_mask,
    encode_mask,
    from_frame,
    number_spans,
    read_box,
    read_points,
    to_frame,
)

many = settings(max_examples=150, deadline=None, derandomize=True)


@st.composite
def integer_boxes(draw, width=24, height=18):
    x = draw(st.lists(st.integers(0, width), min_size=2, max_size=2, unique=True).map(sorted))
    y = draw(st.lists(st.integers(0, height), min_size=2, max_size=2, unique=True).map(sorted))
    return Box(x[0], y[0], x[1], y[1])


@st.composite
def grids(draw):
    """A grid with its image size and the exact cells, worked out in fractions."""
    image = draw(st.integers(1, 700)), draw(st.integers(1, 700))
    rows, cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    if draw(st.booleans()):
        return TokenGrid.regular(rows, cols, image), image, exact_cells(rows, cols, image)
    side = draw(st.integers(1, 4))
    return TokenGrid.tiled(rows, cols, side, image), image, exact_tiles(rows, cols, side, image)


def exact_cells(rows, cols, image):
    (w, h) = image
    return [
        (Fraction(c * w, cols), Fraction(r * h, rows), Fraction((c + 1) * w, cols), Fraction((r + 1) * h, rows))
        for r in range(rows)
        for c in range(cols)
    ]


def exact_tiles(tile_rows, tile_cols, side, image):
    whole = exact_cells(tile_rows * side, tile_cols * side, image)
    tiles = [
        whole[(tr * side + r) * tile_cols * side + tc * side + c]
        for tr in range(tile_rows)
        for tc in range(tile_cols)
        for r in range(side)
        for c in range(side)
    ]
    return tiles + (exact_cells(side, side, image) if tile_rows * tile_cols > 1 else [])


def overlapping(cells, box):
    x0, y0, x1, y1 = map(Fraction, box)
    return [i for i, c in enumerate(cells) if c[0] < x1 and x0 < c[2] and c[1] < y1 and y0 < c[3]]


def pixels(box):
    return {(x, y) for x in range(box.x0, box.x1) for y in range(box.y0, box.y1)}


# ---------------------------------------------------------------- IoU and frames


@many
@given(integer_boxes(), integer_boxes())
def test_iou_of_integer_boxes_counts_pixels(a, b):
    expected = len(pixels(a) & pixels(b)) / len(pixels(a) | pixels(b))
    assert a.iou(b) == pytest.approx(expected, abs=1e-12)
    assert a.iou(b) == b.iou(a)
    assert 0 <= a.iou(b) <= 1
    assert (a.iou(b) == 1) == (a == b)
    assert a.area == len(pixels(a))


finite = st.floats(-1e6, 1e6, allow_nan=False)


@many
@given(st.tuples(finite, finite, finite, finite), st.tuples(finite, finite, finite, finite))
def test_iou_of_any_boxes_is_symmetric_and_between_0_and_1(a, b):
    a, b = Box(*a), Box(*b)
    assert 0 <= a.iou(b) <= 1
    assert a.iou(b) == b.iou(a)


def test_degenerate_boxes_overlap_nothing_not_even_themselves():
    for box in (Box(5, 5, 5, 9), Box(5, 5, 9, 5), Box(9, 9, 5, 5)):
        assert box.area == 0
        assert box.iou(box) == 0
        assert box.iou(Box(0, 0, 20, 20)) == 0


def test_touching_boxes_do_not_overlap_and_widths_have_no_plus_one():
    assert Box(0, 0, 10, 10).iou(Box(10, 0, 20, 10)) == 0
    assert Box(0, 0, 10, 10).area == 100
    assert Box(0, 0, 10, 10).iou(Box(0, 0, 10, 20)) == 0.5


sides = st.integers(1, 4000)


@many
@given(
    st.tuples(finite, finite, finite, finite),
    st.sampled_from(["resized", "permille"]),
    st.tuples(sides, sides),
    st.tuples(sides, sides),
)
def test_from_frame_undoes_to_frame(box, frame, original, resized):
    there = to_frame(Box(*box), frame, original, resized)
    assert from_frame(there, frame, original, resized) == pytest.approx(box, rel=1e-9, abs=1e-9)


COCO, COCO_SIZE = Box(146, 137, 615, 415), (640, 428)


def test_the_coco_bowl_is_written_as_each_model_writes_it():
    assert [round(v) for v in to_frame(COCO, "resized", COCO_SIZE, (644, 420))] == [147, 134, 619, 407]
    assert [round(v) for v in to_frame(COCO, "permille", COCO_SIZE, (644, 420))] == [228, 320, 961, 970]


@pytest.mark.parametrize("frame", ["resize", "absolute", "", None])
def test_an_unknown_frame_is_refused(frame):
    with pytest.raises((ValueError, KeyError)):
        to_frame(COCO, frame, COCO_SIZE, COCO_SIZE)
    with pytest.raises((ValueError, KeyError)):
        from_frame(COCO, frame, COCO_SIZE, COCO_SIZE)


# ---------------------------------------------------------------- replies

BOX = Box(10, 20, 300, 400)
QWEN = [  # text, what is read
    ('{"bbox_2d": [10, 20, 300, 400]}', BOX),
    ('```json\n[\n\t{"bbox_2d": [10, 20, 300, 400], "label": "the cat"}\n]\n```', BOX),
    ('[{"bbox_2d": [10, 20, 300, 400], "label": "cat"}]', BOX),
    ('{"label": "cat", "bbox_2d": [10, 20, 300, 400]}', BOX),
    ('{"label": "a [grey] cat, 3 of 4", "bbox_2d": [10, 20, 300, 400]}', BOX),
    ('{"bbox_2d":[10,20,300,400]}', BOX),
    ('{ "bbox_2d" :  [ 10 , 20 ,300 ,\n400 ] }', BOX),
    ('{"bbox_2d": [10.5, 20.25, 300.0, 400.]}', Box(10.5, 20.25, 300, 400)),
    ('{"bbox_2d": [1e1, 2.0E+1, 300, 400]}', BOX),
    ('{"bbox_2d": [-10, -20.5, 300, 400]}', Box(-10, -20.5, 300, 400)),
    ('{"bbox_2d": [[10, 20, 300, 400]]}', BOX),
    ('{"bbox_2d": [[10, 20, 300, 400], [1, 2, 3, 4]]}', BOX),
    ('[{"bbox_2d": [10, 20, 300, 400]}, {"bbox_2d": [1, 2, 3, 4]}]', BOX),
    ('Sure! The box is {"bbox_2d": [10, 20, 300, 400]}. It is a cat.', BOX),
    ("I see no such cat in the picture.", "no box"),
    ("", "no box"),
    ("10, 20, 300, 400", "no box"),
    ('{"bbox_2d": [10, 20, 300]}', "malformed"),
    ('{"bbox_2d": [10, 20, 300, 400, 500]}', "malformed"),
    ('{"bbox_2d": []}', "malformed"),
    ('{"bbox_2d": [10, 20, 300, ]}', "malformed"),
    ('{"bbox_2d": [10 20 300 400]}', "malformed"),
    ('{"bbox_2d": [left, top, right, bottom]}', "malformed"),
    ('{"bbox_2d": [10, 20, 300, four hundred]}', "malformed"),
    ('{"bbox_2d": ["10", "20", "300", "400"]}', "malformed"),
    ('{"bbox_2d": [NaN, 20, 300, 400]}', "malformed"),
    ('{"bbox_2d": [10, 20, inf, 400]}', "malformed"),
    ('{"bbox_2d": [10, 20, Infinity, 400]}', "malformed"),
    ('{"bbox_2d": [10, 20, 1e999, 400]}', "malformed"),
    ('{"bbox_2d": [0x10, 20, 300, 400]}', "malformed"),
    ('{"bbox_2d": [1_0, 20, 300, 400]}', "malformed"),
    ('{"bbox_2d": [10, 20, 300, 400}', "malformed"),
    ('{"bbox_2d": [10, 20, 10, 400]}', "degenerate"),
    ('{"bbox_2d": [10, 20, 300, 20]}', "degenerate"),
    ('{"bbox_2d": [300, 400, 10, 20]}', "degenerate"),
    ('{"bbox_2d": [0, 0, 0, 0]}', "degenerate"),
    ('{"bbox_2d": [10, 20, 300]}, {"bbox_2d": [1, 2, 3, 4]}', "malformed"),  # the first counts, not the best
]
INTERN = [
    ("<ref>the cat</ref><box>[[10, 20, 300, 400]]</box>", BOX),
    ("<box>[[10,20,300,400]]</box>", BOX),
    ("the cat[[10, 20, 300, 400]]", BOX),  # special tokens removed by the decoder
    ("[[10, 20, 300, 400]]", BOX),
    ("[ [ 10 ,20 , 300,400 ] ]", BOX),
    ("[[10, 20, 300, 400], [1, 2, 3, 4]]", BOX),
    ("cat[[10, 20, 300, 400]] dog[[1, 2, 3, 4]]", BOX),
    ("[[10.5, 20.25, 300.0, 400.]]", Box(10.5, 20.25, 300, 400)),
    ("[[-10, -20.5, 300, 400]]", Box(-10, -20.5, 300, 400)),
    ("```json\n[[10, 20, 300, 400]]\n```", BOX),
    ("There is no cat.", "no box"),
    ("", "no box"),
    ("<box></box>", "no box"),
    ("[[]]", "malformed"),
    ("[[10, 20, 300]]", "malformed"),
    ("[[10, 20, 300, 400, 500]]", "malformed"),
    ("[[x0, y0, x1, y1]]", "malformed"),
    ("[[nan, 20, 300, 400]]", "malformed"),
    ("[[10, 20, inf, 400]]", "malformed"),
    ("[[10, 20, 1e999, 400]]", "malformed"),
    ("[[10, 20, 300, 400", "malformed"),
    ("[[10, 20, 10, 400]]", "degenerate"),
    ("[[300, 400, 10, 20]]", "degenerate"),
    ("[[0, 0, 0, 0]]", "degenerate"),
]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [("bbox_2d", *row) for row in QWEN] + [("box tag", *row) for row in INTERN],
)
def test_a_reply_is_read_as_its_box_or_its_failure(style, text, expected, finished):
    reply = read_box(text, style, "resized", (640, 480), (640, 480), finished)
    if isinstance(expected, Box):
        assert (reply.box, reply.failure) == (expected, None)
    else:
        unclosed = expected == "no box" or (expected == "malformed" and "]" not in text[text.find("[") :])
        assert reply.box is None
        assert reply.failure == ("cut off" if unclosed and not finished else expected)
    assert reply.text == text
    assert reply.well_formed == (isinstance(expected, Box) or expected == "degenerate")


@pytest.mark.parametrize(
    ("style", "whole"),
    [("bbox_2d", '```json\n[{"bbox_2d": [10, 20, 300, 400'), ("box tag", "<ref>cat</ref><box>[[10, 20, 300, 400")],
)
def test_a_box_without_closing_bracket_is_cut_off_when_generation_hit_its_limit(style, whole):
    for length in range(len(whole) + 1):
        reply = read_box(whole[:length], style, "resized", (640, 480), (640, 480), finished=False)
        assert (reply.box, reply.failure) == (None, "cut off")
        assert not reply.well_formed


@pytest.mark.parametrize(
    ("style", "text"), [("bbox_2d", '{"bbox_2d": [10, 20, 300, 400]'), ("box tag", "[[10, 20, 300, 400]")]
)
def test_a_box_whose_own_bracket_is_closed_counts_though_the_reply_was_cut(style, text):
    assert read_box(text, style, "resized", (640, 480), (640, 480), finished=False).box == BOX


def test_a_box_deeper_in_lists_is_still_a_box():
    for style, text in [("bbox_2d", '{"bbox_2d": [[[10, 20, 300, 400]]]}'), ("box tag", "[[[10, 20, 300, 400]]]")]:
        assert read_box(text, style, "resized", (640, 480), (640, 480)).failure in (None, "malformed")


def test_the_frame_of_a_box_is_never_guessed_from_its_numbers():
    small = '{"bbox_2d": [100, 100, 200, 200]}'  # would fit either frame
    large = '{"bbox_2d": [1200, 100, 1500, 200]}'  # exceeds 1000, and stays per-mille
    sizes = {"original": (640, 428), "resized": (1280, 856)}
    assert read_box(small, "bbox_2d", "resized", **sizes).box == pytest.approx((50, 50, 100, 100))
    assert read_box(small, "bbox_2d", "permille", **sizes).box == pytest.approx((64, 42.8, 128, 85.6))
    assert read_box(large, "bbox_2d", "permille", **sizes).box == pytest.approx((768, 42.8, 960, 85.6))
    fraction = '{"bbox_2d": [0.1, 0.1, 0.5, 0.5]}'  # looks like a share of the image, and is not
    assert read_box(fraction, "bbox_2d", "resized", **sizes).box == pytest.approx((0.05, 0.05, 0.25, 0.25))


def test_a_true_box_survives_being_written_in_whole_numbers_and_read():
    for style, frame, resized in [
        ("bbox_2d", "resized", (644, 420)),
        ("bbox_2d", "permille", (640, 416)),
        ("box tag", "permille", (1344, 896)),
    ]:
        numbers = ", ".join(str(round(v)) for v in to_frame(COCO, frame, COCO_SIZE, resized))
        text = f'{{"bbox_2d": [{numbers}]}}' if style == "bbox_2d" else f"<box>[[{numbers}]]</box>"
        assert read_box(text, style, frame, COCO_SIZE, resized).box.iou(COCO) >= 0.97


fragments = st.lists(
    st.one_of(
        st.sampled_from(
            [
                '"bbox_2d"',
                ":",
                "[",
                "]",
                "[[",
                "]]",
                ",",
                " ",
                "\n",
                "-",
                ".",
                "e",
                "1e308",
                "1e-323",
                "nan",
                "<box>",
                "{",
                "}",
                '"',
            ]
        ),
        st.integers(-2000, 2000).map(str),
        st.floats().map(str),
        st.text(max_size=4),
    ),
    max_size=14,
).map("".join)
listed = st.lists(st.floats(allow_nan=False).map(repr), min_size=4, max_size=4).map(", ".join)
replies = st.one_of(
    st.text(), fragments, listed.map('{{"bbox_2d": [{}]}}'.format), listed.map("<box>[[{}]]</box>".format)
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(replies, st.sampled_from(["bbox_2d", "box tag"]), st.sampled_from(["resized", "permille"]), st.booleans())
def test_any_text_gives_a_box_or_a_failure(text, style, frame, finished):
    reply = read_box(text, style, frame, (1920, 640), (644, 2000), finished)
    assert (reply.box is None) != (reply.failure is None)
    if reply.box is not None:
        assert all(map(math.isfinite, reply.box))
        assert reply.box.x0 < reply.box.x1 and reply.box.y0 < reply.box.y1
        assert 0 <= reply.box.iou(Box(0, 0, 1920, 640)) <= 1


@pytest.mark.parametrize("numbers", ["0, 0, 1e308, 5", "0, 0, 1e-323, 1e-323"])
def test_a_box_that_leaves_the_numbers_on_scaling_is_no_box(numbers):
    big = read_box(f"[[{numbers}]]", "box tag", "permille", (10**6, 10**6), (1, 1))
    small = read_box(f"[[{numbers}]]", "box tag", "permille", (10, 10), (1, 1))
    for reply in (big, small):
        box = reply.box
        assert box is None or (all(map(math.isfinite, box)) and box.x0 < box.x1 and box.y0 < box.y1)


def test_reading_a_long_run_of_digits_takes_no_quadratic_time():
    began = time.process_time()
    read_box("[[" + "1" * 8_000 + "x, 2, 3, 4]]", "box tag", "permille", (640, 480), (640, 480))
    assert time.process_time() - began < 0.3


def test_a_reply_has_a_box_or_a_failure_and_never_both_or_neither():
    with pytest.raises(ValueError, match="absent"):
        Reply("text", None)
    with pytest.raises(ValueError, match="absent"):
        Reply("text", BOX, "malformed")


# ---------------------------------------------------------------- token grids


def test_a_regular_grid_is_row_major_and_not_square():
    grid = TokenGrid.regular(2, 3, (60, 20))
    assert grid.cells.tolist() == [
        [0, 0, 20, 10], [20, 0, 40, 10], [40, 0, 60, 10],
        [0, 10, 20, 20], [20, 10, 40, 20], [40, 10, 60, 20],
    ]  # fmt: skip
    assert (len(grid), grid.rows, grid.cols) == (6, 2, 3)
    assert grid.picture(np.arange(6)).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tiles_are_listed_one_by_one_and_the_thumbnail_last():
    grid = TokenGrid.tiled(1, 2, 2, (80, 20))
    first, second = [[0, 0, 20, 10], [20, 0, 40, 10], [0, 10, 20, 20], [20, 10, 40, 20]], [
        [40, 0, 60, 10], [60, 0, 80, 10], [40, 10, 60, 20], [60, 10, 80, 20],
    ]  # fmt: skip
    thumbnail = [[0, 0, 40, 10], [40, 0, 80, 10], [0, 10, 40, 20], [40, 10, 80, 20]]
    assert grid.cells.tolist() == first + second + thumbnail
    assert grid.picture(np.arange(12)).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert (grid.rows, grid.cols) == (2, 4)


def test_tiles_are_row_major_when_there_are_several_rows_of_them():
    grid = TokenGrid.tiled(2, 2, 1, (20, 20))
    assert grid.picture(np.arange(5)).tolist() == [[0, 1], [2, 3]]
    tall = TokenGrid.tiled(2, 1, 2, (20, 40))
    assert tall.picture(np.arange(12)).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_one_tile_has_no_thumbnail():
    assert len(TokenGrid.tiled(1, 1, 16, (448, 448))) == 256
    assert len(TokenGrid.tiled(2, 1, 16, (361, 640))) == 768


def chosen(grid, box):
    return np.flatnonzero(grid.tokens_in(box)).tolist()


def test_a_box_on_cell_borders_takes_no_neighbour():
    grid = TokenGrid.regular(3, 4, (40, 30))
    assert chosen(grid, Box(10, 10, 20, 20)) == [5]
    assert chosen(grid, Box(10, 10, 30, 20)) == [5, 6]
    assert chosen(grid, Box(9, 10, 20, 20)) == [4, 5]
    assert chosen(grid, Box(10, 10, 20, 20.5)) == [5, 9]
    assert chosen(grid, Box(0, 0, 40, 30)) == list(range(12))


@pytest.mark.parametrize(
    ("width", "cols", "border"), [(450, 14, 225), (464, 14, 232), (588, 18, 490), (644, 20, 483), (656, 20, 492)]
)
def test_a_border_that_falls_on_a_whole_pixel_takes_no_neighbour(width, cols, border):
    """Edges added up in floats miss the whole pixel by 1e-14 and would count one more row of tokens."""
    column = border * cols // width
    left = TokenGrid.regular(1, cols, (width, 10))
    assert chosen(left, Box(0, 0, border, 10)) == list(range(column))
    assert chosen(left, Box(border, 0, width, 10)) == list(range(column, cols))
    assert chosen(TokenGrid.regular(cols, 1, (10, width)), Box(0, 0, 10, border)) == list(range(column))


def test_tile_borders_that_fall_on_whole_pixels_take_no_neighbour():
    grid = TokenGrid.tiled(1, 5, 16, (108, 10))  # edge 40 of 80 lies at 54 exactly
    tiles = grid.picture(grid.tokens_in(Box(0, 0, 54, 10)))
    assert tiles.all(0).tolist() == [True] * 40 + [False] * 40


@pytest.mark.parametrize("tiles", [1, 3, 11])
def test_the_cells_of_a_picture_end_where_the_picture_ends(tiles):
    for size in (100, 109, 111, 115, 640, 641):
        grid = TokenGrid.tiled(1, tiles, 16, (size, size))
        assert grid.cells.max(0).tolist()[2:] == [size, size]


def test_a_box_of_one_pixel_covers_one_token():
    grid = TokenGrid.regular(15, 23, (640, 428))
    for x, y in [(0, 0), (639, 0), (0, 427), (639, 427), (320, 200)]:
        assert grid.tokens_in(Box(x, y, x + 1, y + 1)).sum() >= 1


def test_a_box_without_area_covers_the_token_it_lies_in():
    grid = TokenGrid.regular(3, 4, (40, 30))
    assert chosen(grid, Box(15, 15, 15, 15)) == [5]
    assert chosen(grid, Box(10, 10, 10, 10)) == [5]  # on a corner: half-open cells, exactly one
    assert chosen(grid, Box(15, 12, 15, 18)) == [5]
    tiled = TokenGrid.tiled(1, 2, 1, (40, 20))
    assert chosen(tiled, Box(30, 5, 30, 5)) == [1, 2]  # the tile's token and the thumbnail's


@pytest.mark.parametrize(
    "box", [Box(40, 0, 50, 30), Box(-20, 0, 0, 30), Box(0, 30, 40, 31), Box(0, -9, 40, -1), Box(400, 300, 410, 310)]
)
def test_a_box_outside_the_image_is_refused(box):
    with pytest.raises(ValueError, match="outside the image of 40 x 30"):
        TokenGrid.regular(3, 4, (40, 30)).tokens_in(box)


def test_a_box_that_leaves_the_image_covers_the_tokens_inside():
    assert chosen(TokenGrid.regular(3, 4, (40, 30)), Box(35, 25, 500, 500)) == [11]


def test_the_tokens_of_the_coco_bowl_on_qwen_2_5():
    grid = TokenGrid.regular(15, 23, COCO_SIZE)  # cells of 27.8 x 28.5 pixels
    expected = {r * 23 + c for r in range(4, 15) for c in range(5, 23)}
    assert len(grid) == 345 and set(chosen(grid, COCO)) == expected and len(expected) == 198


def test_the_tokens_of_the_coco_bowl_on_qwen_3():
    grid = TokenGrid.regular(13, 20, COCO_SIZE)  # cells of 32 x 32.9 pixels
    expected = {r * 20 + c for r in range(4, 13) for c in range(4, 20)}
    assert len(grid) == 260 and set(chosen(grid, COCO)) == expected and len(expected) == 144


def test_the_tokens_of_the_coco_bowl_on_internvl_are_in_tiles_and_thumbnail():
    grid = TokenGrid.tiled(2, 3, 16, COCO_SIZE)  # 48 x 32 cells of 13.3 x 13.4, thumbnail cells of 40 x 26.75
    tiles = {(r // 16 * 3 + c // 16) * 256 + r % 16 * 16 + c % 16 for r in range(10, 32) for c in range(10, 47)}
    thumbnail = {6 * 256 + r * 16 + c for r in range(5, 16) for c in range(3, 16)}
    assert len(grid) == 1792 and set(chosen(grid, COCO)) == tiles | thumbnail
    assert (len(tiles), len(thumbnail)) == (814, 143)


@many
@given(grids(), st.data())
def test_tokens_in_a_box_are_those_a_loop_over_exact_cells_finds(drawn, data):
    grid, image, cells = drawn
    box = data.draw(integer_boxes(*image))
    assert chosen(grid, box) == overlapping(cells, box)


@many
@given(grids(), st.data())
def test_the_mask_of_a_box_has_the_tokens_of_the_box(drawn, data):
    grid, image, _ = drawn
    box = data.draw(integer_boxes(*image))
    mask = np.zeros(image[::-1], dtype=bool)
    mask[box.y0 : box.y1, box.x0 : box.x1] = True
    assert (grid.tokens_of(mask) == grid.tokens_in(box)).all()


@many
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 14), st.integers(1, 14), st.booleans(), st.data())
def test_tokens_of_a_mask_are_those_a_loop_over_pixels_finds(rows, cols, width, height, tiled, data):
    grid = TokenGrid.tiled(rows, cols, 2, (width, height)) if tiled else TokenGrid.regular(rows, cols, (width, height))
    cells = exact_tiles(rows, cols, 2, (width, height)) if tiled else exact_cells(rows, cols, (width, height))
    on = data.draw(st.sets(st.tuples(st.integers(0, width - 1), st.integers(0, height - 1)), min_size=1))
    mask = np.zeros((height, width), dtype=bool)
    for x, y in on:
        mask[y, x] = True
    expected = {i for x, y in on for i in overlapping(cells, (x, y, x + 1, y + 1))}
    assert set(np.flatnonzero(grid.tokens_of(mask))) == expected


def test_an_empty_mask_is_refused():
    with pytest.raises(ValueError, match="empty"):
        TokenGrid.regular(3, 4, (40, 30)).tokens_of(np.zeros((30, 40), dtype=bool))


def test_a_mask_of_another_shape_than_the_image_is_refused():
    grid = TokenGrid.regular(3, 4, (40, 30))
    mask = np.zeros((30, 40), dtype=bool)
    mask[5, 35] = True
    for wrong in (mask.T, np.ones((3, 4), dtype=bool), np.ones((60, 80), dtype=bool)):
        with pytest.raises(ValueError):
            grid.tokens_of(wrong)


def test_a_coloured_cell_is_found_again_at_its_place_in_the_picture():
    """Round trip through pixels: colour one cell, ask which tokens see it, look it up in the picture."""
    for grid, rows, cols in [(TokenGrid.regular(3, 5, (100, 60)), 3, 5), (TokenGrid.tiled(2, 3, 2, (120, 80)), 4, 6)]:
        width, height = int(grid.cells[:, 2].max()), int(grid.cells[:, 3].max())
        for r in range(rows):
            for c in range(cols):
                mask = np.zeros((height, width), dtype=bool)
                mask[r * height // rows : (r + 1) * height // rows, c * width // cols : (c + 1) * width // cols] = True
                assert np.argwhere(grid.picture(grid.tokens_of(mask))).tolist() == [[r, c]]


# ---------------------------------------------------------------- replies as models write them

JSON, TAG = "bbox_2d", "box tag"
REPLIES = [
    ("a fenced list", JSON, '```json\n[\n\t{"bbox_2d": [1, 2, 30, 40], "label": "dog"}\n]\n```', (1, 2, 30, 40)),
    ("bare JSON", JSON, '{"bbox_2d": [1, 2, 30, 40]}', (1, 2, 30, 40)),
    ("the key without its suffix", JSON, '[{"bbox": [1, 2, 30, 40]}]', (1, 2, 30, 40)),
    ("a nested list", JSON, '{"bbox_2d": [[1, 2, 30, 40]]}', (1, 2, 30, 40)),
    ("a list without a key", JSON, "[1, 2, 30, 40]", (1, 2, 30, 40)),
    ("prose before and after", JSON, 'Sure: {"bbox_2d": [1,2,30,40]} is it, I think [5].', (1, 2, 30, 40)),
    ("decimals", JSON, '{"bbox_2d": [1.5, 2.25, 30.0, 40]}', (1.5, 2.25, 30, 40)),
    ("two boxes: the first counts", JSON, '[{"bbox_2d": [1,2,30,40]}, {"bbox_2d": [5,6,7,8]}]', (1, 2, 30, 40)),
    ("reversed corners", JSON, '{"bbox_2d": [30, 40, 1, 2]}', "degenerate"),
    ("no area", JSON, '{"bbox_2d": [1, 2, 1, 40]}', "degenerate"),
    ("three numbers", JSON, '{"bbox_2d": [1, 2, 30]}', "malformed"),
    ("five numbers", JSON, '{"bbox_2d": [1, 2, 30, 40, 50]}', "malformed"),
    ("words for numbers", JSON, '{"bbox_2d": [one, 2, 30, 40]}', "malformed"),
    ("numbers in prose", JSON, "It spans from 1, 2 to 30, 40.", "no box"),
    ("a point", JSON, '{"point_2d": [1, 2]}', "no box"),
    ("a refusal", JSON, "There is no dog in this picture.", "no box"),
    ("nothing", JSON, "", "no box"),
    ("the authors' form", TAG, "<ref>dog</ref><box>[[1, 2, 30, 40]]</box>", (1, 2, 30, 40)),
    ("the same without special tokens", TAG, "dog[[1, 2, 30, 40]]", (1, 2, 30, 40)),
    ("single brackets", TAG, "dog[1, 2, 30, 40]", (1, 2, 30, 40)),
    ("two boxes in one tag: the first counts", TAG, "[[1, 2, 30, 40], [5, 6, 7, 8]]", (1, 2, 30, 40)),
    ("a box tag that holds words", TAG, "[[the dog]]", "malformed"),
    ("JSON from a model that writes tags", TAG, '{"bbox_2d": [1, 2, 30, 40]}', (1, 2, 30, 40)),
]


@pytest.mark.parametrize("style, text, expected", [r[1:] for r in REPLIES], ids=[r[0] for r in REPLIES])
def test_a_reply_is_read_as_a_person_would(style, text, expected):
    reply = read_box(text, style, "resized", (100, 100), (100, 100))
    assert (reply.failure or tuple(reply.box)) == expected
    assert reply.text == text


CUT = ['{"bbox_2d": [1, 2, 30', '```json\n[{"bbox_2d": [1', "", "The dog is", '{"bbox_2d": [1, 2, 30, 4']


@pytest.mark.parametrize("text", CUT)
@pytest.mark.parametrize("style", [JSON, TAG])
def test_a_reply_without_its_end_is_cut_off_not_wrong(style, text):
    assert read_box(text, style, "permille", (9, 9), (9, 9), finished=False).failure == "cut off"


def test_the_frame_is_never_guessed_from_the_numbers():
    """Thousandths are thousandths also where they would make a fine box in pixels, and the other way round."""
    text = '{"bbox_2d": [100, 100, 200, 200]}'
    assert read_box(text, JSON, "permille", (500, 400), (504, 392)).box == Box(50, 40, 100, 80)
    assert read_box(text, JSON, "resized", (1000, 800), (500, 400)).box == Box(200, 200, 400, 400)


def test_a_box_beyond_the_picture_is_not_clipped():
    assert read_box('{"bbox_2d": [-5, 0, 1200, 999]}', JSON, "permille", (100, 100), (1, 1)).box == Box(
        -0.5, 0, 120, 99.9
    )


@pytest.mark.parametrize(
    "text, points",
    [
        ('[{"point_2d": [100, 200], "label": "x"}]', [(10, 40)]),
        ("(100, 200), (300,400)", [(10, 40), (30, 80)]),
        ("[(100, 200)]", [(10, 40)]),
        ('{"bbox_2d": [100, 200, 300, 400]}', [(20, 60)]),
        ("at 100, 200", []),
        ("(one, two)", []),
    ],
)  # fmt: skip
def test_points_are_read_in_every_bracket(text, points):
    assert read_points(text, "permille", (100, 200), (7, 7)) == points


@many
@given(st.text())
def test_reading_points_never_fails(text):
    assert all(len(point) == 2 for point in read_points(text, "resized", (10, 20), (30, 40)))


# ---------------------------------------------------------------- masks


def test_polygons_run_lengths_and_arrays_give_the_same_mask():
    polygon = [10, 5, 40, 5, 40, 25, 10, 25]
    want = np.zeros((30, 50), bool)
    want[5:25, 10:40] = True
    flat, nested = encode_mask(polygon, (50, 30)), encode_mask([polygon], (50, 30))
    array, again = encode_mask(want, (50, 30)), encode_mask(encode_mask(want, (50, 30)), (50, 30))
    listed = encode_mask({"size": [30, 50], "counts": _counts(want)}, (50, 30))
    for mask in (flat, nested, array, again, listed):
        assert mask["size"] == [30, 50] and (decode_mask(mask) == want).all()
    assert box_of_mask(want) == Box(10, 5, 40, 25)
    two = encode_mask([polygon, [0, 0, 3, 0, 3, 3, 0, 3]], (50, 30))
    assert decode_mask(two).sum() == want.sum() + 9, "several polygons are one mask"


def _counts(mask: np.ndarray) -> list[int]:
    """COCO's uncompressed run lengths: column by column, beginning with a run of zeros."""
    flat = mask.flatten(order="F").astype(int)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [1 - flat[-1]]])))
    return np.diff(np.concatenate([[0], edges])).tolist()


@many
@given(st.data())
def test_masks_come_back_and_their_box_is_tight(data):
    height, width = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    mask = data.draw(arrays(bool, (height, width)))
    assert (decode_mask(encode_mask(mask, (width, height))) == mask).all()
    if not mask.any():
        with pytest.raises(ValueError, match="empty"):
            box_of_mask(mask)
        return
    x0, y0, x1, y1 = map(int, box_of_mask(mask))
    assert mask[y0:y1, x0:x1].sum() == mask.sum()
    assert mask[y0].any() and mask[y1 - 1].any() and mask[:, x0].any() and mask[:, x1 - 1].any()


@many
@given(st.data())
def test_tokens_of_a_mask_are_those_whose_cell_holds_one_of_its_pixels(data):
    rows, cols = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    height, width = data.draw(st.integers(rows, 14)), data.draw(st.integers(cols, 14))
    mask = data.draw(arrays(bool, (height, width)))
    mask[data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))] = True
    grid = TokenGrid.regular(rows, cols, (width, height))
    for cell, near in zip(grid.cells, grid.tokens_of(mask)):
        touched = [mask[y, x] for y in range(height) for x in range(width)
                   if x < cell[2] and x + 1 > cell[0] and y < cell[3] and y + 1 > cell[1]]  # fmt: skip
        assert near == any(touched)


def test_tiles_and_thumbnail_are_told_apart():
    grid = TokenGrid.tiled(1, 2, 2, (80, 40))
    assert grid.part("tiles").tolist() == [True] * 8 + [False] * 4
    assert grid.part("thumbnail").tolist() == [False] * 8 + [True] * 4 and grid.part("both").all()
    single = TokenGrid.tiled(1, 1, 2, (40, 40))
    assert all(single.part(name).all() for name in ("both", "tiles", "thumbnail"))
    with pytest.raises(ValueError, match="choose one of both, tiles, thumbnail"):
        grid.part("all")


# ---------------------------------------------------------------- how much of a token is in the box

# Shares that no small fraction equals: at a tie the last bit of a cell's border would decide.
RULES = [("any", 0.0), ("centre", 0.0), ("overlap", 0.2971), ("overlap", 1.0), ("box_share", 0.00103),
         ("box_share", 0.3971), ("soft", 0.0)]  # fmt: skip


def by_fractions(cells, box, rule, t) -> tuple[list, list]:
    """Weights from exact fractions, one cell at a time, and which cells hold most of the box."""
    x0, y0, x1, y1 = map(Fraction, box)
    shared = [max(0, min(c[2], x1) - max(c[0], x0)) * max(0, min(c[3], y1) - max(c[1], y0)) for c in cells]
    area = [(c[2] - c[0]) * (c[3] - c[1]) for c in cells]
    centre = [((c[0] + c[2]) / 2, (c[1] + c[3]) / 2) for c in cells]
    found = {
        "any": [s > 0 for s in shared],
        "centre": [x0 <= x < x1 and y0 <= y < y1 for x, y in centre],
        "overlap": [s > 0 and s >= Fraction(t) * a for s, a in zip(shared, area)],
        "box_share": [s > 0 and s >= Fraction(t) * (x1 - x0) * (y1 - y0) for s in shared],
        "soft": [s / a for s, a in zip(shared, area)],
    }[rule]
    return [float(f) for f in found], [s == max(shared) for s in shared]


@pytest.mark.parametrize("rule, t", RULES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(grids(), st.data())
def test_weights_are_those_of_exact_fractions(rule, t, drawn, data):
    grid, image, cells = drawn
    box = data.draw(integer_boxes(*image))
    got, (want, most) = grid.weights(box, rule, t), by_fractions(cells, box, rule, t)
    if any(want):
        np.testing.assert_allclose(got, want, atol=1e-9)
    else:  # one of those that hold most, if several hold the same
        assert set(got) <= {0, 1} and got.any() and not (got > most).any()


floating = st.tuples(*[st.floats(0, 1)] * 4).filter(lambda b: b[0] != b[2] and b[1] != b[3])


@many
@given(grids(), floating, st.sampled_from(RULES), st.sampled_from(["both", "tiles", "thumbnail"]))
def test_no_rule_leaves_a_box_without_tokens_or_takes_more_than_any_overlap(drawn, corners, rule, part):
    grid, (width, height), _ = drawn
    (x0, x1), (y0, y1) = sorted(corners[::2]), sorted(corners[1::2])
    box = Box(x0 * width, y0 * height, x1 * width, y1 * height)
    if box.x0 >= width or box.y0 >= height:
        return
    every, found = grid.weights(box, "any", part=part), grid.weights(box, *rule, part)
    assert set(np.unique(every)) <= {0, 1} and ((0 <= found) & (found <= 1 + 1e-12)).all()
    assert found.any() and not (found > 0)[every == 0].any() and not (found > 0)[~grid.part(part)].any()


@many
@given(st.integers(1, 9), st.integers(1, 9), st.tuples(st.integers(1, 300), st.integers(1, 300)), st.data())
def test_soft_weights_add_up_to_the_area_of_the_box_inside_the_picture(rows, cols, image, data):
    grid, corner = TokenGrid.regular(rows, cols, image), st.floats(-50, 350)
    x0, y0 = data.draw(st.floats(-50, image[0] - 0.5)), data.draw(st.floats(-50, image[1] - 0.5))
    box = Box(x0, y0, max(x0, 0) + 0.25 + abs(data.draw(corner)), max(y0, 0) + 0.25 + abs(data.draw(corner)))
    inside = Box(max(box.x0, 0), max(box.y0, 0), min(box.x1, image[0]), min(box.y1, image[1]))
    cell = image[0] / cols * image[1] / rows
    assert grid.weights(box, "soft").sum() * cell == pytest.approx(inside.area, rel=1e-9)


@many
@given(st.integers(1, 9), st.integers(1, 9), st.data(), st.tuples(*[st.floats(0.01, 1)] * 2).map(sorted))
def test_a_higher_overlap_takes_fewer_tokens(rows, cols, data, ts):
    image = 90, 60
    grid, box = TokenGrid.regular(rows, cols, image), data.draw(integer_boxes(*image))
    low, high = (grid.weights(box, "overlap", t) for t in ts)
    assert (high <= low).all() and high.any()


def test_each_rule_on_a_box_drawn_by_hand():
    grid = TokenGrid.regular(1, 4, (40, 10))
    box = Box(4, 0, 22, 10)  # 6 of the first cell, all of the second, 2 of the third
    assert grid.weights(box, "any").tolist() == [1, 1, 1, 0]
    assert grid.weights(box, "centre").tolist() == [1, 1, 0, 0]
    assert grid.weights(box, "overlap", 0.6).tolist() == [1, 1, 0, 0]
    assert grid.weights(box, "overlap", 0.61).tolist() == [0, 1, 0, 0]
    assert grid.weights(box, "box_share", 0.2).tolist() == [1, 1, 0, 0]
    assert grid.weights(box, "soft").tolist() == [0.6, 1, 0.2, 0]
    tiny = Box(19, 4, 19.5, 5)
    for rule, t in RULES:
        assert np.flatnonzero(grid.weights(tiny, rule, t)).tolist() == [1]
    assert grid.weights(Box(15, 5, 15, 5), "soft").tolist() == [0, 1, 0, 0], "a box without area"


def test_weights_of_tiles_or_thumbnail_alone():
    grid = TokenGrid.tiled(1, 2, 1, (40, 20))
    box = Box(0, 0, 10, 20)
    assert grid.weights(box, "soft").tolist() == [0.5, 0, 0.25]
    assert grid.weights(box, "soft", part="tiles").tolist() == [0.5, 0, 0]
    assert grid.weights(box, "soft", part="thumbnail").tolist() == [0, 0, 0.25]
    assert grid.weights(box, "overlap", 0.9, "thumbnail").tolist() == [0, 0, 1], "the cell that holds most of it"
    with pytest.raises(ValueError, match="outside the image"):
        grid.weights(Box(50, 0, 60, 20), "soft")


# ---------------------------------------------------------------- where a reply spells its box


@pytest.mark.parametrize("style, text, expected", [r[1:] for r in REPLIES], ids=[r[0] for r in REPLIES])
def test_number_spans_are_the_numbers_that_are_read(style, text, expected):
    numbers = [float(text[a:b]) for a, b in number_spans(text, style)]
    if isinstance(expected, tuple):
        assert tuple(numbers) == expected
    assert (numbers == []) == (expected == "no box" or text == "[[the dog]]")


def test_number_spans_leave_out_the_key_the_label_and_later_boxes():
    text = '3 dogs: [{"label": "dog 1 of 2", "bbox_2d": [10, 2.5, -30, 4e2]}, {"bbox_2d": [5, 6, 7, 8]}]'
    assert [text[a:b] for a, b in number_spans(text, JSON)] == ["10", "2.5", "-30", "4e2"]
    text = "see [1, 2, 3, 4] or [[5, 6, 7, 8]]"
    assert [text[a:b] for a, b in number_spans(text, TAG)] == ["5", "6", "7", "8"]


@many
@given(replies, st.sampled_from([JSON, TAG]))
def test_number_spans_never_fail_and_spell_the_box_that_is_read(text, style):
    spans, reply = number_spans(text, style), read_box(text, style, "resized", (10, 10), (10, 10))
    assert all(0 <= a < b <= len(text) for a, b in spans)
    assert [b for _, b in spans[:-1]] <= [a for a, _ in spans[1:]]
    if reply.box is not None:
        assert tuple(float(text[a:b]) for a, b in spans) == pytest.approx(tuple(reply.box))
