"""The kinds of data that earlier methods found their heads on, drawn by seed: nothing to download, no licence to ask.

    needle-text     one sentence hidden in pages of text (Retrieval Heads, arXiv 2404.15574; QRHead, 2506.09944)
    word-pictures   a picture of signs with a word on each (OCR Heads, 2505.15865)
    pages           a page of a document, a line of which answers the question (VERA, 2602.10146; SparseMM)

None is the data of those papers: it is of their kind, in a size that is an option. Boxes are tight: the ink of the
text touches all four sides. Pictures are painted when they are read; DejaVu Sans comes with matplotlib.
"""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vrhlib import store
from vrhlib.boxes import Box
from vrhlib.samples import Benchmark, Sample, Samples, StoredImage

SPLITS = {"detect": 1, "test": 2}  # first word of a seed: the splits share no picture and no text
Rng = np.random.Generator
Size = tuple[int, int]  # (width, height) in pixels

# ---------------------------------------------------------------- text that says nothing of what is asked

SLOTS = {slot: tuple(words.split("; ")) for slot, words in {
    "who": "the baker; the young teacher; a neighbour; the gardener; the tailor; her brother; the old farmer; "
    "the cook; a student; the postman; his cousin; a carpenter; the painter; the driver; the shepherd; the fisherman",
    "friend": "Anna; Martin; Clara; Thomas; Julia; Peter; Helen; Robert; Maria; Simon; Edith; Oscar; Laura; Victor",
    "thing": "a basket of apples; a wooden chair; an old bicycle; a loaf of bread; a pair of boots; a woollen coat; "
    "a bottle of milk; a bunch of flowers; a broken umbrella; a bag of flour; a clay pot; a tin of paint; a long rope; "
    "a straw hat; a jar of honey; a silver spoon; a stack of plates; a small guitar",
    "place": "in the market; near the river; beside the bridge; in the garden; at the station; behind the church; "
    "by the lake; at the corner of the square; in the valley; outside the bakery; on the hill; in the orchard; "
    "close to the mill; at the edge of the forest; in the courtyard",
    "when": "in the morning; after lunch; before sunset; on Monday; late in the evening; one summer; at noon; "
    "on a rainy afternoon; early in spring; on the first day of May; last winter; that Sunday; after the storm",
    "adjective": "quiet; cheerful; tired; curious; patient; hungry; careful; proud; gentle; busy; nervous; polite",
    "sky": "clear; cloudy; bright; dark; misty; warm; cold; windy; mild; fine",
    "animal": "a dog; a grey cat; a flock of birds; two horses; a fox; three ducks; a rabbit; an owl; some sheep",
    "work": "repair the fence; sweep the floor; cook a soup; learn a song; clean the windows; water the plants; "
    "carry the wood; wash the dishes; feed the hens; build a shed; bake a cake; mend the shirts",
}.items()}  # fmt: skip
TEMPLATES = tuple("""
{who} carried {thing} home {when}.|{friend} met {who} {place} {when}.|{when}, {who} sold {thing} to {friend}.
{who} wanted to {work}, but the day was too short.|the morning was {sky}, and nobody was {place}.
{friend} looked for {thing} {place}, and found {animal}.|{animal} slept {place} while {who} began to {work}.
{who} and {friend} talked about the weather {place}.|it was {sky} {when}, so {friend} stayed at home to {work}.
{friend} had promised {who} to {work} {when}.|{when}, {animal} came into view {place}.|{who} lost {thing} {place}.
the day was {sky}, and {who} felt {adjective}.|{friend} was {adjective} because {who} had forgotten {thing}.
{who} laughed when {animal} ran away with a sandwich.|{friend} bought {thing} as a present for {who}.
a {adjective} crowd waited {place} {when}.|{who} drew {animal} with a piece of chalk.|{friend} sat {place} and read.
nothing much happened {place} {when}.|{who} asked {friend} to {work} before dinner.|{friend} always liked to {work}.
the wind grew stronger, and {animal} hid {place}.|{when}, the weather {place} was {sky}.|{who} slept until noon.
{friend} poured tea for {who}, who was {adjective} and a little late.|{who} tried to {work} without any help.
the train was late {when}, so {who} walked home with {friend}.|{friend} heard music {place} and stopped to listen.
{who} put {thing} on the table and went out to {work}.|{when}, {friend} and {who} played cards {place}.
{who} told a long story about {animal}.|{friend} would rather {work} than wait {place}.
{thing} stood {place} for days, and no one missed it.|{who} opened the door and saw {animal} {place}.
the children {place} were {adjective}, and {friend} sang with them {when}.|{who} returned {when} with {thing}.
""".replace("\n", "|").strip("|").split("|"))  # fmt: skip


def sentence(rng: Rng) -> str:
    """An English sentence of 5 to 20 words, from `TEMPLATES` and `SLOTS`; it holds no number in digits."""
    draws = rng.integers(1 << 30, size=len(SLOTS) + 1)
    chosen = {slot: words[draw % len(words)] for (slot, words), draw in zip(SLOTS.items(), draws)}
    made = TEMPLATES[draws[-1] % len(TEMPLATES)].format(**chosen)
    return made[0].upper() + made[1:]


# ---------------------------------------------------------------- a needle in a text

OWNERS = (
    "lighthouse keeper; night watchman; retired pilot; chess champion; opera singer; museum director; "
    "mountain guide; circus juggler; royal astronomer; submarine captain; beekeeper; ambassador"
).split("; ")
HIDING = (
    "on the back of a green map; under the lid of a piano; inside a brass compass; on the sole of a ballet shoe; "
    "in the margin of an atlas; behind a portrait of an admiral; on the label of a violin; "
    "under the saddle of a bronze statue; inside a marble clock; on the handle of a telescope"
).split("; ")
_VERBATIM = "Answer with the sentence of the text that says so, word for word."


def _needle(name: str, key: tuple[int, ...], words: Sequence[int], depths: int) -> Sample:
    """Lengths and depths take turns, so that every pair of them comes once in len(words) * depths samples."""
    rng, i = np.random.default_rng((*key, 31)), key[-1]
    depth = (i + i // math.lcm(len(words), depths)) % depths / max(1, depths - 1)
    owner, number = OWNERS[rng.integers(len(OWNERS))], str(rng.integers(10_000, 100_000))
    fact = f"The secret number of the {owner} is {number}, and it is written {HIDING[rng.integers(len(HIDING))]}."
    context, span = _hidden(fact, _filler(rng, words[i % len(words)] - len(fact.split())), depth)
    question = f"What is the secret number of the {owner}, and where is it written? {_VERBATIM}"
    return Sample(name, None, store.digest(context), question, answer=number, kind="needle", task="answer",
                  rule="count", context=context, span=span)  # fmt: skip


def _filler(rng: Rng, words: int) -> list[str]:
    """Sentences of at least so many words together, none of them twice."""
    made: dict[str, int] = {}
    while sum(made.values()) < words:
        said = sentence(rng)
        made[said] = len(said.split())
    return list(made)


def _hidden(needle: str, filler: list[str], depth: float) -> tuple[str, tuple[int, int]]:
    """A text of paragraphs of six sentences with the needle after a share `depth` (0 to 1) of the filler, and the
    characters (start, stop) of the needle."""
    place = round(depth * len(filler))
    said = [*filler[:place], needle, *filler[place:]]
    parts = [text + ("\n\n" if i % 6 == 5 else " ") for i, text in enumerate(said)]
    start = sum(map(len, parts[:place]))
    return "".join(parts).rstrip(), (start, start + len(needle))


# ---------------------------------------------------------------- written text and its ink


@dataclass(frozen=True)
class Written:
    """A text on a picture: its origin (x, y) and its font's height in pixels."""

    text: str
    at: tuple[int, int]
    height: int
    bold: bool = False

    @property
    def box(self) -> Box:
        """Of the ink, in pixels of the picture, half-open."""
        x0, y0, x1, y1 = _ink(self.text, self.height, self.bold)
        return Box(*map(float, (self.at[0] + x0, self.at[1] + y0, self.at[0] + x1, self.at[1] + y1)))

    def paint(self, canvas: ImageDraw.ImageDraw, colour: str | tuple[int, int, int]) -> None:
        canvas.text(self.at, self.text, colour, font=_font(self.height, self.bold))


@functools.cache
def _font(height: int, bold: bool) -> ImageFont.FreeTypeFont:
    file = Path(matplotlib.get_data_path()) / "fonts/ttf" / ("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf")
    return ImageFont.truetype(file, height, layout_engine=ImageFont.Layout.BASIC)  # the same on every machine


@functools.lru_cache(4096)
def _ink(text: str, height: int, bold: bool) -> tuple[int, int, int, int]:
    """Where the ink of a text lies, from its origin. (`textbbox` also counts the space to the next letter.)"""
    reach, edge = _font(height, bold).getbbox(text), 4
    picture = Image.new("L", (int(reach[2]) + 2 * edge, int(reach[3]) + 2 * edge))
    ImageDraw.Draw(picture).text((edge, edge), text, 255, font=_font(height, bold))
    return tuple(side - edge for side in picture.getbbox())


# ---------------------------------------------------------------- signs with a word on each

PLATES = {
    "red": (200, 30, 35), "green": (30, 130, 55), "blue": (35, 75, 200), "yellow": (245, 215, 50),
    "purple": (125, 50, 165), "orange": (245, 135, 30), "pink": (250, 165, 195), "brown": (115, 70, 35),
    "black": (20, 20, 20), "white": (255, 255, 255),
}  # fmt: skip
WALLS = ((214, 222, 226), (226, 220, 204), (208, 222, 208), (220, 212, 224))
WORDS = tuple("""
anchor apple arrow badge banana barrel basket beach bell bench bird blanket boat book bottle bowl branch bread bridge
broom bucket butter cabin cactus camel camera candle canoe carpet carrot castle chair cheese cherry chimney cloud coat
collar cotton cradle crown curtain daisy desert donkey door dragon drum eagle engine farmer feather fence ferry finger
flag flute forest fountain garden garlic giraffe glove guitar hammer harbour helmet honey horse hotel island jacket
kettle kitchen ladder lamp lemon lion lizard market melon mirror monkey moon museum needle ocean onion owl paddle
palace paper parrot peach pencil pepper piano pillow pirate planet pocket potato pumpkin rabbit radio ribbon river
robot rocket roof rope saddle sailor salad school shadow shell shirt snow spoon station stone storm sugar table temple
ticket tiger tomato tower train trumpet tunnel turtle valley village violin wagon wallet water whale wheel window
winter wolf zebra statue sword towel tractor uniform vase wizard
""".split())  # fmt: skip
_GAP, _PAD = 8, 14  # pixels between signs and to the edge, and of a plate around its word


def signs(key: tuple[int, ...], size: Size) -> dict[str, Written]:
    """Five to nine words by the colour of their signs, which don't touch; ValueError where the size has no room."""
    rng = np.random.default_rng((*key, 41))
    n = int(rng.integers(5, 10))
    words, colours = rng.permutation(WORDS)[:n].tolist(), rng.permutation([*PLATES])[:n].tolist()
    heights = rng.integers(20, 37, size=n).tolist()
    for _ in range(30):
        made: list[Written] = []
        for word, height in zip(words, heights):
            if placed := _free_place(rng, word, height, made, size):
                made.append(placed)
        if len(made) == n:
            return dict(zip(colours, made))
    raise ValueError(f"size={size}: no room for {n} signs. Ask for a larger picture.")


def _free_place(rng: Rng, word: str, height: int, made: list[Written], size: Size) -> Written | None:
    """The word at a random place whose sign touches no other; None after a hundred tries."""
    start, stop = np.array(_ink(word, height, True)).reshape(2, 2)
    edge = _PAD + _GAP
    if (stop - start + 2 * edge > size).any():
        return None
    for _ in range(100):
        at = rng.integers(edge - start, size - stop - edge + 1)
        placed = Written(word, (int(at[0]), int(at[1])), height, bold=True)
        if not any(_near(placed.box, other.box, edge + _PAD) for other in made):
            return placed
    return None


def _near(a: Box, b: Box, gap: int) -> bool:
    return a.x0 < b.x1 + gap and b.x0 < a.x1 + gap and a.y0 < b.y1 + gap and b.y0 < a.y1 + gap


def _paint_signs(shown: dict[str, Written], wall: tuple[int, int, int], size: Size) -> Image.Image:
    picture = Image.new("RGB", size, wall)
    canvas = ImageDraw.Draw(picture)
    for colour, word in shown.items():
        (x0, y0, x1, y1), face = word.box, PLATES[colour]
        canvas.rounded_rectangle((x0 - _PAD, y0 - _PAD, x1 + _PAD - 1, y1 + _PAD - 1), 8, face, (60, 60, 60), 2)
        word.paint(canvas, "white" if np.dot(face, (0.3, 0.59, 0.11)) < 128 else "black")
    return picture


def _word_picture(name: str, key: tuple[int, ...], size: Size) -> Sample:
    shown, rng = signs(key, size), np.random.default_rng((*key, 42))
    wall, colour = WALLS[rng.integers(len(WALLS))], [*shown][rng.integers(len(shown))]
    image = StoredImage(functools.partial(_paint_signs, shown, wall, size), size)
    asked, words = shown[colour], [word.text for word in shown.values()]
    question = f"What is written on the {colour} sign? Answer with that word."
    return _seen(name, image, store.digest(["signs", key, size]), question, asked, asked.text, words, "sign")


def _seen(name: str, image: StoredImage, image_key: str, question: str, line: Written, answer: str,
          others: Sequence[str], kind: str) -> Sample:  # fmt: skip
    """A question about a line; `others` are the answers of all lines like it: a reply must name the right one alone."""
    return Sample(name, image, image_key, question, line.box, answer=answer, choices=tuple(others), kind=kind,
                  chance=1 / len(others), task="answer", rule="choice")  # fmt: skip


# ---------------------------------------------------------------- pages of a document

ENTRIES = {
    "invoice": ("Invoice {} was paid by the {}.", "Who paid invoice {}?"),
    "parcel": ("Parcel {} was sent by the {}.", "Who sent parcel {}?"),
    "permit": ("Permit {} was signed by the {}.", "Who signed permit {}?"),
}
PAYERS = tuple(
    f"{place} {body}"
    for place in "harbour castle railway museum theatre airport cathedral stadium university hospital prison".split()
    for body in "office council library workshop committee laboratory".split()
)
HEADINGS = ("Weather", "Visitors", "Neighbours", "Work in hand", "Lost and found", "A walk", "Letters", "Animals",
            "The week", "Small events", "Journeys", "Remarks")  # fmt: skip


@dataclass(frozen=True)
class Page:
    """All lines of a page from top to bottom, and those that are entries as (number, who, line)."""

    kind: str
    lines: list[Written]
    entries: list[tuple[int, str, Written]]


def page(key: tuple[int, ...], size: Size, lines: int) -> Page:
    """A page of so many lines: sections of six or more with a heading, prose, and one entry of one line inside it.

    All entries are of one kind and look like prose, so the evidence is found by reading. Letters are 1/50 of the width
    high, 14 pixels or more. ValueError where the size has no room.
    """
    rng = np.random.default_rng((*key, 51))
    text, margin, sections = max(14, size[0] // 50), size[0] // 14, lines // 6
    pitch = text * 3 // 2
    chars = int((size[0] - 2 * margin) / (0.57 * text))  # a letter is 0.51 of the height wide, 0.56 in the widest lines
    if lines > (most := _most_lines(size[1] - 2 * margin, pitch, chars)):
        raise ValueError(f"lines={lines}: a page of {size[0]} x {size[1]} holds {most}. Ask for fewer, or more room.")
    kind = [*ENTRIES][rng.integers(len(ENTRIES))]
    numbers = 1000 + rng.choice(9000, sections, replace=False)
    made, y, first = Page(kind, [], []), margin, int(rng.integers(len(HEADINGS)))
    for j, who in enumerate(rng.permutation(PAYERS)[:sections].tolist()):
        prose = lines // sections + (j < lines % sections) - 2
        before = int(rng.integers(1, prose))
        said = [f"{j + 1}. {HEADINGS[(first + j) % len(HEADINGS)]}", *_paragraph(rng, before, chars),
                ENTRIES[kind][0].format(numbers[j], who), *_paragraph(rng, prose - before, chars)]  # fmt: skip
        placed = [Written(line, (margin, y + i * pitch), text, bold=not i) for i, line in enumerate(said)]
        made.lines.extend(placed)
        made.entries.append((int(numbers[j]), who, placed[1 + before]))
        y += len(said) * pitch + pitch // 2
    return made


def _most_lines(height: int, pitch: int, chars: int) -> int:
    """How many lines fit, with half a line after each six; 0 where the longest entry does not fit into one."""
    longest = max(len(said.format(1000, who)) for said, _ in ENTRIES.values() for who in PAYERS)
    return min(height * 12 // (pitch * 13), 6 * len(PAYERS)) if longest <= chars else 0


def _paragraph(rng: Rng, lines: int, chars: int) -> list[str]:
    """Sentences that fill exactly so many lines; one that would overflow is drawn again."""
    filled: list[str] = []
    while len(filled) < lines:
        tried = textwrap.wrap(" ".join([*filled, sentence(rng)]), chars)
        filled = tried if len(tried) <= lines else filled
    return filled


def _paint_page(lines: list[Written], size: Size) -> Image.Image:
    picture = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(picture)
    for line in lines:
        line.paint(canvas, "black")
    return picture


def _page_sample(name: str, key: tuple[int, ...], size: Size, lines: int) -> Sample:
    shown = page(key, size, lines)
    number, who, line = shown.entries[np.random.default_rng((*key, 52)).integers(len(shown.entries))]
    image = StoredImage(functools.partial(_paint_page, shown.lines, size), size)
    question = f"{ENTRIES[shown.kind][1].format(number)} Answer in the words of the page."
    return _seen(name, image, store.digest(["page", key, size, lines]), question, line, who,
                 [other for _, other, _ in shown.entries], "line")  # fmt: skip


# ---------------------------------------------------------------- the benchmarks

_OPTIONS = {  # the least number that is allowed, and what to say where it isn't
    "words": (100, "lengths of the text in words, each 100 or more, like (400, 800)"),
    "depths": (1, "a number of places in the text, 1 or more"),
    "size": (200, "width and height in pixels, each 200 or more, like (672, 448)"),
    "lines": (12, "a number of lines, 12 or more"),
}


def _checked(option: str, value: object) -> int | tuple[int, ...]:
    least, wanted = _OPTIONS[option]
    one = option in ("depths", "lines")
    numbers = [value] if one else value
    listed = isinstance(numbers, (tuple, list)) and len(numbers) in ((2,) if option == "size" else range(1, 100))
    if not listed or any(type(number) is not int or number < least for number in numbers):
        raise ValueError(f"{option}={value!r}: give {wanted}.")
    return value if one else tuple(value)


def _benchmark(name: str, like: str, make: Callable[..., Sample], **defaults: object) -> Benchmark:
    def draw(split: str, n: int | None, seed: int, **options: object) -> Samples:
        if n is None:
            raise ValueError(f"{name} is drawn, not read: there is no end of it. Say how many samples (n).")
        chosen = {option: _checked(option, value) for option, value in (defaults | options).items()}
        made = [make(f"{name}-{split}-{seed}-{i}", (SPLITS[split], seed, i), **chosen) for i in range(n)]
        told = ", ".join(f"{option}={value}" for option, value in chosen.items())
        return Samples(name, split, made, origin=f"generated.py@{store.file_digest(__file__)[:8]}, {told}")

    return Benchmark(name, "paper", "text", like, draw, tuple(SPLITS), tuple(defaults))


BENCHMARKS = {
    b.name: b
    for b in [
        _benchmark("needle-text", "needle in a haystack (Retrieval Heads, QRHead)", _needle,
                   words=(400, 800, 1600, 3200), depths=10),
        _benchmark("word-pictures", "rendered words (OCR Heads)", _word_picture, size=(672, 448)),
        _benchmark("pages", "rendered documents (VERA, SparseMM)", _page_sample, size=(896, 1152), lines=36),
    ]
}  # fmt: skip
