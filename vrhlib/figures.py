"""Data frame to figure, one function per figure, and the files they are saved in.

Every figure is drawn from a tidy frame with one fact a row and nothing else; the frame is saved beside the
picture, and `rebuild` draws it again from the CSV without a model (and without torch). Colours by meaning,
the same on every page and legible without colour: ablating VRHs is vermillion with filled circles, random
heads are grey with a band, layer-matched random heads are blue and dashed, the unmasked model is black.
"""

from __future__ import annotations

import io
import itertools
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle
from PIL import Image

from vrhlib import store
from vrhlib.boxes import Box, TokenGrid
from vrhlib.heads import HeadScores, HeadSet, overlap_matrix

# Okabe-Ito, by meaning.
COLOUR = {
    "vrh": "#D55E00", "random": "#7F7F7F", "layer_matched": "#0072B2", "unmasked": "#000000",
    "one output token": "#CC79A7", "referent": "#009E73", "rows": "#0072B2", "eager": "#E69F00",
    "flip_q": "#56B4E9", "flip_phi": "#CC79A7", "flip_omega": "#009E73", "q_union": "#E69F00",
    "retrieval_heads": "#56B4E9", "qrhead": "#0072B2", "ocr_heads": "#009E73", "vera": "#E69F00",
    "localization_heads": "#CC79A7", "sparsemm": "#8F8400",  # yellow, darkened for white paper
    "ocr_heads_aligned": "#009E73",
    "above_5e-3": "#D55E00", "between": "#F5C88A", "below": "#E4E4E4",
}  # fmt: skip
LABEL = {
    "vrh": "VRH", "random": "random heads", "layer_matched": "layer-matched random", "unmasked": "unmasked",
    "flip_q": "other queries (expression)", "flip_phi": "other keys (argmax)",
    "flip_omega": "other samples (frequency)", "q_union": "both queries",
    "retrieval_heads": "Retrieval Heads", "qrhead": "QRHead", "ocr_heads": "OCR Heads", "vera": "VERA",
    "localization_heads": "Localization Heads", "sparsemm": "SparseMM", "ocr_heads_aligned": "OCR Heads, aligned",
    "gaze_heads": "Gaze Heads", "mmret_heads": "MMRetHead",
    "above_5e-3": "> 5e-3", "between": "1e-3 to 5e-3", "below": "< 1e-3",
    "sum": "sum over the referent's tokens", "mean": "mean over the referent's tokens",
}  # fmt: skip
MARKER = {
    "vrh": "o", "random": "s", "layer_matched": "^", "one output token": "D", "rows": "o", "eager": "s",
    "retrieval_heads": "^", "qrhead": "D", "ocr_heads": "v", "vera": "s", "localization_heads": "P", "sparsemm": "X",
    "ocr_heads_aligned": "<",
}  # fmt: skip
DASH = {
    "retrieval_heads": "--", "qrhead": ":", "ocr_heads": "-.", "vera": (0, (5, 1)),
    "localization_heads": (0, (3, 1, 1, 1, 1, 1)), "sparsemm": (0, (1, 1)), "ocr_heads_aligned": (0, (4, 1, 1, 1)),
}  # fmt: skip
HATCH = {"flip_q": "//", "flip_phi": "\\\\", "flip_omega": "..", "q_union": "xx", "between": "///", "below": ".."}
# Colour, marker and dash of whatever has no row above, in turn.
_SPARE = [("#0072B2", "p", "-"), ("#E69F00", "d", "--"), ("#009E73", "<", "-."), ("#CC79A7", ">", ":"),
          ("#56B4E9", "*", (0, (5, 1))), ("#8F8400", "h", (0, (3, 1, 1, 1)))]  # fmt: skip
_STYLE = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 110, "pdf.fonttype": 42,
          "axes.titlesize": 9, "axes.titleweight": "bold", "legend.frameon": False}  # fmt: skip
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


def _drawing(name: str, draw: Callable[[pd.DataFrame], Canvas], frame: pd.DataFrame) -> Figure:
    with matplotlib.rc_context(_STYLE):
        canvas = draw(frame)
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
    return _drawing(about["drawing"], _DRAW[about["drawing"]], pd.read_csv(csv, keep_default_na=True))


def save_table(frame: pd.DataFrame, name: str, **facts: object) -> pd.DataFrame:
    """Write a table as figures/<profile>/NAME.csv, .md (rendered) and .json (manifest); returns it."""
    folder = _save_data(frame, name, **facts)
    note = f"\n{_NANO}\n" if _profile == "nano" else ""
    store.write_atomic(folder / f"{name}.md", markdown(frame) + note)
    return frame


def shown(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame in words: floats to one decimal, correlations and expectations to two, p values to three."""

    def word(column: str, value: object) -> str:
        if not isinstance(value, float):
            return str(value)
        if column == "p" or column.startswith("p_"):
            return "< 0.001" if value < 0.001 else f"{value:.3f}"
        return f"{value:.2f}" if column.startswith(("spearman", "expected", "gini")) else f"{value:.1f}"

    return pd.DataFrame({c: [word(str(c), v) for v in frame[c].astype(object)] for c in frame}, index=frame.index)


def markdown(frame: pd.DataFrame) -> str:
    """A frame as a Markdown table, numbers as in `shown`."""
    cells = shown(frame).values.tolist()
    lines = [list(map(str, frame.columns)), ["---"] * frame.shape[1], *cells]
    return "".join(f"| {' | '.join(c.replace('|', '/') for c in line)} |\n" for line in lines)


def _axes(width: float, height: float, rows: int = 1, cols: int = 1, **kwargs) -> tuple[Canvas, np.ndarray]:
    canvas = Canvas(figsize=(width, height), layout="constrained")
    return canvas, canvas.subplots(rows, cols, squeeze=False, **kwargs)


# ---------------------------------------------------------------- head maps


def head_map(scores: HeadScores, highlight: HeadSet) -> Figure:
    """Score of every head, layers x heads, with the highlighted (top-k) heads outlined, and heads per layer."""
    layer, head = np.indices(scores.grid)
    rank = {h: i + 1 for i, h in enumerate(highlight)}
    frame = pd.DataFrame({
        "model": scores.model, "scoring": scores.scoring, "n": scores.n, "layer": layer.ravel(), "head": head.ravel(),
        "score": scores.values.ravel().round(6),
        "rank": [rank.get((a, b), 0) for a, b in zip(layer.ravel(), head.ravel())],
    })  # fmt: skip
    frame.attrs["runs"] = list(scores.runs)
    return _drawing("head_map", _draw_head_map, frame)


def _draw_head_map(frame: pd.DataFrame) -> Canvas:
    values = frame.pivot(index="layer", columns="head", values="score").to_numpy()
    layers, heads = values.shape
    canvas, axes = _axes(
        max(4.8, 0.28 * heads + 3.2),
        max(3.2, 0.22 * layers + 1.3),
        1,
        2,
        width_ratios=[heads, max(3, heads / 3)],
        sharey=True,
    )
    grid, side = axes[0]
    image = grid.imshow(values, cmap="cividis", aspect="auto", origin="lower", vmin=0)
    top = frame[frame["rank"] > 0].sort_values("rank")
    for row in top.itertuples():
        grid.add_patch(Rectangle((row.head - 0.5, row.layer - 0.5), 1, 1, fill=False, ec=COLOUR["vrh"], lw=1.8))
        light = row.score < 0.6 * values.max()
        grid.text(
            row.head, row.layer, row.rank, ha="center", va="center", fontsize=7, color="white" if light else "black"
        )
    grid.set(
        xlabel="head",
        ylabel="layer",
        xticks=range(0, heads, max(1, heads // 12)),
        yticks=range(0, layers, max(1, layers // 12)),
    )
    first = frame.iloc[0]
    words = f"{first.model}: attention on the referent, per head\n{first.scoring} (queries/keys/samples), n={first.n}"
    canvas.suptitle(words, fontsize=9, fontweight="bold")
    canvas.colorbar(image, ax=grid, pad=0.02, label="head score")
    side.tick_params(labelleft=False)
    counts = np.bincount(top.layer, minlength=layers)
    side.barh(range(layers), counts, color=COLOUR["vrh"])
    side.set(xlabel=f"of top {len(top)}", xticks=range(0, counts.max() + 1, max(1, counts.max() // 3)))
    side.set_title("per layer")
    return canvas


def head_maps(scores: Mapping[str, HeadScores], tops: Mapping[str, HeadSet]) -> Figure:
    """Head scores of several models side by side, their top heads outlined; each map has its own scale, 1 at its best
    head."""
    rows = []
    for model, s in scores.items():
        rank = {h: i + 1 for i, h in enumerate(tops[model])}
        rows += [(model, s.scoring, s.n, *at, round(v, 6), rank.get(at, 0)) for at, v in np.ndenumerate(s.values)]
    columns = ["model", "scoring", "n", "layer", "head", "score", "rank"]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["runs"] = [run for s in scores.values() for run in s.runs]
    return _drawing("head_maps", _draw_head_maps, frame)


def _draw_head_maps(frame: pd.DataFrame) -> Canvas:
    models = list(frame.groupby("model", sort=False))
    canvas, axes = _axes(2.5 * len(models) + 0.9, 3.9, 1, len(models))
    for (model, own), ax in zip(models, axes[0]):
        values = own.pivot(index="layer", columns="head", values="score").to_numpy()
        image = ax.imshow(
            values / max(values.max(), 1e-12), cmap="cividis", aspect="auto", origin="lower", vmin=0, vmax=1
        )
        for row in own[own["rank"] > 0].itertuples():
            ax.add_patch(Rectangle((row.head - 0.5, row.layer - 0.5), 1, 1, fill=False, ec=COLOUR["vrh"], lw=1.8))
        ax.set(
            xlabel="head",
            ylabel="layer" if ax is axes[0, 0] else "",
            xticks=range(0, values.shape[1], max(2, values.shape[1] // 7)),
        )
        ax.set_yticks(range(0, values.shape[0], max(1, values.shape[0] // 10)))
        ax.set_title(f"{model}\nbest head {values.max():.2f}, n={own.n.iloc[0]}")
    canvas.colorbar(image, ax=list(axes[0]), pad=0.02, label="score / best score")
    return canvas


def ablation_by_model(table: pd.DataFrame) -> Figure:
    """Accuracy of several models: unmasked, top heads cut, random heads cut. Side by side stand the numbers of heads
    cut, or the benchmarks if there are several.

    `table` as `evaluate.accuracy_table` returns it; raises ValueError if a model has several benchmarks and several k.
    """
    cut = table[table.condition != "unmasked"].groupby("model")
    if ((cut.k.nunique() > 1) & (cut.benchmark.nunique() > 1)).any():
        raise ValueError("Several benchmarks and several k: select the rows of one k for each model.")
    return _drawing("ablation_by_model", _draw_ablation_by_model, table)


def _draw_ablation_by_model(table: pd.DataFrame) -> Canvas:
    models, by = list(table.groupby("model", sort=False)), "benchmark" if table.benchmark.nunique() > 1 else "k"
    groups = max(own.loc[own.condition != "unmasked", by].nunique() for _, own in models)
    canvas, axes = _axes(max(2.5, 0.75 * groups + 1.4) * len(models) + 0.5, 3.6, 1, len(models), sharey=True)
    offset = {"unmasked": -0.24, "random": -0.08, "layer_matched": 0.08, "vrh": 0.24}
    for (model, own), ax in zip(models, axes[0]):
        names = list(dict.fromkeys(own.loc[own.condition != "unmasked", by]))
        for condition, x in offset.items():
            mine = own[own.condition == condition]
            for i, name in enumerate(names):
                rows = mine if condition == "unmasked" and by == "k" else mine[mine[by] == name]
                if rows.empty:
                    continue
                mean, seeds = rows.accuracy.mean(), rows.seed.nunique()
                ends = (rows.accuracy.min(), rows.accuracy.max()) if seeds > 1 else (rows.low.min(), rows.high.max())
                label = f"{LABEL[condition]} ({f'mean and range of {seeds} seeds' if seeds > 1 else '95 % interval'})"
                ax.errorbar(
                    i + x, mean, [[mean - ends[0]], [ends[1] - mean]], fmt=MARKER.get(condition, "_"), ms=5, capsize=2,
                    color=COLOUR[condition], label=label, clip_on=False,
                )  # fmt: skip
        ticks = [f"{name} heads" for name in names] if by == "k" else names
        ax.set(ylim=(0, 103), xlim=(-0.6, len(names) - 0.4), xticks=range(len(names)), xticklabels=ticks)
        ax.tick_params(axis="x", rotation=0 if by == "k" else 30)
        ax.set_title(f"{model}\n{'' if by == 'k' else f'k={own.k.max()}, '}n={own.n.min()} each")
        ax.grid(axis="y", color="#eeeeee", lw=0.6)
    axes[0, 0].set_ylabel("Acc@IoU 0.5 (%)")
    _legend_above(canvas, axes)
    return canvas


def published_heads(sets: Mapping[str, HeadSet]) -> Figure:
    """Published head lists on their models' grids, heads per layer, and overlap where grids agree (no model run)."""
    frame = pd.DataFrame(
        [(name, *s.grid, i + 1, h.layer, h.head) for name, s in sets.items() for i, h in enumerate(s)],
        columns=["model", "layers", "heads", "rank", "layer", "head"],
    )
    return _drawing("published_heads", _draw_published_heads, frame)


def _sets_of(frame: pd.DataFrame, by: str = "model") -> dict[str, HeadSet]:
    return {
        name: HeadSet(tuple(zip(f["layer"], f["head"])), (f.layers.iloc[0], f.heads.iloc[0]), name)
        for name, f in frame.groupby(by, sort=False)
    }


def _draw_published_heads(frame: pd.DataFrame) -> Canvas:
    sets = _sets_of(frame)
    canvas = Canvas(figsize=(3.0 * len(sets) + 3.4, 4.4), layout="constrained")
    axes = canvas.subplots(1, 2 * len(sets) + 1, width_ratios=[3, 1] * len(sets) + [4.2])
    for (name, heads), grid, side in zip(sets.items(), axes[::2], axes[1::2]):
        layers, per_layer = heads.grid
        cells = np.full(heads.grid, np.nan)
        for i, h in enumerate(heads):
            cells[h] = len(heads) - i
        grid.imshow(cells, cmap="Oranges", aspect="auto", origin="lower", vmin=-6, vmax=len(heads))
        grid.set(xlabel="head", ylabel="layer", xticks=range(0, per_layer, 8), yticks=range(0, layers, 4))
        grid.set_title(f"{name}\n{len(heads)} of {layers * per_layer} = {heads.share:.1%}")
        grid.grid(color="#eeeeee", lw=0.4)
        grid.set_axisbelow(True)
        side.barh(range(layers), heads.layers, color=COLOUR["vrh"])
        side.set(ylim=grid.get_ylim(), yticks=[], xlabel="per layer")
    matrix, names, ax = overlap_matrix(sets.values()), list(sets), axes[-1]
    shown = np.where(matrix < 0, np.nan, matrix).astype(float)
    ax.imshow(shown, cmap="Blues", vmin=0, vmax=26)
    for i, j in np.ndindex(matrix.shape):
        text = "–" if matrix[i, j] < 0 else str(matrix[i, j])
        ax.text(j, i, text, ha="center", va="center", fontsize=10, color="white" if matrix[i, j] > 16 else "black")
    ax.set(yticks=range(len(names)), yticklabels=names, xticks=range(len(names)), xticklabels=names)
    ax.tick_params(axis="x", rotation=35)
    for label in ax.get_xticklabels():
        label.set_ha("right")
    ax.set_title("shared top-20 heads\n(– other grid)")
    canvas.suptitle(
        "Published lists (RefCOCO, Tables A2–A6), darker = higher rank; not measured here", fontsize=9, color="#555555"
    )
    return canvas


# ---------------------------------------------------------------- accuracy against k


def accuracy_vs_k(sweep: pd.DataFrame) -> Figure:
    """Accuracy against the number of ablated heads: lines with 95 % Wilson intervals, controls as bands over seeds.

    `sweep` as `evaluate.ablation_sweep` returns it.
    """
    return _drawing("accuracy_vs_k", _draw_accuracy_vs_k, sweep)


def _draw_accuracy_vs_k(sweep: pd.DataFrame) -> Canvas:
    panels = list(sweep.groupby(["model", "benchmark"], sort=False))
    canvas, axes = _axes(4.6 * len(panels), 3.9, 1, len(panels), sharey=True)
    for ((model, benchmark), frame), ax in zip(panels, axes[0]):
        base = frame[frame.condition == "unmasked"].iloc[0]
        for condition, rows in frame[frame.condition != "unmasked"].groupby("condition", sort=False):
            _line(ax, condition, rows, base)
        ax.axhline(base.accuracy, color=COLOUR["unmasked"], lw=0.9, ls=":")
        ax.annotate(
            f"unmasked {base.accuracy:.1f}", (1, base.accuracy), xycoords=("axes fraction", "data"), ha="right",
            xytext=(0, 3), textcoords="offset points", fontsize=7.5,
        )  # fmt: skip
        ax.set(xlabel="ablated heads k", ylabel="Acc@IoU 0.5 (%)", ylim=(0, 100), xticks=sorted(frame.k.unique()))
        ax.set_title(f"{model} on {benchmark}, n={base.n} a point")
    _legend_above(canvas, axes)
    return canvas


def _handles(axes: np.ndarray) -> dict[str, object]:
    """Legend entries of all panels, each label once."""
    return {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels())}


def _legend_above(canvas: Canvas, axes: np.ndarray) -> None:
    """One legend for all panels, above them: inside, it would lie on a curve."""
    handles = _handles(axes)
    width = canvas.get_figwidth()
    columns = 4 if width > 9 else 2 if width > 6.2 else 1  # a label is up to three inches long
    canvas.legend(handles.values(), handles.keys(), fontsize=7.5, loc="outside upper center", ncols=columns)


def _line(ax, condition: str, rows: pd.DataFrame, base, **more) -> None:
    colour = COLOUR.get(condition, "#56B4E9")
    style = {"color": colour, "marker": MARKER.get(condition, "v"), "ms": 4, "lw": 1.6} | more
    by_k = rows.groupby("k").accuracy
    x, mean = [0, *by_k.groups], [base.accuracy, *by_k.mean()]
    seeds = rows.seed.nunique()
    if seeds > 1:
        low, high = [base.accuracy, *by_k.min()], [base.accuracy, *by_k.max()]
        ax.fill_between(x, low, high, color=colour, alpha=0.18, lw=0)
        label = f"{LABEL.get(condition, condition)} (mean and range of {seeds} seeds)"
        ax.plot(x, mean, ls="--" if condition == "layer_matched" else "-", label=label, **style)
    else:
        rows = rows.sort_values("k")
        low, high = [base.low, *rows.low], [base.high, *rows.high]
        errors = [np.subtract(mean, low), np.subtract(high, mean)]
        label = f"{LABEL.get(condition, condition)} (95 % interval)"
        ax.errorbar(x, mean, np.abs(errors), capsize=2, elinewidth=1.6, label=label, **style)


# ---------------------------------------------------------------- variants of the score and prior methods

VARIANTS = ("random", "layer_matched", "vrh", "flip_q", "flip_phi", "flip_omega", "q_union")


def _n(rows: pd.DataFrame) -> str:
    low, high = rows.n.min(), rows.n.max()
    if np.isnan(low):
        return "n not given"
    return f"n={low:.0f}" if low == high else f"n={low:.0f}–{high:.0f}"


def _check_panels(table: pd.DataFrame) -> None:
    """Raise ValueError unless every model of an accuracy table has one benchmark and an unmasked row."""
    if table.empty:
        raise ValueError("The table has no rows: run the ablations first.")
    for model, own in table.groupby("model", sort=False):
        if own.benchmark.nunique() > 1:
            raise ValueError(f"{model} has {own.benchmark.nunique()} benchmarks in one panel: select one.")
        if not (own.condition == "unmasked").any():
            raise ValueError(f"{model} has no unmasked row: nothing to compare with. Add its unmasked accuracy.")


def _point(rows: pd.DataFrame) -> tuple[float, float, float]:
    """Accuracy and its ends: mean and range of several seeds, or the one value with its 95 % interval."""
    mean = rows.accuracy.mean()
    if rows.seed.nunique() > 1:
        return mean, rows.accuracy.min(), rows.accuracy.max()
    return mean, min(mean, rows.low.min()), max(mean, rows.high.max())


def variants(table: pd.DataFrame) -> Figure:
    """Figure 2: accuracy without the top heads of each variant of the score, one panel a model.

    `table`: model, benchmark, condition (unmasked, random, vrh, flip_q, ...), k, seed, accuracy, low, high, n, and each
    variant's change against vrh with its paired interval (change, change_low, change_high), in percentage points.
    Raises ValueError unless each model has one k, one benchmark and an unmasked row, and every condition is known.
    """
    _check_panels(table)
    cut = table[table.condition != "unmasked"]
    if several := [model for model, own in cut.groupby("model", sort=False) if own.k.nunique() > 1]:
        raise ValueError(f"Several k for {', '.join(several)}: select the rows of one k for each model.")
    if unknown := set(cut.condition) - set(VARIANTS):
        raise ValueError(f"No bar for {', '.join(sorted(unknown))}: conditions are unmasked, {', '.join(VARIANTS)}.")
    return _drawing("variants", _draw_variants, table)


def _draw_variants(table: pd.DataFrame) -> Canvas:
    models = list(table.groupby("model", sort=False))
    canvas, axes = _axes(max(3.3 * len(models) + 0.6, 5.4), 4.4, 1, len(models), sharey=True)
    for (model, own), ax in zip(models, axes[0]):
        base, cut = own[own.condition == "unmasked"].iloc[0], own[own.condition != "unmasked"]
        present = [c for c in VARIANTS if (cut.condition == c).any()]
        for x, condition in enumerate(present):
            _variant_bar(ax, x, condition, cut[cut.condition == condition])
        ax.axhline(base.accuracy, color=COLOUR["unmasked"], lw=1.1, ls="--", label="unmasked")
        labels = [LABEL[c].replace(" (", "\n(") for c in present]
        ax.set_xticks(range(len(present)), labels, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
        ax.set(ylim=(0, 112), xlim=(-0.6, len(present) - 0.4), yticks=range(0, 101, 20))
        ax.set_title(f"{model} on {base.benchmark}\nk={cut.k.max():.0f}, unmasked {base.accuracy:.1f}, {_n(own)} each")
    axes[0, 0].set_ylabel("Acc@IoU 0.5 (%)")
    seeds = table[table.condition == "random"].groupby("model").seed.nunique().min()
    spread = f"; random heads: mean and range of {seeds} seeds" if seeds > 1 else ""
    words = f"Whiskers: 95 % Wilson intervals{spread}. "
    words += "Numbers: change against VRH in points, *\u00a0where its 95 % interval (paired bootstrap) excludes 0. "
    words += "Dashed: unmasked."
    canvas.suptitle(textwrap.fill(words, round(15 * canvas.get_figwidth())), fontsize=8, color="#333333")
    return canvas


def _variant_bar(ax, x: int, condition: str, rows: pd.DataFrame) -> None:
    mean, low, high = _point(rows)
    ax.bar(x, mean, 0.72, color=COLOUR[condition], hatch=HATCH.get(condition), ec="white", lw=0)
    ax.errorbar(x, mean, [[mean - low], [high - mean]], color="black", capsize=2.5, lw=1)
    row = rows.iloc[0]
    if condition in ("random", "layer_matched", "vrh") or pd.isna(row.change):
        return
    star = "*" if row.change_low > 0 or row.change_high < 0 else ""
    words = f"{round(row.change, 1) + 0.0:+.1f}{star}".replace("-", "−")
    behind = {"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.85}
    ax.text(x, high + 2.5, words, ha="center", fontsize=8, bbox=behind)


def _looks(names: Sequence[str]) -> dict[str, dict]:
    """Colour, marker and dash for every name; `method@data` looks like its method, its marker filled differently from
    the second kind of data on, and a name without a colour of its own takes the next spare one."""
    spare, looks, times = itertools.cycle(_SPARE), {}, {}
    for name in names:
        base = name.partition("@")[0]
        if base not in times:
            own = (COLOUR[base], MARKER[base], DASH[base]) if base in DASH else next(spare)
            times[base] = dict(zip(("color", "marker", "ls"), own)), itertools.cycle(("full", "none", "left", "bottom"))
        look, fills = times[base]
        looks[name] = look | {"fillstyle": next(fills)}
    return looks


def _method(name: str) -> str:
    """A method's name in words; what follows @ is the data it was detected on."""
    base, _, data = name.partition("@")
    return LABEL.get(base, base) + (f" @ {data.replace('_', ' ')}" if data else "")


def prior_methods(table: pd.DataFrame) -> Figure:
    """Figure 3: accuracy against the number of ablated heads, for VRHs, the heads of prior methods and random heads.

    `table` as `evaluate.accuracy_table` returns it; a condition beside unmasked, vrh and random is a method's name,
    which may say its data (`retrieval_heads@needle`). Raises ValueError unless each model has one benchmark and an
    unmasked row.
    """
    _check_panels(table)
    return _drawing("prior_methods", _draw_prior_methods, table)


def _draw_prior_methods(table: pd.DataFrame) -> Canvas:
    models = list(table.groupby("model", sort=False))
    rows, cols = (1, len(models)) if len(models) < 3 else (-(-len(models) // 2), 2)
    canvas, axes = _axes(3.9 * cols + 2.9, 3.1 * rows + 0.5, rows, cols, sharey=True)
    looks = _looks([c for c in dict.fromkeys(table.condition) if c not in ("unmasked", *_OURS)])
    for (_, own), ax in zip(models, axes.flat):
        _prior_panel(ax, own, looks)
    for ax in axes.flat[len(models) :]:
        ax.set_axis_off()
    for ax in axes.flat[max(0, len(models) - cols) : len(models)]:
        ax.set_xlabel("ablated heads k (square-root scale)")
    canvas.supylabel("Acc@IoU 0.5 (%)", fontsize=9)
    handles = dict(sorted(_handles(axes).items(), key=lambda entry: not entry[0].startswith(LABEL["vrh"])))
    canvas.legend(handles.values(), handles, fontsize=8, loc="outside right upper", handlelength=3.6)
    return canvas


_OURS = {"random": {}, "layer_matched": {}, "vrh": {"lw": 2.6, "ms": 6, "zorder": 4}}


def _prior_panel(ax, own: pd.DataFrame, looks: Mapping[str, dict]) -> None:
    base, by = own[own.condition == "unmasked"].iloc[0], dict(list(own.groupby("condition")))
    ax.axhline(base.accuracy, color=COLOUR["unmasked"], lw=0.9, ls=":", label="unmasked")
    for condition, style in _OURS.items():
        if condition in by:
            _line(ax, condition, by[condition], base, **style)
    for name, look in looks.items():
        if name in by:
            mean = by[name].groupby("k").accuracy.mean()
            ax.plot([0, *mean.index], [base.accuracy, *mean], lw=1.4, ms=5, zorder=3, label=_method(name), **look)
    ax.set_xscale("function", functions=(lambda k: np.sign(k) * np.sqrt(np.abs(k)), lambda r: r * np.abs(r)))
    ax.set(ylim=(-3, 103), xlim=(-0.05, own.k.max() * 1.06), xticks=sorted(own.k.unique()))
    ax.set_title(f"{own.model.iloc[0]} on {base.benchmark}\nunmasked {base.accuracy:.1f}, {_n(own)} a point")
    ax.grid(axis="y", color="#eeeeee", lw=0.6)


def method_overlap(tops: Mapping[str, HeadSet], model: str) -> Figure:
    """Heads shared by the top-k lists of several methods on one model; a name may say its data (`vera@documents`).

    Raises ValueError unless the lists have one length k > 0 and one grid.
    """
    if len({len(s) for s in tops.values()}) != 1 or not all(map(len, tops.values())):
        lengths = ", ".join(f"{name} {len(s)}" for name, s in tops.items())
        raise ValueError(f"Lists of one length are compared, not {lengths or 'none'}: cut all to one k > 0 (`top(k)`).")
    if len({s.grid for s in tops.values()}) != 1:
        grids = ", ".join(f"{name} {s.grid[0]} x {s.grid[1]}" for name, s in tops.items())
        raise ValueError(f"Lists of one model share its grid, not {grids}: detect every list on {model}.")
    frame = pd.DataFrame(
        [(model, name, *s.grid, i + 1, *h) for name, s in tops.items() for i, h in enumerate(s)],
        columns=["model", "method", "layers", "heads", "rank", "layer", "head"],
    )
    return _drawing("method_overlap", _draw_method_overlap, frame)


def _draw_method_overlap(frame: pd.DataFrame) -> Canvas:
    sets = _sets_of(frame, by="method")
    matrix, names, k = overlap_matrix(sets.values()), [_method(name) for name in sets], frame["rank"].max()
    total = int(frame.layers.iloc[0] * frame.heads.iloc[0])
    side = 0.46 * len(names) + 2.4
    canvas, axes = _axes(max(side, 4.6), max(side, 4.0))
    ax = axes[0, 0]
    ax.imshow(matrix, cmap="Blues", vmin=0, vmax=k * 1.25)
    for (i, j), shared in np.ndenumerate(matrix):
        ax.text(j, i, shared, ha="center", va="center", fontsize=9, color="white" if shared > 0.7 * k else "black")
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor", fontsize=8)
    ax.spines[:].set_visible(False)
    canvas.suptitle(
        f"{frame.model.iloc[0]}: heads shared by two methods' top {k}\n"
        f"by chance {k * k / total:.1f} expected ({k} x {k} / {total} heads)",
        fontsize=9, fontweight="bold",
    )  # fmt: skip
    return canvas


# ---------------------------------------------------------------- sparsity

FLOOR = 1e-6  # lowest score a logarithmic axis shows


def sorted_scores(scores: Mapping[str, HeadScores], tops: Mapping[str, HeadSet]) -> Figure:
    """Every head's score by rank (log axis), one panel a model: its top heads marked, and how few hold half the mass.

    Scores below `FLOOR` are drawn there. Raises ValueError if a model has no top heads.
    """
    if missing := [model for model in scores if not len(tops.get(model, ()))]:
        raise ValueError(f"No top heads for {', '.join(missing)}: pass the detected list of every model with scores.")
    rows = []
    for model, s in scores.items():
        facts = model, s.scoring, s.n, round(s.share_holding(0.5), 6), round(s.gini(), 6)
        top = set(tops[model].on(s.grid))
        rows += [(*facts, i + 1, *h, float(f"{s.values[h]:.6g}"), h in top) for i, h in enumerate(s.ranked())]
    columns = ["model", "scoring", "n", "half_share", "gini", "rank", "layer", "head", "score", "top"]
    frame = pd.DataFrame(rows, columns=columns)
    frame.attrs["runs"] = [run for s in scores.values() for run in s.runs]
    return _drawing("sorted_scores", _draw_sorted_scores, frame)


def _draw_sorted_scores(frame: pd.DataFrame) -> Canvas:
    models = list(frame.groupby("model", sort=False))
    canvas, axes = _axes(max(2.9 * len(models) + 0.9, 4.4), 3.9, 1, len(models), sharey=True)
    for (model, own), ax in zip(models, axes[0]):
        first, height = own.iloc[0], own.score.clip(lower=FLOOR)
        ax.plot(own["rank"], height, color="#555555", lw=1.4, label="every head")
        top = own.top.astype(bool)
        ax.plot(own["rank"][top], height[top], "o", color=COLOUR["vrh"], ms=4, label="top heads")
        ax.axvspan(0, first.half_share * len(own) + 0.5, color="#56B4E9", alpha=0.22, lw=0, label="hold half the mass")
        for threshold in (1e-3, 5e-3):
            ax.axhline(threshold, color="black", lw=0.8, ls=":")
        ax.set(yscale="log", xlabel="rank of the head", xlim=(0, len(own) + 1))
        ax.text(
            0.97, 0.97, f"half of the mass: {100 * first.half_share:.1f} % of heads\nGini {first.gini:.2f}",
            transform=ax.transAxes, ha="right", va="top", fontsize=8,
        )  # fmt: skip
        ax.set_title(f"{model}\n{first.scoring}, n={first.n}\ntop {top.sum()} of {len(own)} heads")
    axes[0, 0].set(ylabel="head score", ylim=(FLOOR / 1.5, 10 * frame.score.max()))
    for threshold, words in ((1e-3, "1e-3"), (5e-3, "5e-3")):
        axes[0, -1].annotate(f" {words}", (1, threshold), xycoords=("axes fraction", "data"), va="center", fontsize=7.5)
    _legend_above(canvas, axes)
    if (frame.score < FLOOR).any():
        axes[0, 0].set_ylabel(f"head score (below {FLOOR:.0e} drawn there)".replace("e-0", "e-"))
    return canvas


BANDS = ("above_5e-3", "between", "below")


def _panels(keys: pd.Series) -> list[str]:
    """The panels of a table in order; raises ValueError unless they are sum, mean or both."""
    found = set(keys)
    if not found or found - {"sum", "mean"}:
        names = ", ".join(sorted(map(str, found))) or "nothing"
        raise ValueError(f"Panels are sum and mean over the referent's tokens; the table has {names}.")
    return [key for key in ("sum", "mean") if key in found]


def sparsity(table: pd.DataFrame) -> Figure:
    """Figure 5: share of heads with a score above 5e-3, between, and below 1e-3, a bar a model, sum beside mean.

    `table`: model, scoring (sum or mean), source (whose numbers), above_5e-3, between, below (percent), n, heads.
    Raises ValueError if the bands of a row do not sum to 100, or a scoring is another.
    """
    _panels(table.scoring)
    off = table[(table[list(BANDS)].sum(axis=1) - 100).abs() > 0.5]
    if len(off):
        row = off.iloc[0]
        raise ValueError(
            f"The bands of {row.model} ({row.scoring}) sum to {row[list(BANDS)].sum():.1f}, not 100: "
            "they are percent of all heads."
        )
    return _drawing("sparsity", _draw_sparsity, table)


def _draw_sparsity(table: pd.DataFrame) -> Canvas:
    panels = _panels(table.scoring)
    bars = list(dict.fromkeys(zip(table.model, table.source)))
    canvas, axes = _axes(4.3 * len(panels) + 1.8, 0.52 * len(bars) + 2.0, 1, len(panels), sharey=True)
    for key, ax in zip(panels, axes[0]):
        own = table[table.scoring == key]
        y = [bars.index(bar) for bar in zip(own.model, own.source)]
        _stack(ax, y, own)
        for x, top, dash, words in ((4, -1.3, ":", "0–4 % above 5e-3"), (15, -0.8, "--", "< 15 % above 1e-3")):
            ax.vlines(x, top - 0.15, len(bars) - 0.5, color="black", lw=1.1, ls=dash)
            ax.text(x + 0.8, top, f"paper: {words}", fontsize=7.5, va="center")
        ax.set(xlim=(0, 100), ylim=(len(bars) - 0.5, -1.6), xlabel="share of heads (%)")
        ax.tick_params(axis="y", length=0, labelsize=8)
        ax.set_title(LABEL[key])
    facts = [table[(table.model == m) & (table.source == s)] for m, s in bars]
    axes[0, 0].set_yticks(
        range(len(bars)), [f"{m} ({s})\n{_n(f)}, {f.heads.iloc[0]:.0f} heads" for (m, s), f in zip(bars, facts)]
    )
    _legend_above(canvas, axes)
    return canvas


def _stack(ax, y: Sequence[int], rows: pd.DataFrame) -> None:
    left = np.zeros(len(rows))
    behind = {"boxstyle": "square,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85}
    for band in BANDS:
        shares = rows[band].to_numpy()
        style = {"color": COLOUR[band], "hatch": HATCH.get(band), "ec": "#777777", "lw": 0.5}
        ax.barh(y, shares, 0.62, left=left, label=f"score {LABEL[band]}", **style)
        for at, start, share in zip(y, left, shares):
            if share >= 4:
                ax.text(start + share / 2, at, f"{share:.0f}", ha="center", va="center", fontsize=7.5, bbox=behind)
        left = left + shares


def area_dependence(table: pd.DataFrame) -> Figure:
    """Share of heads above 5e-3 against the size of the referent, a line a model, sum beside mean over its tokens.

    `table`: model, keys (sum or mean), area (median percent of the picture that the referents of a bin cover), share
    (percent of heads), low, high, n (samples of the bin). Raises ValueError if keys is another.
    """
    _panels(table["keys"])
    return _drawing("area_dependence", _draw_area_dependence, table)


def _draw_area_dependence(table: pd.DataFrame) -> Canvas:
    panels, widest = _panels(table["keys"]), table.area.max()
    canvas, axes = _axes(3.9 * len(panels) + 0.4, 3.9, 1, len(panels))
    looks = _looks(list(dict.fromkeys(table.model)))
    for key, ax in zip(panels, axes[0]):
        own = table[table["keys"] == key]
        for i, (model, look) in enumerate(looks.items()):
            rows = own[own.model == model].sort_values("area")
            x = rows.area + 0.012 * widest * (i - (len(looks) - 1) / 2)  # apart, or equal areas hide the intervals
            errors = [(rows.share - rows.low).clip(lower=0), (rows.high - rows.share).clip(lower=0)]
            ax.errorbar(x, rows.share, errors, label=model, ms=5, lw=1.5, elinewidth=0.8, capsize=2, **look)
        ax.set(xlabel="picture covered by the referent\n(%, median of the bin; models drawn side by side)")
        ax.set(xlim=(0, 1.08 * widest))
        ax.set(ylim=(0, max(1.0, 1.08 * np.nanmax(own[["share", "high"]].to_numpy()))))
        ax.set_title(f"{LABEL[key]}\n{_n(own)} a bin")
    axes[0, 0].set_ylabel("heads with a score above 5e-3 (%)")
    _legend_above(canvas, axes)
    return canvas


# ---------------------------------------------------------------- pictures with boxes and attention


def _picture_rows(panel: str, image: Image.Image) -> list[dict]:
    """The picture itself as facts: one line a pixel row, hexadecimal RGB (at most 256 pixels wide)."""
    scale = min(1.0, 256 / max(image.size))
    small = image.convert("RGB").resize([max(1, round(side * scale)) for side in image.size])
    width, height = image.size
    return [
        {"panel": panel, "fact": "pixels", "row": i, "x1": width, "y1": height, "text": line.tobytes().hex()}
        for i, line in enumerate(np.asarray(small))
    ]


def _box_row(panel: str, fact: str, box: Box, text: str = "") -> dict:
    return {"panel": panel, "fact": fact, "text": text, **dict(zip(("x0", "y0", "x1", "y1"), map(float, box)))}


def _value_rows(panel: str, picture: np.ndarray) -> list[dict]:
    rows, cols = np.indices(picture.shape)
    return [
        {"panel": panel, "fact": "attention", "row": r, "col": c, "value": round(float(v), 6)}
        for r, c, v in zip(rows.ravel(), cols.ravel(), picture.ravel())
    ]


def example(image: Image.Image, box: Box, grid: TokenGrid, text: str, reply: Box | None = None) -> Figure:
    """One sample on the token grid: the referent's tokens (K_s, any overlap) shaded, its box, and the reply's box."""
    rows = _picture_rows(text, image) + [_box_row(text, "referent", box)]
    rows += _value_rows(text, grid.picture(grid.tokens_in(box)))
    if reply:
        rows.append(_box_row(text, "reply", reply))
    return _drawing("example", _draw_example, pd.DataFrame(rows))


def _draw_example(frame: pd.DataFrame) -> Canvas:
    canvas, axes = _axes(9.0, 3.5, 1, 2)
    text = frame.panel.iloc[0]
    for ax, title in zip(axes[0], ("picture", "image tokens; shaded: those the referent's box overlaps")):
        width, height = _show_picture(ax, frame)
        _show_boxes(ax, frame)
        ax.set_title(title)
    inside = frame[frame.fact == "attention"].pivot(index="row", columns="col", values="value").to_numpy()
    rows, cols = inside.shape
    for (r, c), value in np.ndenumerate(inside):
        cell = (c * width / cols, r * height / rows), width / cols, height / rows
        face = COLOUR["referent"] + "55" if value else "none"
        ax.add_patch(Rectangle(*cell, fc=face, ec="#888888", lw=0.5))
    axes[0, 0].legend(loc="upper left", fontsize=7, frameon=True)
    canvas.suptitle(f"“{text}”   ({rows} x {cols} = {rows * cols} tokens, {int(inside.sum())} in the box)", fontsize=10)
    return canvas


def attention_maps(looks: Sequence[tuple[str, Image.Image, Box, TokenGrid, Mapping[str, np.ndarray]]]) -> Figure:
    """Attention over images: a row per sample (text, image, referent, grid, maps), a panel per map (values [V]).

    The panels of a row share one colour scale, and each says which share of its attention lies in the referent's box.
    """
    rows = []
    for i, (text, image, box, grid, maps) in enumerate(looks):
        inside = grid.tokens_in(box)
        for title, values in maps.items():
            mass, total = values[inside].sum(), values.sum()
            share = (
                f"{100 * mass / total:.0f} % on tokens of the box" if total > 1e-3 else "no attention on the picture"
            )
            panel = f"{title}: {total:.2f}\n{share}"
            facts = _picture_rows(panel, image) + [_box_row(panel, "referent", box, text)]
            rows += [fact | {"sample": i} for fact in facts + _value_rows(panel, grid.picture(values))]
    return _drawing("attention_maps", _draw_attention_maps, pd.DataFrame(rows))


def reply_rows(
    text: str, image: Image.Image, box: Box, grid: TokenGrid, tokens: Sequence[str], rows: np.ndarray, head: str
) -> Figure:
    """The reply token by token: where one head looks while each token is predicted. `rows` float [tokens, V].

    Of a reply of more than sixteen tokens only those with a digit are drawn, the first sixteen of them.
    """
    inside, facts = grid.tokens_in(box), []
    digits = [i for i, token in enumerate(tokens) if any(c.isdigit() for c in token)] or list(range(len(tokens)))
    for i in digits[:16] if len(tokens) > 16 else range(len(tokens)):
        values, of = rows[i], f" of {len(tokens)}" * (len(tokens) > 16)
        panel = f"{i + 1}{of}: {tokens[i]}\n{values[inside].sum():.2f} on the referent"
        facts += _picture_rows(panel, image) + [_box_row(panel, "referent", box, f"{head}: {text}")]
        facts += _value_rows(panel, grid.picture(values))
    return _drawing("attention_maps", _draw_attention_maps, pd.DataFrame(facts).assign(sample=0))


def _draw_attention_maps(frame: pd.DataFrame) -> Canvas:
    panels = list(frame.groupby(["sample", "panel"], sort=False))
    cols = min(5, frame.groupby("sample").panel.nunique().max())
    rows = -(-len(panels) // cols)
    canvas, axes = _axes(2.7 * cols, 2.25 * rows + 0.3, rows, cols)
    for ax in axes.ravel()[len(panels) :]:
        ax.set_axis_off()
    top = frame[frame.fact == "attention"].groupby("sample").value.max()
    for i, (((sample, title), facts), ax) in enumerate(zip(panels, axes.ravel())):
        width, height = _show_picture(ax, facts, fade=0.45)
        heat = facts[facts.fact == "attention"].pivot(index="row", columns="col", values="value").to_numpy()
        style = {"cmap": "magma", "alpha": 0.65, "interpolation": "nearest", "vmin": 0, "vmax": max(top[sample], 1e-3)}
        shown = ax.imshow(heat, extent=(0, width, height, 0), **style)
        _show_boxes(ax, facts)
        words = facts.loc[facts.fact == "referent", "text"].iloc[0]
        ax.set_title(title, fontsize=8)
        if i % cols == 0 and (rows == 1 or frame["sample"].nunique() > 1 or i == 0):
            ax.set_ylabel("\n".join(textwrap.wrap(words, 24)), fontsize=8)
        if (i + 1) % cols == 0 or i + 1 == len(panels):
            bar = canvas.colorbar(shown, ax=ax, shrink=0.7, pad=0.02)
            bar.ax.tick_params(labelsize=6)
    return canvas


def before_after(panels: Sequence[tuple[str, Image.Image, Box, Mapping[str, Box | None]]]) -> Figure:
    """Pictures with the referent and the boxes replied under several conditions.

    `panels`: (expression, image, referent, {condition: replied box or None}). A missing box is named under its picture.
    """
    rows = []
    for i, (text, image, referent, boxes) in enumerate(panels):
        panel = f"{i}"
        rows += _picture_rows(panel, image) + [_box_row(panel, "title", Box(0, 0, 0, 0), text)]
        rows.append(_box_row(panel, "referent", referent))
        for condition, box in boxes.items():
            rows.append(
                _box_row(panel, condition, box) if box else {"panel": panel, "fact": "no box", "text": condition}
            )
    return _drawing("before_after", _draw_before_after, pd.DataFrame(rows))


def _draw_before_after(frame: pd.DataFrame) -> Canvas:
    panels = list(frame.groupby("panel", sort=False))
    cols = min(4, len(panels))
    height = -(-len(panels) // cols)
    canvas, axes = _axes(2.9 * cols, 2.6 * height + 0.3, height, cols)
    for ax in axes.ravel()[len(panels) :]:
        ax.set_axis_off()
    for (_, facts), ax in zip(panels, axes.ravel()):
        _show_picture(ax, facts)
        _show_boxes(ax, facts)
        title = facts.loc[facts.fact == "title", "text"].iloc[0]
        ax.set_title("\n".join(textwrap.wrap(title, 30)))
        if missing := list(facts.loc[facts.fact == "no box", "text"]):
            ax.set_xlabel(f"no box: {', '.join(LABEL.get(m, m) for m in missing)}", fontsize=7)
    handles = {}
    for ax in axes.ravel():
        handles |= dict(zip(*reversed(ax.get_legend_handles_labels())))
    canvas.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles), fontsize=8)
    return canvas


def _show_picture(ax, facts: pd.DataFrame, fade: float = 0.0) -> tuple[float, float]:
    lines = facts[facts.fact == "pixels"].sort_values("row")
    pixels = np.array([np.frombuffer(bytes.fromhex(t), dtype=np.uint8).reshape(-1, 3) for t in lines.text])
    width, height = lines.x1.iloc[0], lines.y1.iloc[0]
    shown = (pixels * (1 - fade) + 255 * fade).astype(np.uint8)
    ax.imshow(shown, extent=(0, width, height, 0), interpolation="nearest")
    ax.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    for spine in ax.spines.values():
        spine.set_visible(False)
    return width, height


_BOX_STYLE = {
    "referent": dict(ec=COLOUR["referent"], lw=2.6, ls="-"), "reply": dict(ec="black", lw=1.6, ls="--"),
    "unmasked": dict(ec="black", lw=1.6, ls="--"), "vrh": dict(ec=COLOUR["vrh"], lw=2.2, ls="-."),
    "random": dict(ec="#555555", lw=1.4, ls=":"),
}  # fmt: skip


_OUTSET = {"unmasked": 1.0, "random": 2.0, "reply": 1.0}  # pixels outward, so that equal boxes stay visible


def _show_boxes(ax, facts: pd.DataFrame) -> None:
    label = {"vrh": "reply, VRHs ablated", "random": "reply, random heads ablated", "unmasked": "reply, unmasked"}
    for row in facts[facts.fact.isin(list(_BOX_STYLE))].itertuples():
        out = _OUTSET.get(row.fact, 0.0)
        corner, width, height = (row.x0 - out, row.y0 - out), row.x1 - row.x0 + 2 * out, row.y1 - row.y0 + 2 * out
        style = _BOX_STYLE[row.fact] | {"label": label.get(row.fact, row.fact)}
        ax.add_patch(Rectangle(corner, width, height, fill=False, **style))


def ablation_view(
    scores: HeadScores,
    k: int,
    accuracies: Mapping[str, float],
    picture: tuple[str, Image.Image, Box, Mapping[str, Box | None]],
) -> Figure:
    """One position of the k slider: the cut heads, the accuracy that is left, one picture's replies."""
    frame = head_map(scores, scores.top(k)).frame.assign(panel="heads", fact="head")
    text, image, referent, boxes = picture
    rows = _picture_rows(text, image) + [_box_row(text, "referent", referent)]
    rows += [_box_row(text, c, b) if b else {"panel": text, "fact": "no box", "text": c} for c, b in boxes.items()]
    rows += [{"panel": "accuracy", "fact": "accuracy", "text": c, "value": v} for c, v in accuracies.items()]
    return _drawing("ablation_view", _draw_ablation_view, pd.concat([frame, pd.DataFrame(rows)], ignore_index=True))


def _draw_ablation_view(frame: pd.DataFrame) -> Canvas:
    canvas, axes = _axes(10.5, 3.3, 1, 3, width_ratios=[3, 2, 3])
    grid, bars, picture = axes[0]
    heads = frame[frame.fact == "head"]
    _outlined_map(grid, heads)
    grid.set_title(f"{heads.model.iloc[0]}: {(heads['rank'] > 0).sum()} of {len(heads)} heads cut")
    accuracy = frame[frame.fact == "accuracy"]
    bars.barh(range(len(accuracy)), accuracy.value, color=[COLOUR.get(c, "#56B4E9") for c in accuracy.text])
    bars.set(yticks=range(len(accuracy)), yticklabels=[LABEL.get(c, c) for c in accuracy.text], xlim=(0, 100))
    for y, value in enumerate(accuracy.value):
        bars.text(min(value + 2, 80), y, f"{value:.1f}", va="center", fontsize=8)
    bars.set_title("Acc@IoU 0.5 (%)")
    facts = frame[~frame.fact.isin(["head", "accuracy"])]
    _show_picture(picture, facts)
    _show_boxes(picture, facts)
    picture.set_title("\n".join(textwrap.wrap(facts.panel.iloc[0], 36)))
    picture.legend(loc="upper left", bbox_to_anchor=(0, -0.02), fontsize=7, ncols=2)
    return canvas


def _outlined_map(ax, heads: pd.DataFrame) -> None:
    """Scores [layers, heads], brighter for higher; the ranked heads outlined."""
    values = heads.pivot(index="layer", columns="head", values="score")
    ax.imshow(values, cmap="cividis", aspect="auto", origin="lower", vmin=min(0.0, values.to_numpy().min()))
    for row in heads[heads["rank"] > 0].itertuples():
        ax.add_patch(Rectangle((row.head - 0.5, row.layer - 0.5), 1, 1, fill=False, ec=COLOUR["vrh"], lw=1.8))
    ax.set(xlabel="head", ylabel="layer")


def design_view(
    scores: HeadScores,
    k: int,
    name: str,
    formula: str,
    accuracies: Mapping[str, tuple[float, float, float] | None],
) -> Figure:
    """One point of the design space: its head map, and the accuracy its top k heads leave.

    `name` the method it is ("" for none); `formula` plain text; `accuracies` (percent, low, high) by condition, in
    order (unmasked, this scoring, random), None where nothing was measured.
    """
    frame = head_map(scores, scores.top(k)).frame.assign(fact="head")
    rows = [{"fact": "name", "text": name or "no named method"}, {"fact": "formula", "text": formula}]
    for condition, measured in accuracies.items():
        value, low, high = measured or (np.nan,) * 3
        rows.append({"fact": "accuracy", "text": condition, "value": value, "low": low, "high": high})
    frame = pd.concat([frame, pd.DataFrame(rows)], ignore_index=True)
    frame.attrs["runs"] = list(scores.runs)
    return _drawing("design_view", _draw_design_view, frame)


def _draw_design_view(frame: pd.DataFrame) -> Canvas:
    heads, accuracy = frame[frame.fact == "head"], frame[frame.fact == "accuracy"]
    name, formula = (str(frame.loc[frame.fact == fact, "text"].iloc[0]) for fact in ("name", "formula"))
    lines = [line for part in formula.splitlines() for line in textwrap.wrap(part, 105)]
    first, cut = heads.iloc[0], (heads["rank"] > 0).sum()
    canvas = Canvas(figsize=(8.6, 3.9 + 0.17 * len(lines)), layout="constrained")
    layout = {"height_ratios": [0.17 * max(1, len(lines)), 3.4], "width_ratios": [3, 2]}
    axes = canvas.subplot_mosaic([["words", "words"], ["map", "bars"]], gridspec_kw=layout)
    canvas.suptitle(name, fontsize=11, fontweight="bold")
    axes["words"].set_axis_off()
    axes["words"].text(0.5, 0.5, "\n".join(lines), ha="center", va="center", fontsize=8, parse_math=False)
    _outlined_map(axes["map"], heads)
    axes["map"].set_title(f"{first.model}: top {cut} of {len(heads)} heads, n={first.n:.0f}")
    bars = axes["bars"]
    for y, row in enumerate(accuracy.itertuples()):
        _accuracy_bar(bars, y, row)
    bars.set_yticks(range(len(accuracy)), [LABEL.get(c, c) for c in accuracy.text])
    bars.set(xlim=(0, 118), xticks=range(0, 101, 20), ylim=(len(accuracy) - 0.4, -0.6), xlabel="Acc@IoU 0.5 (%)")
    bars.set_title(f"accuracy, {cut} heads cut, 95 % intervals")
    return canvas


def refused(reason: str) -> Figure:
    """The reason why there is nothing to draw, in the place of a picture."""
    return _drawing("refused", _draw_refused, pd.DataFrame({"text": [reason]}))


def _draw_refused(frame: pd.DataFrame) -> Canvas:
    canvas = Canvas(figsize=(8.6, 1.6), layout="constrained")
    words = "\n".join(textwrap.wrap(str(frame.text.iloc[0]), 100))
    canvas.text(0.5, 0.5, words, ha="center", va="center", fontsize=9, color="#555555", parse_math=False)
    return canvas


def _accuracy_bar(ax, y: int, row) -> None:
    if np.isnan(row.value):
        ax.text(2, y, "not measured", va="center", fontsize=8, style="italic", color="#555555")
        return
    ax.barh(y, row.value, 0.6, color=COLOUR.get(row.text, COLOUR["vrh"]), alpha=0.85)
    ax.errorbar(row.value, y, xerr=[[row.value - row.low], [row.high - row.value]], color="black", capsize=3, lw=1)
    ax.text(row.high + 2, y, f"{row.value:.1f}", va="center", fontsize=8)


# ---------------------------------------------------------------- stability and cost


def one_token(sweep: pd.DataFrame) -> Figure:
    """Figure 7b: accuracy after ablating heads found from one random output token, from all, and random heads."""
    return _drawing("one_token", _draw_one_token, sweep)


def _draw_one_token(sweep: pd.DataFrame) -> Canvas:
    canvas, axes = _axes(4.6, 3.2)
    ax, k = axes[0, 0], sweep.k.max()
    rows = sweep[(sweep.k == k) | (sweep.condition == "unmasked")]
    names = {
        "unmasked": "unmasked",
        "random": "random\nheads",
        "one output token": "one random\noutput token",
        "vrh": "all output\ntokens",
    }
    names = {c: n for c, n in names.items() if (rows.condition == c).any()}
    for x, condition in enumerate(names):
        part = rows[rows.condition == condition]
        mean, low, high = part.accuracy.mean(), part.low.min(), part.high.max()
        ax.bar(
            x,
            mean,
            0.6,
            color=COLOUR[condition],
            alpha=0.85,
            hatch="//" if condition == "one output token" else None,
            ec="white",
        )
        ax.errorbar(x, mean, [[max(0, mean - low)], [max(0, high - mean)]], color="black", capsize=3, lw=1)
        ax.text(x + 0.06, mean + 1.5, f"{mean:.1f}", ha="left", fontsize=8)
    ax.set(xticks=range(len(names)), xticklabels=names.values(), ylabel="Acc@IoU 0.5 (%)", ylim=(0, 100))
    seeds = rows.loc[rows.condition == "random", "seed"].nunique()
    ax.set_title(
        f"{rows.model.iloc[0]}: {k} heads ablated, n={rows.n.iloc[0]}\n95 % Wilson; random: hull over {seeds} seeds"
    )
    return canvas


def few_samples(stable: pd.DataFrame) -> Figure:
    """Figure 7c: overlap of the top k from few samples with the top k from all, mean and range over draws."""
    return _drawing("few_samples", _draw_few_samples, stable)


def _draw_few_samples(stable: pd.DataFrame) -> Canvas:
    canvas, axes = _axes(4.6, 3.2)
    ax, k = axes[0, 0], stable.k.iloc[0]
    by_n = stable.groupby("n").overlap
    sizes = list(by_n.groups)
    ax.fill_between(range(len(sizes)), by_n.min(), by_n.max(), color=COLOUR["vrh"], alpha=0.18, lw=0)
    ax.plot(range(len(sizes)), by_n.mean(), color=COLOUR["vrh"], marker="o", ms=4)
    ax.axhline(k, color="black", lw=0.8, ls=":")
    ax.set(
        xticks=range(len(sizes)),
        xticklabels=sizes,
        xlabel="detection samples",
        ylabel=f"shared with the top {k} of all",
        ylim=(0, k * 1.08),
    )
    ax.set_title(
        f"{stable.model.iloc[0]}: heads from few samples\nmean and range of {stable.seed.nunique()} draws a size"
    )
    return canvas


def cost(table: pd.DataFrame) -> Figure:
    """Table A11 as a picture: seconds and peak memory of one detection pass, captured rows against eager attention."""
    return _drawing("cost", _draw_cost, table)


def _draw_cost(table: pd.DataFrame) -> Canvas:
    canvas, axes = _axes(7.2, 3.0, 1, 2)
    names = {"rows": "captured rows", "eager": "eager attention"}
    for ax, column, label in zip(
        axes[0], ("seconds", "peak_mib"), ("seconds (best of runs)", "peak extra memory (MiB)")
    ):
        for method, rows in table.groupby("method", sort=False):
            ax.plot(
                rows.visual_tokens, rows[column], color=COLOUR[method], marker=MARKER[method], ms=4, label=names[method]
            )
        ax.set(xlabel="image tokens", ylabel=label, ylim=(0, None))
        ax.legend(fontsize=8)
    canvas.suptitle(
        f"{table.model.iloc[0]}: one language-model pass, vision features and reply given",
        fontsize=9,
        fontweight="bold",
    )
    return canvas


_DRAW: dict[str, Callable[[pd.DataFrame], Canvas]] = {
    "head_map": _draw_head_map,
    "head_maps": _draw_head_maps,
    "ablation_by_model": _draw_ablation_by_model,
    "published_heads": _draw_published_heads,
    "accuracy_vs_k": _draw_accuracy_vs_k,
    "variants": _draw_variants,
    "prior_methods": _draw_prior_methods,
    "method_overlap": _draw_method_overlap,
    "sorted_scores": _draw_sorted_scores,
    "sparsity": _draw_sparsity,
    "area_dependence": _draw_area_dependence,
    "example": _draw_example,
    "attention_maps": _draw_attention_maps,
    "before_after": _draw_before_after,
    "ablation_view": _draw_ablation_view,
    "design_view": _draw_design_view,
    "refused": _draw_refused,
    "one_token": _draw_one_token,
    "few_samples": _draw_few_samples,
    "cost": _draw_cost,
}
