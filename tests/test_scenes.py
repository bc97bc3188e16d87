"""Scenes against an independent reader: the English is parsed here and held against boxes and pixels."""

import hashlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from vrhlib.nano import scenes
from vrhlib.nano.scenes import Scene, Thing, draw_expression, expressions, scene

REPOSITORY = Path(__file__).parents[1]
W, H, ROOM, CLEAR = 128, 96, 12, 4
COLOURS = {"red", "green", "blue", "yellow", "purple", "orange", "cyan"}
SHAPES = {"circle", "square", "triangle", "diamond", "cross", "ring"}


@cache
def drawn(i):
    """Scene i of a family that no other test or training run uses."""
    return scene((77, 5, i))


# ---------------------------------------------------------------- the independent reader


def middle(thing):
    x0, y0, x1, y1 = thing.box
    return {"x": (x0 + x1) / 2, "y": (y0 + y1) / 2}


def described(noun, things):
    """Indices of the things a noun phrase is true of; sizes are measured on the box."""
    *adjectives, head = noun.split()
    assert head in SHAPES | {"shape"}
    found = []
    for i, t in enumerate(things):
        side = t.box[2] - t.box[0]
        true = {t.colour, t.shape, "shape", "small" if side <= 18 else "large"}
        if head in true and all(word in true for word in adjectives):
            found.append(i)
    assert all(word in COLOURS | {"small", "large"} for word in adjectives)
    return found


TOWARDS = {
    "leftmost": ("x", -1), "rightmost": ("x", 1), "topmost": ("y", -1), "lowest": ("y", 1),
    "left of": ("x", -1), "right of": ("x", 1), "above": ("y", -1), "below": ("y", 1),
}  # fmt: skip


def read(text, things):
    """(indices the text is true of, its kind, pixels to spare).

    Of a relation, the pixels by which every candidate lies beyond the landmark, most first.
    """
    asked = re.fullmatch(r"Which ([a-z ]+?) is ([a-z ]+)\?", text)
    if asked:  # the same, said as a question
        noun, what = asked.groups()
        said = f"the {noun} {what}" if " the " in what else f"the {what} {noun}"
        true, _, room = read(said, things)
        return true, "question", room
    long = re.fullmatch(r"the ([a-z ]+?) that is (left of|right of|above|below) the ([a-z ]+)", text)
    relation = long or re.fullmatch(r"the ([a-z ]+?) (left of|right of|above|below) the ([a-z ]+)", text)
    superlative = re.fullmatch(r"the (leftmost|rightmost|topmost|lowest) ([a-z ]+)", text)
    if relation:
        (anchor,) = described(relation[3], things)  # the landmark itself must be unmistakable
        axis, sign = TOWARDS[relation[2]]
        lead = {
            i: sign * (middle(things[i])[axis] - middle(things[anchor])[axis])
            for i in described(relation[1], things)
            if i != anchor
        }
        true = [i for i, d in lead.items() if d > 0]
        return true, "long" if long else "relation", sorted(lead.values())[::-1]
    if superlative:
        axis, sign = TOWARDS[superlative[1]]
        order = sorted((sign * middle(things[i])[axis], i) for i in described(superlative[2], things))
        return [i for value, i in order if value == order[-1][0]], "position", order[-1][0] - order[-2][0]
    kind = "size" if re.match(r"the (small|large) ", text) else "attribute"
    return described(text.removeprefix("the "), things), kind, None


# ---------------------------------------------------------------- expressions


def test_every_expression_is_true_of_its_referent_and_of_nothing_else():
    kinds = dict.fromkeys(scenes.KINDS, 0)
    for i in range(3000):
        world = drawn(i)
        for e in expressions(world):
            true, kind, room = read(e.text, world.things)
            assert true == [e.referent], (i, e)
            assert kind == e.kind, (i, e)
            assert room is None or np.max(room) >= ROOM, (i, e)
            assert not isinstance(room, list) or all(d <= -CLEAR for d in room[1:]), (i, e)
            kinds[kind] += 1
    assert (
        set(kinds) == {"attribute", "size", "position", "relation", "long", "question"} and min(kinds.values()) > 3000
    )


def test_no_sayable_expression_is_left_out():
    """All sentences of the grammar, judged by the reader: those that single out a thing are those offered."""
    nouns = [*SHAPES, *(f"{c} shape" for c in COLOURS), *(f"{c} {s}" for c in COLOURS for s in SHAPES)]
    for i in range(60):
        world = drawn(i)
        many = {n: described(n, world.things) for n in nouns}
        sayable = {f"the {n}" for n in nouns if len(many[n]) == 1}
        full = [f"{t.size} {t.colour} {t.shape}" for t in world.things]
        several = [n for n in nouns if len(many[n]) > 1]
        for n in several:
            for size in ("small", "large"):
                sayable |= {f"the {size} {n}"} if len(described(f"{size} {n}", world.things)) == 1 else set()
            for word in ("leftmost", "rightmost", "topmost", "lowest"):
                true, _, room = read(f"the {word} {n}", world.things)
                sayable |= {f"the {word} {n}"} if len(true) == 1 and room >= ROOM else set()
            for that, landmarks in (("", nouns), (" that is", full)):
                for landmark in landmarks:
                    fits = described(landmark, world.things)
                    if len(fits) != 1 or fits[0] in many[n]:
                        continue
                    for word in ("left of", "right of", "above", "below"):
                        text = f"the {n}{that} {word} the {landmark}"
                        true, _, room = read(text, world.things)
                        if len(true) == 1 and room[0] >= ROOM and room[1] <= -CLEAR:
                            sayable.add(text)
        offered = [e.text for e in expressions(world) if e.kind != "question"]
        assert len(offered) == len(set(offered)) and set(offered) == sayable


def things(*rows):
    return Scene(tuple(Thing(shape, colour, size, box) for shape, colour, size, box in rows), (0,))


def test_expressions_of_a_hand_drawn_scene():
    world = things(
        ("circle", "red", "small", (10, 10, 24, 24)),
        ("circle", "red", "large", (60, 10, 86, 36)),
        ("ring", "blue", "small", (60, 60, 74, 74)),
        ("cross", "green", "small", (30, 70, 44, 84)),
    )
    said = {e.text: e.referent for e in expressions(world)}
    assert said["the ring"] == said["the blue shape"] == said["the blue ring"] == 2
    assert said["the small circle"] == said["the leftmost circle"] == said["the leftmost red shape"] == 0
    assert said["the large red circle"] == said["the rightmost circle"] == 1
    assert said["the circle left of the cross"] == 0 and said["the red circle right of the green shape"] == 1
    assert "the circle right of the ring" not in said  # by 6 px only
    assert "the circle above the ring" not in said  # both are
    assert "the topmost circle" not in said  # by 6 px only
    assert "the circle" not in said and "the small ring" not in said and "the ring below the circle" not in said


@pytest.mark.parametrize(("by", "offered"), [(10, False), (12, True), (14, True)])
def test_a_position_must_hold_by_the_margin(by, offered):
    world = things(("circle", "red", "small", (10, 10, 24, 24)), ("circle", "red", "small", (10 + by, 40, 24 + by, 54)))
    assert ("the leftmost circle" in [e.text for e in expressions(world)]) == offered


def test_drawing_an_expression_follows_the_weights_among_the_kinds_on_offer():
    rng = np.random.default_rng(0)
    world = next(w for w in map(drawn, range(100)) if {e.kind for e in expressions(w)} == set(scenes.KINDS))
    kinds = [draw_expression(world, rng, {"attribute": 0.75, "position": 0.25}).kind for _ in range(400)]
    assert 260 < kinds.count("attribute") < 340 and set(kinds) == {"attribute", "position"}
    assert draw_expression(world, np.random.default_rng(5), {"size": 1}) == draw_expression(
        world, np.random.default_rng(5), {"size": 1}
    )


FOUR_ALIKE = things(*(("circle", "red", "small", (x, y, x + 14, y + 14)) for x in (20, 60) for y in (20, 60)))


def test_a_scene_that_can_say_nothing_gives_no_expression():
    assert expressions(FOUR_ALIKE) == []
    assert draw_expression(FOUR_ALIKE, np.random.default_rng(0), {"attribute": 1.0, "position": 1.0}) is None
    assert draw_expression(drawn(0), np.random.default_rng(0), {}) is None


def test_an_expression_of_weight_nought_is_never_drawn():
    world = things(("circle", "red", "small", (10, 10, 24, 24)), ("ring", "blue", "small", (60, 60, 74, 74)))
    assert {e.kind for e in expressions(world)} == {"attribute", "question"}
    assert draw_expression(world, np.random.default_rng(0), {"attribute": 0.0, "size": 1.0}) is None
    assert draw_expression(world, np.random.default_rng(0), {"attribute": 1.0}, candidates=2) is None


# ---------------------------------------------------------------- geometry and pixels


def test_things_are_apart_inside_the_frame_and_on_the_pixel_grid():
    counts = set()
    for i in range(3000):
        world = drawn(i)
        counts.add(len(world.things))
        for n, t in enumerate(world.things):
            x0, y0, x1, y1 = t.box
            assert scenes.FRAME <= x0 < x1 <= W - scenes.FRAME and scenes.FRAME <= y0 < y1 <= H - scenes.FRAME
            assert all(edge % scenes.STEP == 0 and type(edge) is int for edge in t.box)
            assert x1 - x0 == y1 - y0 and x1 - x0 in scenes.SIZES[t.size]
            assert t.shape in SHAPES and t.colour in COLOURS
            for other in world.things[:n]:
                a0, b0, a1, b1 = other.box
                assert x1 <= a0 or a1 <= x0 or y1 <= b0 or b1 <= y0
    assert counts == {3, 4, 5, 6, 7, 8}


def test_signs_and_documents_show_different_words_at_their_boxes():
    for i in range(300):
        board, page = scenes.signs((77, 8, i)), scenes.document((77, 8, i))
        for world in (board, page):
            words = [w for t in world.things for w in (t.text, t.key) if w]
            assert 3 <= len(world.things) <= 5 and len(set(words)) == len(words) and set(words) <= set(scenes.WORDS)
            for n, t in enumerate(world.things):
                x0, y0, x1, y1 = t.box
                assert scenes.FRAME <= x0 < x1 <= W - scenes.FRAME and scenes.FRAME <= y0 < y1 <= H - scenes.FRAME
                rows, cols = np.nonzero(world.mask(t))
                assert x0 <= cols.min() and cols.max() < x1 and y0 <= rows.min() and rows.max() < y1
                assert all(
                    x1 <= o.box[0] or o.box[2] <= x0 or y1 <= o.box[1] or o.box[3] <= y0 for o in world.things[:n]
                )
        assert len({t.colour for t in board.things}) == len(board.things)


def test_words_can_be_told_apart_by_their_pixels():
    written = {w: scenes._letters(w).tobytes() for w in scenes.WORDS}
    assert len(set(written.values())) == len(scenes.WORDS) and all(scenes._letters(w).sum() > 20 for w in scenes.WORDS)


def test_a_mask_touches_all_four_sides_of_its_box_and_stays_inside():
    for shape in SHAPES:
        for sizes in scenes.SIZES.values():
            for side in sizes:
                mask = Scene((), (0,)).mask(Thing(shape, "red", "any", (10, 20, 10 + side, 20 + side)))
                rows, cols = np.nonzero(mask)
                assert mask.shape == (H, W)
                assert (cols.min(), rows.min(), cols.max() + 1, rows.max() + 1) == (10, 20, 10 + side, 20 + side)
    assert (~Scene((), (0,)).mask(Thing("ring", "red", "any", (10, 10, 40, 40))))[25, 25]  # a ring has a hole


def test_boxes_are_those_of_the_coloured_pixels_in_the_picture():
    """Nothing but the picture is read: coloured pixels near a thing span exactly its box, in its colour."""
    for i in range(400):
        world = drawn(i)
        picture = world.pixels.astype(int)
        coloured = picture.max(-1) - picture.min(-1) > 40
        everywhere = np.zeros((H, W), dtype=bool)
        for t in world.things:
            x0, y0, x1, y1 = t.box
            around = np.zeros((H, W), dtype=bool)
            around[y0 - 1 : y1 + 1, x0 - 1 : x1 + 1] = True
            rows, cols = np.nonzero(coloured & around)
            assert (cols.min(), rows.min(), cols.max() + 1, rows.max() + 1) == t.box, (i, t)
            seen = picture[coloured & around].mean(0)
            assert min(scenes.COLOURS, key=lambda c: np.abs(seen - scenes.COLOURS[c]).sum()) == t.colour
            everywhere |= around
        assert not (coloured & ~everywhere).any()
        for border in (picture[:2], picture[-2:], picture[:, :2], picture[:, -2:]):
            assert (border == 40).all()


def test_different_seeds_draw_different_pictures():
    assert len({drawn(i).image_key for i in range(5000)}) == 5000


def test_a_seed_draws_the_same_scene_every_time():
    again = scene((77, 5, 3))
    assert again == drawn(3) and (again.pixels == drawn(3).pixels).all()
    assert expressions(again) == expressions(drawn(3))
    assert again.image.size == (W, H) and again.image.mode == "RGB"
    assert again.image_key == hashlib.sha256(np.asarray(again.image).tobytes()).hexdigest()[:16]


FROZEN = "be95d04a1b517ffc", "b715afb6744cbb08"
SHOW = """
import hashlib
from vrhlib.nano.scenes import scene, expressions
s = scene((77, 5, 3))
said = "; ".join(f"{e.text}={e.referent}" for e in expressions(s))
print(s.image_key, hashlib.sha256(said.encode()).hexdigest()[:16])
"""


def test_a_seed_draws_the_scene_the_shipped_weights_were_trained_on():
    """Frozen when written: a change here makes every stored picture, reply and weight of another world."""
    run = subprocess.run([sys.executable, "-c", SHOW], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert tuple(run.stdout.split()) == FROZEN


def test_the_number_of_things_can_be_asked_for():
    for count in range(1, 9):
        assert len(scene((77, 6, count), count).things) == count


@pytest.mark.parametrize("count", [0, -1, 40])
def test_a_number_of_things_that_cannot_be_placed_is_refused(count):
    """In a process of its own, since a refusal that is missing is a loop without end."""
    code = f"from vrhlib.nano.scenes import scene; scene((77, 6), {count})"
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=10)
    assert run.returncode == 1 and "ValueError" in run.stderr and str(count) in run.stderr


def test_an_unknown_shape_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'hexagon'.*circle.*ring"):
        Scene((), (0,)).mask(Thing("hexagon", "red", "small", (10, 10, 24, 24)))
