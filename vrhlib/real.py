"""The twelve real benchmarks, and the training splits of three: how each table is read into samples.

`hub` opens a table, a reader turns one of its rows into a `Sample`, and the rest is the same for all of them:

- Split "all" is every row. "detect" is the first `held_out` rows in the order of `digest([seed, id])` (200; half of a
  table that has fewer than 400), "test" every row whose picture is not among theirs: give both the same seed. With
  `split_by="row"`, the paper's way, "test" is all other rows, and a note counts those on a picture of "detect".
- `n` is drawn by seed and keeps the order of the table; a smaller n is a part of a larger one.
- A row that cannot be used is `Lost`, with the reason. Rows are drawn first and lost afterwards, so the draw does not
  depend on which pictures could be fetched: `len(samples) + len(samples.lost)` is n.
- `pairs=True`: two expressions a picture, about two things whose boxes overlap by less than half (IoU).

Nothing here is redistributed: users load the data themselves, under the terms in `Benchmark.about`.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vrhlib import hub, store
from vrhlib.answers import read_metres
from vrhlib.boxes import Box, box_of_mask, encode_mask
from vrhlib.samples import Benchmark, Lost, Sample, Samples, StoredImage

# ---------------------------------------------------------------- prompts (the paper gives none)

LETTER = "Answer with the option's letter from the given choices directly."  # LLaVA-1.5's, and most harnesses' since
NUMBER = "Answer with a single number."  # lmms-eval, countbenchqa
LENGTH = "Answer with a number and a unit of length."  # ours: the official prompt leaves the form to a judge
DRAWN = "Each region is drawn on the picture as a box with its number."  # ours
WRITTEN = "Region [{}] is the box from ({:.0f}, {:.0f}) to ({:.0f}, {:.0f}) in pixels; the picture is {} x {}."  # ours

SPATIAL457_WORDS = {
    "size": ("small", "large"),
    "colour": ("gray", "blue", "purple", "brown", "green", "cyan", "red", "yellow"),
    "shape": (
        "airliner", "dirtbike", "road bike", "tandem bike", "suv", "wagon", "scooter", "mountain bike", "minivan",
        "sedan", "school bus", "fighter", "chopper", "double bus", "truck", "articulated bus", "cruiser", "jet",
        "utility bike", "regular bus", "biplane",
    ),
    "yes or no": ("yes", "no"),
    "count": tuple(map(str, range(11))),
}  # fmt: skip
# In our words; the steps, the words to choose from and the form of the reply are those of VLMEvalKit's prompt for
# L1_single (vlmeval/dataset/spatial457.py). The paper's Fig. A2 shows replies of that form.
SPATIAL457 = (
    "Look at the objects in the picture and answer the question.\n{question}\n\n"
    "First find the object that the question is about, its shape, color and size, and reason briefly. A size is one of "
    "{size}; a color is one of {colour}; a shape is one of {shape}.\n"
    "Then answer: with one of these words, with a whole number from 0 to 10 to 'How many' or 'What is the number of', "
    "with 'Yes' or 'No' to 'Is there'. If nothing seems to fit, choose what fits best.\n\n"
    "Write your response into this template: {{'Reasoning': '<your reasons>', 'Answer': '<your answer>'}}"
)
VAW_QUESTIONS = {  # VAW's type of attribute to question, in order of preference; the first is the paper's (Fig. A2)
    "color": "What color is the {}?",
    "material": "What material is the {} made of?",
    "pattern": "What pattern does the {} have?",
    "shape": "What shape is the {}?",
}

# ---------------------------------------------------------------- a table, and a row of it


class Unusable(ValueError):
    """A row that cannot become a sample; its words become the reason of a `Lost`."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """How one data set is read: `read` turns a `Row` into a `Sample`, or raises `Unusable`.

    `picture`: the column with the picture, or what fetches the picture's file for a row. `key`: what tells a row's
    picture from others (None: its bytes). `corners`: the referent's box as the table writes it; `box`: which four
    numbers those are, in pixels. `expressions`: the column with several texts for one thing. `keep`: whether a row
    belongs to what was chosen. `choose`: options with their values, the default first. `splits`: the table's own splits
    with their published number of rows, where they are used as they are.
    """

    like: str  # its name in the paper
    about: hub.Source
    read: Callable[[Row], Sample]
    family: Literal["grounding", "questions"] = "questions"
    picture: str | Callable[[Mapping], Path] = "image"
    key: Callable[[Mapping], str] | None = None
    corners: Callable[[Mapping], Sequence[float]] | None = None
    box: Literal["xywh", "xyxy"] = "xyxy"
    expressions: str | None = None
    keep: Callable[[Mapping, Mapping], bool] = lambda values, chosen: True
    choose: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    splits: Mapping[str, int] = field(default_factory=dict)
    open: Callable = hub.open_table
    max_new_tokens: int | None = None
    weights: Mapping[str, float] | None = None

    def written_box(self, values: Mapping) -> Box:
        """The referent's box in pixels, as written: not yet clipped to the picture."""
        four = [float(c) for c in self.corners(values)]
        if len(four) != 4 or not all(map(math.isfinite, four)):
            raise Unusable("no box of four numbers")
        x, y, *rest = four
        return Box(x, y, x + rest[0], y + rest[1]) if self.box == "xywh" else Box(*four)


@dataclass(frozen=True)
class Row:
    """A row on its way to a sample: its values by column, and what is known besides."""

    values: Mapping
    table: Table
    id: str
    image: StoredImage
    image_key: str
    which: int  # of several expressions
    chosen: Mapping[str, str]
    notes: Counter

    def __getitem__(self, column: str):
        return self.values[column]

    def sample(self, text: str, **facts) -> Sample:
        if not text.strip():
            raise Unusable("no text")
        known = {"id": self.id, "image": self.image, "image_key": self.image_key, "text": text.strip()}
        return Sample(**(known | facts))

    def box(self) -> Box:
        return self.clip(self.table.written_box(self.values))

    def clip(self, box: Box) -> Box:
        """The box inside the picture; up to one pixel beyond the far edges is how annotators count, and stays."""
        width, height = self.image.size
        inside = Box(max(box.x0, 0.0), max(box.y0, 0.0), min(box.x1, width), min(box.y1, height))
        if inside.x1 <= inside.x0 or inside.y1 <= inside.y0:
            raise Unusable("a box without area in the picture")
        if min(box.x0, box.y0) < 0 or box.x1 > width + 1 or box.y1 > height + 1:
            self.notes["boxes clipped to the picture"] += 1
            return inside
        return box


class Item(NamedTuple):
    """A row, or one of its expressions, before it is read; `base` is the row's id, `box` not yet clipped."""

    base: str
    row: int
    which: int
    key: str
    box: Box | None

    @property
    def id(self) -> str:
        return f"{self.base}-e{self.which}" if self.which else self.base


_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, SyntaxError)

# ---------------------------------------------------------------- drawing: the same for all


def _draw(
    name: str, table: Table, split: str, n: int | None, seed: int, *, held_out: int | None = None,
    split_by: str = "image", pairs: bool = False, allow_drift: bool = False, **given: str,
) -> Samples:  # fmt: skip
    chosen = {option: given.get(option, values[0]) for option, values in table.choose.items()}
    for option, values in {**table.choose, "split_by": ("image", "row")}.items():
        if (value := chosen.get(option, split_by)) not in values:
            raise store.unknown(option, value, values)
    about = replace(table.about, split=split, rows=table.splits[split]) if table.splits else table.about
    rows, origin = table.open(about, allow_drift)
    notes: Counter[str] = Counter()
    if len(rows) != about.rows:
        notes[f"rows in the table, where {about.rows} were published"] = len(rows)
    apart, pictures = not table.splits and split != "all", set()
    items = list(_items(table, rows, f"{name}-{about.split}", chosen, seed, keyed=apart or pairs))
    if not items:
        raise ValueError(f"None of the {len(rows)} rows of {origin} belongs to {name} {_written(chosen)}.")
    if apart:
        items, pictures = _part(name, items, split, seed, held_out, split_by)
    groups = _pairs(name, items, seed) if pairs else [[item] for item in items]
    drawn = _first(f"{name} {split}", groups, n, seed)
    made = list(_made(name, table, rows, drawn, chosen, notes, origin))
    made = list(_whole(made)) if pairs else made
    if split == "test" and split_by == "row":
        notes["on a picture that the detection rows show too"] = sum(
            not _lost(m) and m.image_key in pictures for m in made
        )
    if told := _written({option: value for option, value in chosen.items() if value != table.choose[option][0]}):
        origin = f"{origin}, {told}"
    return Samples(
        f"{name} pairs" if pairs else name, split, [m for m in made if not _lost(m)], origin,
        [m for m in made if _lost(m)], {note: count for note, count in notes.items() if count}, table.max_new_tokens,
    )  # fmt: skip


def _written(chosen: Mapping[str, str]) -> str:
    return ", ".join(f"{option}={value}" for option, value in chosen.items())


def _lost(made: Sample | Lost) -> bool:
    return isinstance(made, Lost)


def _whole(made: Sequence[Sample | Lost]) -> Iterator[Sample | Lost]:
    """Of a pair, both or neither."""
    for two in zip(made[::2], made[1::2]):
        broken = any(map(_lost, two))
        yield from (Lost(m.id, "the other one of its pair was lost") if broken and not _lost(m) else m for m in two)


def _items(table: Table, rows, prefix: str, chosen: Mapping, seed: int, keyed: bool) -> Iterator[Item]:
    """One item a row, or one an expression. A row that makes no sense here is one as well: its reader will say why."""
    pictures = rows.select_columns([table.picture]) if keyed and table.key is None else itertools.repeat({})
    for i, (values, picture) in enumerate(zip(_without_pictures(rows), pictures)):
        base, which, key, box = f"{prefix}-{i}", [0], "", None
        try:
            if not table.keep(values, chosen):
                continue
            if table.expressions:
                which = _which(len(values[table.expressions]), chosen["expression"], base, seed)
            key = _key(table, values | picture) if keyed else ""
            box = table.written_box(values) if table.corners else None
        except _MALFORMED:
            key = key or base
        yield from (Item(base, i, e, key, box) for e in which)


def _without_pictures(rows):
    features = getattr(rows, "features", {})  # a list has none
    names = [column for column, feature in features.items() if type(feature).__name__ == "Image"]
    return rows.remove_columns(names) if names else rows


def _which(count: int, expression: str, base: str, seed: int) -> list[int]:
    if expression == "all":
        return list(range(count)) or [0]
    return [int(store.digest([seed, base, "expression"]), 16) % count if expression == "random" and count else 0]


def _part(name: str, items: list[Item], split: str, seed: int, held_out: int | None, split_by: str):
    """The items of "detect" or "test", and the pictures of "detect"."""
    rows = {item.base for item in items}
    count = min(200, len(rows) // 2) if held_out is None else held_out
    if not 0 < count < len(rows):
        raise ValueError(
            f"held_out={count}: of the {len(rows)} rows of {name}, some must be held out and some left to test. Choose "
            f"held_out from 1 to {len(rows) - 1}."
        )
    held = set(sorted(rows, key=lambda base: store.digest([seed, base]))[:count])
    pictures = {item.key for item in items if item.base in held}
    if split == "detect":
        return [item for item in items if item.base in held], pictures
    rest = [item for item in items if (item.base not in held if split_by == "row" else item.key not in pictures)]
    if not rest:
        raise ValueError(f"All pictures of {name} are among those of {count} held-out rows: choose a smaller held_out.")
    return rest, pictures


def _pairs(name: str, items: list[Item], seed: int) -> list[list[Item]]:
    """For every picture that has them, two items about two different things, in the order of the table."""
    by_picture: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: store.digest([seed, item.id, "pair"])):
        if item.box:
            by_picture.setdefault(item.key, []).append(item)
    found = (
        next((two for two in itertools.combinations(mine, 2) if two[0].box.iou(two[1].box) < 0.5), None)
        for mine in by_picture.values()
    )
    pairs = sorted((sorted(two, key=lambda item: item.row) for two in found if two), key=lambda two: two[0].row)
    if not pairs:
        raise ValueError(f"No picture of {name} shows two things that are named here: there are no pairs in it.")
    return pairs


def _first(what: str, groups: list[list[Item]], n: int | None, seed: int) -> list[Item]:
    """n items, whole groups at a time, drawn by seed; in the order that they came in."""
    size, there = len(groups[0]) if groups else 1, sum(map(len, groups))
    if n is not None and n > there:
        more = ", or hold out more (held_out)" if what.endswith(" detect") else ""
        raise ValueError(f"n={n}: {what} has {there}. Ask for at most as many (n=None takes all){more}.")
    order = sorted(range(len(groups)), key=lambda g: store.digest([seed, groups[g][0].id, "n"]))
    return [item for g in sorted(order[: None if n is None else n // size]) for item in groups[g]]


def _made(name: str, table: Table, rows, items: list[Item], chosen, notes, origin: str) -> Iterator[Sample | Lost]:
    """A sample for each item, or why there is none."""
    fetched = callable(table.picture)
    files = _files(name, table, rows, items) if fetched else {}
    pictures = None if fetched else rows.select_columns([table.picture])

    @functools.lru_cache(1)  # the expressions of a row stand together
    def known(row: int) -> tuple[Mapping, str, StoredImage]:
        values = rows[row]
        key = _key(table, values)
        if fetched:
            return values, key, _from_file(files[key].result())
        return values, key, _from_table(pictures, table.picture, row, values, origin)

    for item in items:
        try:
            values, key, image = known(item.row)
            yield table.read(Row(values, table, item.id, image, key, item.which, chosen, notes))
        except hub.FileMissing as error:
            yield Lost(item.id, f"no picture: {error}")
        except Unusable as error:
            yield Lost(item.id, str(error))
        except _MALFORMED as error:
            yield Lost(item.id, f"a row that is not as expected: {type(error).__name__} {error}"[:120])


# ---------------------------------------------------------------- pictures

_UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # SyntaxError: a broken PNG


def _bytes(cell: Mapping | None) -> bytes:
    """A picture's file, out of a cell as `datasets` stores it: {"bytes": ..., "path": ...}."""
    if not cell or not cell["bytes"]:
        raise Unusable("no picture")
    return cell["bytes"]


def _key(table: Table, values: Mapping) -> str:
    return table.key(values) if table.key else f"bytes:{hashlib.sha256(_bytes(values[table.picture])).hexdigest()[:16]}"


def _from_table(pictures, column: str, row: int, values: Mapping, origin: str) -> StoredImage:
    """A picture inside the table, to be read anew from there. Here only its head is: whole pictures take minutes."""

    def read() -> Image.Image:
        try:
            image = Image.open(io.BytesIO(_bytes(pictures[row][column])))
            image.load()
        except _UNREADABLE as error:
            raise OSError(
                f"The picture in row {row} of {origin} cannot be read: {error}. Its file is damaged: fetch it anew."
            ) from error
        return image

    file = io.BytesIO(_bytes(values[column]))
    try:
        return StoredImage(read, Image.open(file).size)
    except _UNREADABLE as error:
        raise Unusable("a picture that cannot be read") from error


def _from_file(file: Path) -> StoredImage:
    try:
        with Image.open(file) as image:
            return StoredImage(functools.partial(Image.open, file), image.size)
    except _UNREADABLE as error:
        raise Unusable(f"a picture that cannot be read, in {file.parent}: delete it to fetch it again") from error


def _files(name: str, table: Table, rows, items: list[Item]) -> dict[str, Future]:
    """The pictures' files by image key; those that are not on this machine are fetched, eight at a time."""
    pool, waiting = ThreadPoolExecutor(8), {}
    try:
        for item in items:
            with suppress(*_MALFORMED):  # its reader will say why
                if (key := _key(table, values := rows[item.row])) not in waiting:
                    waiting[key] = pool.submit(table.picture, values)
        for key in store.progress(list(waiting), f"{name}: pictures"):
            waiting[key].exception()  # waits
        return waiting
    finally:
        pool.shutdown(cancel_futures=True)  # whoever interrupts this does not wait for the rest


# ---------------------------------------------------------------- readers: grounding


def _named(row: Row) -> Sample:
    """lmms-lab RefCOCO/+/g: a thing with a list of expressions (the column `question` asks for a caption, unused)."""
    return row.sample(_expression(row), box=row.box(), mask=_outline(row, row["segmentation"]))


def _expression(row: Row) -> str:
    expressions = row[row.table.expressions]
    if not expressions:
        raise Unusable("no text")
    return expressions[row.which]


def _outline(row: Row, flat: Sequence) -> dict | None:
    """Run lengths of a thing's outline. The mirrors keep one polygon: of a thing cut in two, one part."""
    from pycocotools import mask as coco

    polygons = flat if flat and isinstance(flat[0], Sequence) else [flat or []]
    polygons = [p for p in polygons if len(p) >= 6 and len(p) % 2 == 0]
    mask = encode_mask(polygons, row.image.size) if polygons else None
    if mask is None or not coco.area(mask):
        row.notes["without a mask: no outline in the table"] += 1
        return None
    return mask


def _coco_id(values: Mapping, column: str = "file_name") -> str:
    """The picture's number in COCO, 12 digits: COCO_train2014_000000296747_0.jpg is picture 000000296747."""
    found = re.search(r"\d{12}", values[column] or "")
    if not found:
        raise Unusable("a file name without the number of a COCO picture")
    return found[0]


def _captioned(row: Row) -> Sample:
    """jxu124's RefCOCO/+/g: a thing with a list of expressions. Its outline (in `raw_anns`) is not read."""
    return row.sample(_expression(row), box=row.box())


def _train2014(values: Mapping) -> Path:
    """The picture in COCO, under the name that it has there: COCO_train2014_000000580957.jpg."""
    file = _last(values, "image_path")
    return hub.fetch(file, ["coco/train2014"], [f"http://images.cocodataset.org/train2014/{file}"])


def _sentence(row: Row) -> Sample:
    """Kangheng's RefCOCO/+/g: one row a sentence."""
    return row.sample(row["question"], box=row.box())


def _place(row: Row, task: str = "locate") -> Sample:
    """RefSpatial-Bench: `object` is the phrase (`prompt` and `suffix` are RoboRefer's own way to ask for points). A
    place may be free space, whose tight box means nothing: points are judged by the mask alone."""
    file = io.BytesIO(_bytes(row["mask"]))
    try:
        mask = np.asarray(Image.open(file).convert("L")) > 0  # as RoboRefer; lmms-eval rounds, which moves the edges
    except _UNREADABLE as error:
        raise Unusable("a mask that cannot be read") from error
    if mask.shape != row.image.size[::-1]:
        raise Unusable("a mask of another size than its picture")
    if not mask.any():
        raise Unusable("an empty mask")
    box = None if task == "point" else box_of_mask(mask)
    steps = f"{row['step']} step" + "s" * (row["step"] != 1)
    return row.sample(row["object"], box=box, mask=encode_mask(mask, row.image.size), task=task, kind=steps)


def _asked(row: Row) -> Sample:
    """Toloka: a question whose answer is a thing in the picture."""
    if row.image.size != (row["width"], row["height"]):
        raise Unusable("a picture of another size than the table says")
    return row.sample(row["question"], box=row.box(), task="question")


def _toloka_picture(values: Mapping) -> Path:
    """By the table's address (its host was retired in 2025), else the picture of that name in COCO."""
    folders = ("train2017", "val2017", "test2017", "unlabeled2017")
    urls = [values["image"], *(f"http://images.cocodataset.org/{f}/{_last(values)}" for f in folders)]
    places = ["toloka_images", *(f"coco/{f}" for f in folders)]
    sums = store.ROOT / "data" / "local" / "toloka_images" / "images.sha256"
    known = _checksums(sums, sums.stat().st_mtime_ns) if sums.exists() else {}
    return hub.fetch(_last(values), places, urls, known.get(_last(values)))


def _last(values: Mapping, column: str = "image") -> str:
    return values[column].rsplit("/", 1)[-1]


@functools.lru_cache(1)
def _checksums(file: Path, changed: int) -> dict[str, str]:
    """File name to SHA-256, of a list that `sha256sum` wrote."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[-1].lstrip("*").rsplit("/", 1)[-1]: words[0].lower() for words in lines if len(words) == 2}


# ---------------------------------------------------------------- readers: questions


def _multiple(row: Row, text: str, choices: Sequence[str], letter: str, **facts) -> Sample:
    """A multiple-choice question; `choices` are the texts of A, B, C, ..., and `letter` is the right one."""
    texts = dict(zip(ascii_uppercase, map(str.strip, choices)))
    if letter not in texts:
        raise Unusable("an answer that is none of the options")
    chance = list(texts.values()).count(texts[letter]) / len(texts)
    return row.sample(
        f"{text.strip()}\n{LETTER}", answer=letter, choices=tuple(texts.values()), chance=chance, task="answer",
        rule="option", **facts,
    )  # fmt: skip


def _cv_bench(row: Row) -> Sample:
    return _multiple(row, row["prompt"], row["choices"], row["answer"].strip("() "), kind=row["source"])


def _mmstar(row: Row) -> Sample:
    choices = listed_options(row["question"])
    if not choices:
        row.notes["with options that were not found in the text: letters A to D"] += 1
        choices = ["A", "B", "C", "D"]
    return _multiple(row, row["question"], choices, row["answer"].strip(), kind=row["category"])


def listed_options(question: str) -> list[str]:
    """The texts of "Options: A: red, B: green", after the last "Options:" of a question; [] if there are not two."""
    _, marked, after = question.rpartition("Options:")
    for mark in (r":\s*", r"[.)]\s+"):
        found, at = [], 0
        for letter in ascii_uppercase:
            option = re.compile(rf"(?:^|(?<=[\s,;.]))\(?{letter}\s*{mark}").search(after, at)
            if not option:
                break
            found, at = [*found, option], option.end()
        if marked and len(found) > 1:
            ends = [*(option.start() for option in found[1:]), len(after)]
            return [after[option.end() : end].strip(" ,;\n") for option, end in zip(found, ends)]
    return []


def _math_vista(row: Row) -> Sample:
    """`query` is the official prompt; the right option is told by its text. A list as answer (2 rows) is lost."""
    kind, answer = row["metadata"]["task"], str(row["answer"]).strip()
    if row["question_type"] == "multi_choice":
        choices = [choice.strip() for choice in row["choices"]]
        letter = ascii_uppercase[choices.index(answer)] if answer in choices else ""
        if choices.count(answer) > 1:
            row.notes["with a right answer that stands twice among the options"] += 1
        return _multiple(row, row["query"], choices, letter, kind=kind)
    try:
        float(answer)
    except ValueError:
        raise Unusable("an answer that is not a number") from None
    return row.sample(f"{row['query'].strip()}\n{NUMBER}", answer=answer, kind=kind, task="answer", rule="number")


def _count(row: Row) -> Sample:
    """CountBenchQA, without the caption `text`, which holds the count. Counts run from 2 to 10."""
    text, answer = f"{row['question'].strip()}\n{NUMBER}", str(int(row["number"]))
    return row.sample(text, answer=answer, chance=1 / 9, task="answer", rule="count")


def _spatial457(row: Row) -> Sample:
    answer = row["answer"].strip()
    said = {"true": "yes", "false": "no"}.get(answer.casefold(), answer.casefold())
    kind = next((kind for kind, words in SPATIAL457_WORDS.items() if said in words), "other")
    choices = SPATIAL457_WORDS.get(kind, ())
    words = {kind: ", ".join(f"'{word}'" for word in words) for kind, words in SPATIAL457_WORDS.items()}
    return row.sample(
        SPATIAL457.format(question=row["question"].strip(), **words), answer=answer, choices=choices, kind=kind,
        chance=1 / len(choices) if choices else None, task="answer", rule="exact",
    )  # fmt: skip


SIZES = ("width_data", "height_data")
DISTANCES = ("distance_data", "horizontal_distance_data", "vertical_distance_data")  # "direction" is no length
_REGION = re.compile(r"Region \[(\d+)\]")


def _literal(cell):
    """A nested cell; some copies of the table hold the text that Python prints for it."""
    return ast.literal_eval(cell) if isinstance(cell, str) else cell


def _is_length(values: Mapping, chosen: Mapping) -> bool:
    wanted = SIZES if chosen["subset"] == "size" else SIZES + DISTANCES
    return _literal(values["qa_info"])["category"] in wanted


def _region(row: Row) -> Sample:
    """SpatialRGPT-Bench: how wide, high or far apart regions are. The box kept is that of the first one in the text."""
    regions = [row.clip(Box(*map(float, corners))) for corners in _literal(row["bbox"])]
    asked = [int(i) for i in _REGION.findall(row["text_q"])]
    if not asked or max(asked) >= len(regions):
        raise Unusable("a question about a region that is not given")
    metres = read_metres(_literal(row["conversations"])[1]["value"])
    if metres is None:
        raise Unusable("no length in the answer")
    image, told = row.image, DRAWN
    if row.chosen["regions"] == "drawn":
        image = StoredImage(functools.partial(draw_regions, row.image, regions), row.image.size)
    else:
        told = "\n".join(WRITTEN.format(i, *region, *row.image.size) for i, region in enumerate(regions))
    kind = _literal(row["qa_info"])["category"].removesuffix("_data")
    return row.sample(
        f"{row['text_q'].strip()}\n{told}\n{LENGTH}", image=image, box=regions[asked[0]], answer=f"{metres:.6g}",
        kind=kind, task="answer", rule="length",
    )  # fmt: skip


REGION_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")  # Okabe-Ito, those that white letters can be read on


def draw_regions(picture: StoredImage | Image.Image, regions: Sequence[Box]) -> Image.Image:
    """A copy of the picture with each region framed and numbered as in the text: [0], [1], ...

    Lines and letters grow with the picture; frames have a white line inside, and no number covers another one.
    """
    image = picture.convert("RGB")
    draw, side = ImageDraw.Draw(image), min(image.size)
    line, font = max(2, round(side / 200)), ImageFont.load_default(size=max(14, round(side / 24)))
    right, bottom = image.width - 1, image.height - 1
    for region, colour in zip(regions, itertools.cycle(REGION_COLOURS)):
        corners = min(region.x0, right), min(region.y0, bottom), min(region.x1, right), min(region.y1, bottom)
        draw.rectangle(corners, outline="white", width=line + 2)
        draw.rectangle(corners, outline=colour, width=line)
    taken: list[Box] = []
    for i, (region, colour) in enumerate(zip(regions, itertools.cycle(REGION_COLOURS))):
        _, top, width, low = draw.textbbox((0, 0), f"[{i}]", font=font)
        height = low - top
        places = [(x, y) for y in (region.y0 - height, region.y0, region.y1 - height, region.y1)
                  for x in (region.x0, region.x1 - width)]  # fmt: skip
        places = [(min(max(x, 0), right - width), min(max(y, 0), bottom - height)) for x, y in places]
        labels = [Box(x, y, x + width, y + height) for x, y in places]
        label = next((mine for mine in labels if not any(mine.iou(other) for other in taken)), labels[0])
        draw.rectangle(label, fill=colour)
        draw.text((label.x0, label.y0 - top), f"[{i}]", fill="white", font=font)
        taken.append(label)
    return image


# ---------------------------------------------------------------- VAW-MCQ: ours


def _open_vaw(about: hub.Source, allow_drift: bool) -> tuple[list[dict], str]:
    """The instances of VAW's test set, each with the question that can be asked about it, if there is one.

    Ours, not the paper's, whose 6,309 questions are unpublished. Asked about is a thing whose name stands once in its
    picture (as far as VAW knows) and that has exactly one attribute of a type. Wrong options are three of the thing's
    *explicit* negative attributes of that type: what VAW leaves unlabelled may be true. One question a thing, of the
    first type that offers one; which negatives, and their order, follow from the digest of the thing and the option.
    """
    instances, types = (_vaw_file(about, name) for name in (f"{about.split}.json", "attribute_types.json"))
    of_type: dict[str, str] = {}
    for kind, attributes in types.items():
        for attribute in attributes:
            of_type.setdefault(attribute, kind)  # the first, as in VAW's evaluator
    columns = list(instances[0]) if instances else []
    hub.check(about, "VAW", columns, len(instances), f"commit {about.revision[:12]}", allow_drift)
    named = Counter((str(i["image_id"]), i["object_name"]) for i in instances)
    once = (named[str(i["image_id"]), i["object_name"]] == 1 for i in instances)
    rows = [i | {"asked": _vaw_options(i, of_type) if single else None} for i, single in zip(instances, once)]
    return rows, f"github.com/adobe-research/vaw_dataset@{about.revision[:12]} {about.split}"


def _vaw_options(instance: Mapping, of_type: Mapping[str, str]) -> tuple[str, str, list[str]] | None:
    """The type asked about, the right option, and all four in the order of A to D."""
    for kind in VAW_QUESTIONS:
        right, wrong = (
            [a for a in dict.fromkeys(instance[f"{sign}_attributes"] or ()) if of_type.get(a) == kind]
            for sign in ("positive", "negative")
        )
        order = functools.partial(_vaw_order, str(instance["instance_id"]))
        if len(right) == 1 and len(wrong := sorted(set(wrong) - set(right), key=order)) >= 3:
            return kind, right[0], sorted([*right, *wrong[:3]], key=order)
    return None


def _vaw_order(instance: str, option: str) -> str:
    return store.digest(["vaw-mcq", instance, option])


def _vaw_file(about: hub.Source, name: str):
    base = "https://raw.githubusercontent.com/adobe-research/vaw_dataset"
    try:
        file = hub.fetch(name, ["vaw_dataset/data"], [f"{base}/{about.revision}/data/{name}"])
    except hub.FileMissing as error:
        raise OSError(
            f"VAW's {name} cannot be had: {error}. Clone github.com/adobe-research/vaw_dataset to "
            f"{store.ROOT / 'data' / 'local' / 'vaw_dataset'}."
        ) from error
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}). Delete it to fetch it again.") from error


def _vaw(row: Row) -> Sample:
    kind, right, options = row["asked"]
    lines = [VAW_QUESTIONS[kind].format(row["object_name"])]
    lines += [f"{letter}. {option}" for letter, option in zip(ascii_uppercase, options)]
    letter = ascii_uppercase[options.index(right)]
    return _multiple(row, "\n".join(lines), options, letter, box=row.box(), kind=kind)


def _vaw_picture(values: Mapping) -> Path:
    folders = ("VG_100K", "VG_100K_2")
    file = f"{values['image_id']}.jpg"
    urls = [f"https://cs.stanford.edu/people/rak248/{folder}/{file}" for folder in folders]
    return hub.fetch(file, [f"visual_genome/{folder}" for folder in folders], urls)


# ---------------------------------------------------------------- the table of benchmarks

_BOX = "share of boxes with IoU >= 0.5"
_EXPRESSION = {"expression": ("first", "all", "random")}
_COCO = "COCO pictures (Flickr terms), annotations for research; the mirror states none"


def _source(name: str, split: str, rows: int, columns: str, gb: float, licence: str, metric: str, **more) -> hub.Source:
    return hub.Source(tuple(name.split()), split, rows, tuple(columns.split()), gb, licence, metric, **more)


def _lmms(like: str, name: str, rows: int, gb: float, revision: str) -> Table:
    """The paper's grounding data: one row a thing, with a list of expressions; which one the paper used is not stated.

    In RefCOCO and RefCOCOg this "val" is not the official one: it unites the UNC (UMD) and Google validation sets
    (3,811 + 5,000 rows; 2,573 + 5,000), whose training sets overlap it. That of RefCOCO+ is the official one.
    """
    ids = f"lmms-lab/{name} lmms-lab-encoder/{name}"  # moved in July 2026
    about = _source(ids, "val", rows, "image answer segmentation bbox file_name", gb, _COCO, _BOX, revision=revision)
    return Table(
        like=like, about=about, read=_named, family="grounding", key=_coco_id, corners=lambda v: v["bbox"], box="xywh",
        expressions="answer", choose=_EXPRESSION,
    )  # fmt: skip


def _official(like: str, name: str, gb: float, splits: Mapping[str, int]) -> Table:
    """The official UNC and UMD splits, one row a sentence: those of the published accuracies. (`datasets` fetches all
    splits of a repository, and that of RefCOCO has a train split, too.)"""
    about = _source(f"Kangheng/{name}", "val", splits["val"], "image question bbox", gb, _COCO, _BOX)
    return Table(
        like=like, about=about, read=_sentence, family="grounding", corners=lambda v: json.loads(v["bbox"]),
        splits=splits,
    )  # fmt: skip


def _training(like: str, name: str, rows: int) -> Table:
    """The UNC and UMD training splits, one row a thing with a list of expressions, for training and nothing else.

    `bbox` is x0, y0, x1, y1 here (`raw_anns` keeps x, y, width, height). Only "train" is read; beware of `test`, it is
    testA in RefCOCO and RefCOCO+. Pictures are not in the table. Some of them stand in the tables of `_lmms` as well
    (Google's validation sets, and those of the other two): `benchmarks.apart` leaves them out, by number.
    """
    about = _source(
        f"jxu124/{name}", "train", rows, "image_path captions bbox", 0.04, _COCO, _BOX,
        needs="pictures: fetched from COCO, one by one "
        "(13 GB if all of train2014 is kept in data/local/coco/train2014)",
    )  # fmt: skip
    return Table(
        like=like, about=about, read=_captioned, family="grounding", picture=_train2014,
        key=functools.partial(_coco_id, column="image_path"), corners=lambda v: v["bbox"], expressions="captions",
        choose=_EXPRESSION, splits={"train": rows},
    )  # fmt: skip


_REFSPATIAL = _source(
    "BAAI/RefSpatial-Bench", "location", 100, "image mask object step", 0.05, "Apache-2.0",
    "share of boxes with IoU >= 0.5 to the mask's tight box (officially: of points in the mask)",
)  # fmt: skip
_TABLES = {
    "refcoco": _lmms("RefCOCO", "RefCOCO", 8811, 2.3, "a5dff0b3194715fda69b2d6a0d2aaafb41eaa407"),
    "refcoco+": _lmms("RefCOCO+", "RefCOCOplus", 3805, 0.6, "6ff10a221309bc4791d1ff7d57f8bbcb509b9e9d"),
    "refcocog": _lmms("RefCOCOg", "RefCOCOg", 7573, 2.1, "93af55545967808285637a67431e4971a6f9fd49"),
    "refcoco-unc": _official("RefCOCO, UNC", "refcoco", 10.0, {"val": 10834, "testA": 5657, "testB": 5095}),
    "refcoco+-unc": _official("RefCOCO+, UNC", "refcocop", 1.6, {"val": 10758, "testA": 5726, "testB": 4889}),
    "refcocog-umd": _official("RefCOCOg, UMD", "refcocog", 1.1, {"val": 4896, "test": 9602}),
    "refcoco-train": _training("RefCOCO, train", "refcoco", 42404),
    "refcoco+-train": _training("RefCOCO+, train", "refcocoplus", 42278),
    "refcocog-train": _training("RefCOCOg, train", "refcocog", 42226),
    "refspatial": Table(like="RefSpatialBench", about=_REFSPATIAL, read=_place, family="grounding"),
    "refspatial-points": Table(
        like="RefSpatial-Bench, points", about=_REFSPATIAL, read=functools.partial(_place, task="point"),
        family="grounding", splits={"location": 100, "placement": 100, "unseen": 77},
    ),
    "toloka": Table(
        like="Toloka VQA",
        about=_source(
            "toloka/WSDMCup2023", "test_public", 1705, "image width height left top right bottom question", 0.3,
            "CC-BY-4.0", f"{_BOX} (officially: mean IoU)", config="default",
            needs="pictures: fetched from COCO, one by one",
        ),
        read=_asked, family="grounding", picture=_toloka_picture, key=lambda v: _last(v).split(".")[0],
        corners=lambda v: [v[side] for side in ("left", "top", "right", "bottom")],
    ),
    "vaw-mcq": Table(
        like="VAW-MCQ (ours)",
        about=_source(
            "", "test", 31819,
            "image_id instance_id instance_bbox object_name positive_attributes negative_attributes", 1.0,
            "Adobe Research, non-commercial", "accuracy", revision="3a4ebffc5e8194d19a77f51d846c2cd47c477d13",
            needs="github.com/adobe-research/vaw_dataset, and pictures: fetched from Visual Genome, one by one",
        ),
        read=_vaw, picture=_vaw_picture, key=lambda v: str(v["image_id"]), corners=lambda v: v["instance_bbox"],
        box="xywh", keep=lambda v, _: v["asked"] is not None, open=_open_vaw,
    ),
    "spatial457": Table(
        like="Spatial457 L1",
        about=_source(
            "RyanWW/Spatial457-v2", "validation", 670, "image image_filename question answer", 0.2, "Apache-2.0",
            "exact match, strict (VLMEvalKit's is lenient)", config="L1_single",
            revision="ba7fdc51bc00a137a6730a799845845f6e0afda9",
        ),
        read=_spatial457, key=lambda v: v["image_filename"], max_new_tokens=512,
    ),
    "spatialrgpt": Table(
        like="SpatialRGPT-Bench",
        about=_source(
            "a8cheng/SpatialRGPT-Bench", "val", 1406, "image text_q qa_info conversations bbox", 1.0,
            "Apache-2.0; nuScenes, KITTI and Omni3D pictures non-commercial",
            "share within 25 % of the true length (officially read from the reply by GPT-4)",
        ),
        read=_region, keep=_is_length, choose={"subset": ("size", "quantitative"), "regions": ("drawn", "text")},
    ),
    "cv-bench": Table(
        like="CV-Bench",
        about=_source(
            "nyu-visionx/CV-Bench", "test", 2638, "image prompt choices answer source filename source_filename", 0.4,
            "Apache-2.0", "accuracy, plain mean (officially: mean of 2D, itself of ADE20K and COCO, and 3D)",
            config="default", revision="bc284db50d036958861cb60cdd7b77612052ce0d",
        ),
        read=_cv_bench, key=lambda v: v["source_filename"] or v["filename"],
        weights={"ADE20K": 0.25, "COCO": 0.25, "Omni3D": 0.5},
    ),
    "mmstar": Table(
        like="MMStar",
        about=_source(
            "Lin-Chen/MMStar", "val", 1500, "image question answer category", 0.05, "not stated", "accuracy",
            config="val", revision="bc98d668301da7b14f648724866e57302778ab27",
        ),
        read=_mmstar,
    ),
    "countbenchqa": Table(
        like="CountBenchQA",
        about=_source(
            "vikhyatk/CountBenchQA", "test", 491, "image question number", 0.03, "not stated", "accuracy",
            revision="76d600309e9d6147bd3713b4cd431518ac1206c8",
        ),
        read=_count,
    ),
    "mathvista": Table(
        like="MathVista",
        about=_source(
            "AI4Math/MathVista", "testmini", 1000,
            "decoded_image query choices answer question_type metadata", 0.9, "CC-BY-SA-4.0",
            "accuracy (officially read from the reply by GPT-4)", revision="2b6ad69445fbb5695c9b165475e8decdbeb97747",
        ),
        read=_math_vista, picture="decoded_image", choose={"subset": ("multi_choice", "all")},
        keep=lambda v, chosen: chosen["subset"] in (v["question_type"], "all"),
    ),
}  # fmt: skip


def _benchmark(name: str, table: Table) -> Benchmark:
    several = table.expressions is not None or bool(table.splits)  # rows of one picture
    pairs = table.corners is not None and several
    options = ["allow_drift", *table.choose, *["held_out", "split_by"] * (not table.splits), *["pairs"] * pairs]
    splits = tuple(table.splits) or ("all", "detect", "test")
    draw = functools.partial(_draw, name, table)
    return Benchmark(name, "paper", table.family, table.like, draw, splits, tuple(options), table.weights, table.about)


BENCHMARKS = {name: _benchmark(name, table) for name, table in _TABLES.items()}
