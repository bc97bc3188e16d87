"""Small local copies of the real data sets: their columns, types and file layout, our pictures and texts.

`write_all(root)` fills `root/data/local`, after which every real benchmark opens offline (with VRHLIB_ALLOW_DRIFT=1:
there are fewer rows than published). Rows named in a test are literal rows of the data sets, with a picture of ours.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import datasets
import numpy as np
from PIL import Image, ImageDraw

from vrhlib import hub


def isolate(monkeypatch, cache: Path) -> None:
    """No network, an empty cache, and no leave to drift, whatever the environment says."""
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_silent", Counter())
    monkeypatch.delenv("VRHLIB_ALLOW_DRIFT", raising=False)


COLOURS = {"red": "#c62828", "blue": "#1565c0", "green": "#2e7d32", "yellow": "#f9a825", "purple": "#6a1b9a"}
SIZE = (160, 120)

# ---------------------------------------------------------------- pictures


def picture(number: int, size: tuple[int, int] = SIZE, kind: str = "JPEG") -> bytes:
    """A picture of its own for every number: two coloured boxes, where `things` says."""
    image = Image.new("RGB", size, (120 + number % 100, 130, 140 + number // 100 % 100))
    draw = ImageDraw.Draw(image)
    for _, colour, (x0, y0, x1, y1) in things(number, size):
        draw.rectangle((x0, y0, x1 - 1, y1 - 1), fill=COLOURS[colour])
    return encoded(image, kind)


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def things(number: int, size: tuple[int, int] = SIZE) -> list[tuple[str, str, tuple[int, int, int, int]]]:
    """(phrase, colour, box xyxy) of the two things in a picture; they never overlap."""
    width, height = size
    left, right = list(COLOURS)[number % 5], list(COLOURS)[(number + 1 + number // 5 % 4) % 5]
    top = 8 + 5 * (number % 7)
    w, h = width // 4, height // 3
    a, b = (8, top, 8 + w, top + h), (width // 2 + 4, height - top - h, width // 2 + 4 + w, height - top)
    return [(f"the {left} box on the left", left, a), (f"the {right} box on the right", right, b)]


def cell(content: bytes | None, path: str | None = None) -> dict:
    return {"bytes": content, "path": path}


# ---------------------------------------------------------------- schemas

_S, _I32, _I64, _F32 = (datasets.Value(t) for t in ("string", "int32", "int64", "float32"))
_IMAGE, _LIST = datasets.Image(), datasets.List


def _features(**columns) -> datasets.Features:
    return datasets.Features(columns)


LMMS = _features(
    question_id=_S, image=_IMAGE, question=_S, answer=_LIST(_S), segmentation=_LIST(_F32), bbox=_LIST(_F32),
    iscrowd=datasets.Value("int8"), file_name=_S,
)  # fmt: skip
KANGHENG = _features(image=_IMAGE, question=_S, bbox=_S, image_size=_LIST(_I64))
JXU = _features(
    sent_ids=_LIST(_I64), file_name=_S, ann_id=_I64, ref_id=_I64, image_id=_I64, split=_S,
    sentences=_LIST({"raw": _S, "sent": _S, "sent_id": _I64, "tokens": _LIST(_S)}), category_id=_I64, raw_anns=_S,
    raw_image_info=_S, raw_sentences=_S, image_path=_S, bbox=_LIST(datasets.Value("float64")), captions=_LIST(_S),
    global_image_id=_S, anns_id=_S,
)  # fmt: skip
REFSPATIAL = _features(id=_I64, image=_IMAGE, mask=_IMAGE, object=_S, prompt=_S, suffix=_S, step=_I64)
SPATIAL457 = _features(
    image=_IMAGE, image_filename=_S, question=_S, answer=_S, question_index=_I32,
    program=_LIST({"type": _S, "inputs": _LIST(_I32), "_output": _S, "value_inputs": _LIST(_S)}),
)  # fmt: skip
SPATIALRGPT = _features(
    id=_S, image=_IMAGE, image_info=_S, text_q=_S, qa_info=_S, conversations=_S, bbox=_S, rle=_S, file_path=_S
)
SPATIALRGPT_NESTED = _features(
    id=_S, image=_IMAGE, image_info={"file_path": _S}, text_q=_S, qa_info={"type": _S, "category": _S},
    conversations=_LIST({"from": _S, "value": _S}), bbox=_LIST(_LIST(_F32)),
    rle=_LIST({"size": _LIST(_I64), "counts": _S}), file_path=_S,
)  # fmt: skip
CV_BENCH = _features(
    idx=_I64, type=_S, task=_S, image=_IMAGE, question=_S, choices=_LIST(_S), answer=_S, prompt=_S, filename=_S,
    source=_S, source_dataset=_S, source_filename=_S, target_class=_S, target_size=_I64, bbox=_LIST(_LIST(_F32)),
)  # fmt: skip
MMSTAR = _features(
    index=_I64, question=_S, image=_IMAGE, answer=_S, category=_S, l2_category=_S,
    meta_info={"source": _S, "split": _S, "image_path": _S},
)  # fmt: skip
COUNTBENCH = _features(image=_IMAGE, text=_S, question=_S, number=_I32)
MATHVISTA = _features(
    pid=_S, question=_S, image=_S, decoded_image=_IMAGE, choices=_LIST(_S), unit=_S,
    precision=datasets.Value("float64"), answer=_S, question_type=_S, answer_type=_S, query=_S,
    metadata={"category": _S, "context": _S, "grade": _S, "img_height": _I64, "img_width": _I64, "language": _S,
              "skills": _LIST(_S), "source": _S, "split": _S, "task": _S},
)  # fmt: skip

# ---------------------------------------------------------------- rows


def refcoco_row(number: int, thing: int, /, **changed) -> dict:
    phrase, colour, (x0, y0, x1, y1) = things(number)[thing]
    return {
        "question_id": str(1000 + 2 * number + thing), "image": cell(picture(number)),
        "question": "Please carefully observe the area circled in the image and come up with a caption for the area.",
        "answer": [phrase, f"{colour} one", f"{colour} rectangle"],
        "segmentation": [x0, y0, x1, y0, x1, y1, x0, y1], "bbox": [x0, y0, x1 - x0, y1 - y0], "iscrowd": 0,
        "file_name": f"COCO_train2014_{number:012d}_{thing}.jpg",
    } | changed  # fmt: skip


def kangheng_row(number: int, thing: int, /, **changed) -> dict:
    phrase, _, box = things(number)[thing]
    return {
        "image": cell(picture(number)), "question": phrase, "bbox": json.dumps([float(c) for c in box]),
        "image_size": list(SIZE),
    } | changed  # fmt: skip


def jxu_row(number: int, thing: int, /, **changed) -> dict:
    phrase, colour, (x0, y0, x1, y1) = things(number)[thing]
    texts, ref, file = [phrase, f"{colour} one", f"{colour} rectangle"], 2 * number + thing, f"{number:012d}"
    said = [{"raw": text.capitalize(), "sent": text, "sent_id": 3 * ref + i, "tokens": text.split()}
            for i, text in enumerate(texts)]  # fmt: skip
    xywh = [float(c) for c in (x0, y0, x1 - x0, y1 - y0)]
    anns = {"segmentation": [[x0, y0, x1, y0, x1, y1, x0, y1]], "area": xywh[2] * xywh[3], "iscrowd": 0,
            "image_id": number, "bbox": xywh, "category_id": 1, "id": 500 + ref}  # fmt: skip
    info = {"license": 3, "file_name": f"COCO_train2014_{file}.jpg", "height": SIZE[1], "width": SIZE[0], "id": number}
    return {
        "sent_ids": [s["sent_id"] for s in said], "file_name": f"COCO_train2014_{file}_{thing}.jpg",
        "ann_id": 500 + ref, "ref_id": ref, "image_id": number, "split": "train", "sentences": said, "category_id": 1,
        "raw_anns": json.dumps(anns), "raw_image_info": json.dumps(info), "raw_sentences": json.dumps(said),
        "image_path": f"coco/train2014/COCO_train2014_{file}.jpg", "bbox": [float(c) for c in (x0, y0, x1, y1)],
        "captions": texts, "global_image_id": f"coco.{number}", "anns_id": str(500 + ref),
    } | changed  # fmt: skip


def refspatial_row(number: int, /, **changed) -> dict:
    phrase, _, (x0, y0, x1, y1) = things(number)[0]
    mask = np.zeros(SIZE[::-1], np.uint8)
    mask[y0:y1, x0:x1] = 255
    return {
        "id": number, "image": cell(picture(number, kind="PNG")), "mask": cell(encoded(Image.fromarray(mask))),
        "object": phrase, "prompt": f"Please point out {phrase}.",
        "suffix": "Your answer should be formatted as a list of tuples, i.e. [(x1, y1)], ...", "step": 1 + number % 3,
    } | changed  # fmt: skip


def toloka_row(number: int, /, **changed) -> dict:
    _, colour, (x0, y0, x1, y1) = things(number)[0]
    return {
        "image": f"https://toloka-cdn.azureedge.net/wsdmcup2023/{number:012d}.jpg", "width": SIZE[0],
        "height": SIZE[1], "left": x0, "top": y0, "right": x1, "bottom": y1, "question": f"Which box is {colour}?",
    } | changed  # fmt: skip


ATTRIBUTE_TYPES = {
    "color": ["red", "blue", "green", "yellow", "purple", "gray", "white", "tan"],
    "tone": ["light colored", "dark colored"],
    "material": ["wooden", "metal", "plastic", "brick"],
    "pattern": ["tiled", "speckled", "striped", "plaid"],
    "other": ["purple", "wooden", "old"],  # VAW's evaluator takes the first type that lists an attribute
}


def vaw_row(number: int, thing: int, /, **changed) -> dict:
    _, colour, (x0, y0, x1, y1) = things(number)[thing]
    others = [c for c in COLOURS if c != colour]
    return {
        "image_id": str(2370000 + number), "instance_id": f"{2370000 + number}00{thing}",
        "instance_bbox": [float(x0), float(y0), float(x1 - x0), float(y1 - y0)], "instance_polygon": None,
        "object_name": ("crate", "parcel")[thing], "positive_attributes": [colour, "light colored", "wooden"],
        "negative_attributes": [*others, "metal", "striped"],
    } | changed  # fmt: skip


def spatial457_row(number: int, /, **changed) -> dict:
    _, colour, _ = things(number)[0]
    return {
        "image": cell(picture(number, kind="PNG")), "image_filename": f"superCLEVR_new_{number:06d}.png",
        "question": "What color is the large car?", "answer": colour, "question_index": number,
        "program": [{"type": "scene", "inputs": [], "_output": "0", "value_inputs": []}],
    } | changed  # fmt: skip


def spatialrgpt_row(number: int, /, category: str = "width_data", nested: bool = False, **changed) -> dict:
    boxes = [list(map(float, box)) for _, _, box in things(number)]
    word = {"width_data": "wide", "height_data": "tall"}.get(category, "apart")
    plain = {
        "image_info": {"file_path": f"omni3d/{number}.png"},
        "qa_info": {"type": "quantitative", "category": category},
        "conversations": [
            {"from": "human", "value": f"<image>\nHow {word} is <mask> <depth>?"},
            {"from": "gpt", "value": f"Region [0] is {number + 1}.5 feet {word}."},
        ],
        "bbox": boxes if word == "apart" else boxes[:1], "rle": [{"size": list(SIZE[::-1]), "counts": "0"}],
    }  # fmt: skip
    known = {
        "id": f"quantitative_{number:04d}", "image": cell(picture(number, kind="PNG")),
        "text_q": "How far is Region [0] from Region [1]?" if word == "apart" else f"How {word} is Region [0]?",
        "file_path": f"images/{number}.png", **plain,
    } | changed  # fmt: skip
    return known if nested else {k: repr(v) if k in plain else v for k, v in known.items()}


def cv_bench_row(number: int, /, source: str = "COCO", **changed) -> dict:
    question = "How many boxes are in the image?"
    return {
        "idx": number, "type": "3D" if source == "Omni3D" else "2D", "task": "Count",
        "image": cell(picture(number, kind="PNG")), "question": question, "choices": ["0", "3", "2", "1"],
        "answer": "(C)", "prompt": f"{question} Select from the following choices.\n(A) 0\n(B) 3\n(C) 2\n(D) 1",
        "filename": f"img/2D/count/{source.lower()}_{number}.png", "source": source,
        "source_dataset": f"{source} Validation Set", "source_filename": f"/{source}/{number // 2:012d}.jpg",
        "target_class": "box", "target_size": 1732, "bbox": None,
    } | changed  # fmt: skip


def mmstar_row(number: int, /, **changed) -> dict:
    _, colour, _ = things(number)[0]
    wrong = [c for c in COLOURS if c != colour][:3]
    return {
        "index": number, "question": "What color is the box on the left?\nOptions: " + ", ".join(
            f"{letter}: {text}" for letter, text in zip("ABCD", [wrong[0], colour, *wrong[1:]])
        ),
        "image": cell(picture(number)), "answer": "B", "category": "coarse perception", "l2_category": "image style",
        "meta_info": {"source": "MMBench", "split": "val", "image_path": f"images/{number}.jpg"},
    } | changed  # fmt: skip


def countbench_row(number: int, /, **changed) -> dict:
    return {
        "image": cell(picture(number)), "text": "A set of two boxes.", "question": "How many boxes are there?",
        "number": 2,
    } | changed  # fmt: skip


def mathvista_row(number: int, /, multiple: bool = True, **changed) -> dict:
    question = "How many boxes are there?"
    hint = "Please answer the question and provide the correct option letter, e.g., A, B, C, D, at the end."
    listed = "\nChoices:\n(A) 1\n(B) 2\n(C) 3" if multiple else ""
    return {
        "pid": str(number), "question": question, "image": f"images/{number}.jpg",
        "decoded_image": cell(picture(number)), "choices": ["1", "2", "3"] if multiple else None, "unit": None,
        "precision": None if multiple else 1.0, "answer": "2",
        "question_type": "multi_choice" if multiple else "free_form", "answer_type": "text" if multiple else "integer",
        "query": f"Hint: {hint}\nQuestion: {question}{listed}",
        "metadata": {"category": "general-vqa", "context": "synthetic scene", "grade": "daily life",
                     "img_height": SIZE[1], "img_width": SIZE[0], "language": "english", "skills": ["arithmetic"],
                     "source": "CLEVR-Math", "split": "testmini", "task": "visual question answering"},
    } | changed  # fmt: skip


# ---------------------------------------------------------------- files


def write(
    root: Path, name: str, rows: Mapping[str, Sequence[dict]], features: datasets.Features, config: str = "default",
    folder: str = "data", others: Iterable[str] = (),
) -> Path:  # fmt: skip
    """A local copy of a Hub data set: parquet files, and the configurations in the head of its README.md."""
    place = root / "data" / "local" / name
    (place / folder).mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()
    for split, content in rows.items():
        columns = {column: [row[column] for row in content] for column in features}
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(place / folder / f"{split}-00000-of-00001.parquet")
    lines = ["---", "configs:"]
    for one in [config, *others]:
        lines += [f"- config_name: {one}", "  data_files:"]
        lines += [line for s in rows for line in (f"  - split: {s}", f"    path: {folder}/{s}-*")]
    (place / "README.md").write_text("\n".join([*lines, "---", ""]))
    return place


def write_lmms(root: Path, name: str, rows: Sequence[dict]) -> Path:
    return write(root, f"lmms-lab/{name}", {"test": rows[:1], "val": rows}, LMMS)


def write_jxu(root: Path, name: str, rows: Sequence[dict], pictures: Mapping[str, bytes] = {}) -> Path:  # noqa: B006
    """The table without pictures, and its split `test`; pictures lie beside, as COCO has them."""
    _beside(root, "coco/train2014", pictures)
    return write(root, f"jxu124/{name}", {"train": rows, "test": rows[:1]}, JXU)


def _beside(root: Path, folder: str, pictures: Mapping[str, bytes]) -> None:
    place = root / "data" / "local" / folder
    place.mkdir(parents=True, exist_ok=True)
    for name, content in pictures.items():
        (place / name).write_bytes(content)


def write_toloka(root: Path, rows: Sequence[dict], pictures: Mapping[str, bytes] = {}) -> Path:  # noqa: B006
    """A CSV file, whose configuration is named only in `dataset_info`; pictures lie beside, as COCO has them."""
    import pandas as pd

    place = root / "data" / "local" / "toloka" / "WSDMCup2023"
    (place / "data").mkdir(parents=True, exist_ok=True)
    for split in ("test_private", "test_public", "train", "train_sample"):
        frame = pd.DataFrame(rows if split == "test_public" else rows[:1])
        frame.to_csv(place / "data" / f"{split}-00000-of-00001.csv", index=False)
    columns = {"image": "string"} | dict.fromkeys(("width", "height", "left", "top", "right", "bottom"), "int64")
    lines = [
        line for c, t in {**columns, "question": "string"}.items() for line in (f"  - name: {c}", f"    dtype: {t}")
    ]
    head = ["---", "dataset_info:", "  features:", *lines, "  config_name: wsdmcup2023", "---", ""]
    (place / "README.md").write_text("\n".join(head))
    _beside(root, "coco/train2017", pictures)
    return place


def write_vaw(root: Path, rows: Sequence[dict], pictures: Mapping[str, bytes] = {}) -> Path:  # noqa: B006
    place = root / "data" / "local" / "vaw_dataset" / "data"
    place.mkdir(parents=True, exist_ok=True)
    (place / "test.json").write_text(json.dumps(list(rows)))
    (place / "attribute_types.json").write_text(json.dumps(ATTRIBUTE_TYPES))
    _beside(root, "visual_genome/VG_100K_2", pictures)
    return place


def write_all(root: Path, rows: int = 12) -> None:
    """Every real data set below root/data/local, with at least `rows` rows (16 where pictures hold two things).

    Every other picture of the training tables is one of the validation tables, too.
    """
    numbers, halves = range(rows), range(max(8, -(-rows // 2)))
    named = [refcoco_row(n, t) for n in halves for t in (0, 1)]
    for name in ("RefCOCO", "RefCOCOplus", "RefCOCOg"):
        write_lmms(root, name, named)
    said = [kangheng_row(n, t) for n in halves for t in (0, 1)]
    for name, splits in {
        "refcoco": ("val", "testA", "testB"), "refcocop": ("val", "testA", "testB"), "refcocog": ("val", "test"),
    }.items():  # fmt: skip
        write(root, f"Kangheng/{name}", dict.fromkeys(splits, said), KANGHENG)
    shown = [n + len(halves) // 2 for n in halves]
    photos = {f"COCO_train2014_{n:012d}.jpg": picture(n) for n in shown}
    for name in ("refcoco", "refcocoplus", "refcocog"):
        write_jxu(root, name, [jxu_row(n, t) for n in shown for t in (0, 1)], photos)
    spots = dict.fromkeys(("location", "placement", "unseen"), [refspatial_row(n) for n in numbers])
    write(root, "BAAI/RefSpatial-Bench", spots, REFSPATIAL)
    photos = {f"{n:012d}.jpg": picture(n) for n in numbers}
    write_toloka(root, [toloka_row(n) for n in numbers], photos)
    write_vaw(root, [vaw_row(n, t) for n in halves for t in (0, 1)], {f"{2370000 + n}.jpg": picture(n) for n in halves})
    write(root, "RyanWW/Spatial457-v2", {"validation": [spatial457_row(n) for n in numbers]}, SPATIAL457, "L1_single",
          "L1_single", ["L2_objects"])  # fmt: skip
    sizes = [spatialrgpt_row(n, ("width_data", "height_data")[n % 2]) for n in numbers]
    other = [spatialrgpt_row(n, category) for n, category in enumerate(("distance_data", "direction"))]
    write(root, "a8cheng/SpatialRGPT-Bench", {"val": sizes + other}, SPATIALRGPT)
    sources = ("ADE20K", "COCO", "Omni3D")
    write(root, "nyu-visionx/CV-Bench", {"test": [cv_bench_row(n, sources[n % 3]) for n in numbers]}, CV_BENCH,
          others=["2D", "3D"])  # fmt: skip
    write(root, "Lin-Chen/MMStar", {"val": [mmstar_row(n) for n in numbers]}, MMSTAR, "val")
    write(root, "vikhyatk/CountBenchQA", {"test": [countbench_row(n) for n in numbers]}, COUNTBENCH)
    write(root, "AI4Math/MathVista", {"testmini": [mathvista_row(n) for n in numbers] + [mathvista_row(rows, False)]},
          MATHVISTA)  # fmt: skip
