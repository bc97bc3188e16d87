"""From a drawing to files and back: a figure, a table, and what is saved of each.

A drawing is a function from a frame to a canvas, registered under a name. The manifest keeps the name and the CSV
the frame, so `rebuild` can draw a saved figure again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from vrhlib import store
from vrhlib.figures.style import RC

_NANO = "nano profile: a small embedded model on synthetic scenes; not the paper's numbers"
_profile = "nano"


def use_profile(profile: str) -> None:
    """Say under which profile figures are drawn (their label) and saved (their folder); show frames whole."""
    global _profile
    store.figures_dir(profile)
    _profile = profile
    pd.set_option("display.max_colwidth", None)
    pd.set_option("display.precision", 1)


@dataclass(frozen=True, eq=False)
class Figure:
    """A drawn frame. Shows itself in a notebook; `save` writes picture, vector, data and manifest."""

    drawing: str
    frame: pd.DataFrame
    canvas: Canvas

    def png(self, dpi: int = 110) -> bytes:
        buffer = io.BytesIO()
        self.canvas.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
        return buffer.getvalue()

    def __repr__(self) -> str:
        return f"<{self.drawing}: {len(self.frame)} rows>"

    def _repr_png_(self) -> bytes:
        return self.png()

    def save(self, name: str, **facts: object) -> Figure:
        """Write figures/<profile>/NAME.png, .pdf, .csv and .json (manifest with the digests of the runs behind it)."""
        folder, pdf = _save_data(self.frame, name, drawing=self.drawing, **facts), io.BytesIO()
        self.canvas.savefig(pdf, format="pdf", metadata={"CreationDate": None})
        store.write_atomic(folder / f"{name}.pdf", pdf.getvalue())
        store.write_atomic(folder / f"{name}.png", self.png(dpi=180))
        return self


def _save_data(frame: pd.DataFrame, name: str, **facts: object) -> Path:
    """Write NAME.csv and its manifest NAME.json, with the digests of the runs behind the frame; returns the folder."""
    folder = store.figures_dir(_profile)
    about = store.manifest(profile=_profile, runs=sorted(frame.attrs.get("runs", [])), **facts)
    store.write_atomic(folder / f"{name}.csv", frame.to_csv(index=False))
    store.write_atomic(folder / f"{name}.json", json.dumps(about, indent=1) + "\n")
    return folder


_DRAW: dict[str, Callable[[pd.DataFrame], Canvas]] = {}


def drawing(name: str) -> Callable:
    """Decorator: register a function from frame to canvas under the name that manifests keep."""

    def register(function: Callable[[pd.DataFrame], Canvas]) -> Callable[[pd.DataFrame], Canvas]:
        _DRAW[name] = function
        return function

    return register


def draw(name: str, frame: pd.DataFrame) -> Figure:
    """Draw a frame with the drawing of this name; under the nano profile its label stands below."""
    with matplotlib.rc_context(RC):
        canvas = _DRAW[name](frame)
        if _profile == "nano" and name != "published_heads":
            canvas.supxlabel(_NANO, fontsize=7, color="#555555", x=0.01, ha="left")
        FigureCanvasAgg(canvas)
        canvas.draw_without_rendering()
        canvas.set_layout_engine("none")  # settle the layout once, or every format would nudge it
    return Figure(name, frame, canvas)


def rebuild(csv: Path) -> Figure:
    """Draw a saved figure again from its CSV and the drawing its manifest names."""
    csv = Path(csv)
    about = json.loads(csv.with_suffix(".json").read_text())
    use_profile(about["profile"])
    return draw(about["drawing"], pd.read_csv(csv, keep_default_na=True))


def save_table(frame: pd.DataFrame, name: str, rendered: pd.DataFrame | None = None, **facts: object) -> pd.DataFrame:
    """Write a table as figures/<profile>/NAME.csv, .md (rendered) and .json (manifest); returns it.

    `rendered`: the same numbers in another layout, for the Markdown.
    """
    folder = _save_data(frame, name, **facts)
    note = f"\n{_NANO}\n" if _profile == "nano" and not name.startswith("published") else ""
    store.write_atomic(folder / f"{name}.md", markdown(frame if rendered is None else rendered) + note)
    return frame


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame in words, rows unnumbered: floats to one decimal, correlations, expectations and shares held to two, p
    values to three; – for what is missing."""

    def word(column: str, value: object) -> str:
        if pd.isna(value):
            return "–"
        if not isinstance(value, float):
            return str(value)
        if column == "p" or column.startswith("p_"):
            return "< 0.001" if value < 0.001 else f"{value:.3f}"
        digits = 2 if column.startswith(("spearman", "expected", "gini", "held")) else 1
        return f"{round(value, digits) + 0.0:.{digits}f}"  # no -0.0

    words = {c: [word(str(c), v) for v in frame[c].astype(object)] for c in frame}
    numbered = pd.api.types.is_integer_dtype(frame.index)
    return pd.DataFrame(words, index=[""] * len(frame) if numbered else frame.index)


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table, numbers as in `shown`."""
    cells = shown(frame).values.tolist()
    lines = [list(map(str, frame.columns)), ["---"] * frame.shape[1], *cells]
    return "".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |\n" for line in lines)
