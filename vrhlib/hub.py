"""Where real models and data come from: the Hugging Face Hub at one commit, or a local copy of it.

A folder `data/local/<Hub id>` goes before the Hub (`hf download <id> --local-dir ...` makes one); nothing else ever
stands in for a real name. Without a pin, the commit that answers first is written to `data/hub.json` and used from
then on. `HF_HOME`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`, `HF_TOKEN` and their like mean here what they mean everywhere.

A table must have the published number of rows. `allow_drift=True`, or VRHLIB_ALLOW_DRIFT=1 in the environment, goes on
with another number; the samples then carry a note that says so.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vrhlib import store

TIMEOUT = 20  # seconds for one answer of a server


@dataclass(frozen=True)
class Source:
    """A table of the Hub: what it is, how large it should be, and under which terms.

    `ids` in order of preference, the first that answers counts; `rows` as published, so that another selection of rows
    is noticed; `columns` that must be there; `gb` of its download, roughly; `licence` as its authors state it.
    """

    ids: tuple[str, ...]
    split: str
    rows: int
    columns: tuple[str, ...]
    gb: float
    licence: str
    metric: str
    config: str | None = None
    revision: str | None = None  # of the first id
    needs: str = ""  # what the user has to bring, in words


def local_copy(name: str) -> Path | None:
    """The folder that stands for a Hub id on this machine, if there is one."""
    folder = store.ROOT / "data" / "local" / name
    return folder if folder.is_dir() else None


def _pins() -> Path:
    return store.ROOT / "data" / "hub.json"


def pinned(name: str, given: str | None = None) -> str | None:
    """The commit to ask for: the one given in code, else the one that was used first, else None (the newest)."""
    if given:
        return given
    try:
        return json.loads(_pins().read_text()).get(name)
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f"{_pins()} is not a JSON table of commits ({error}). Delete it to use the newest commits."
        ) from error


def pin(name: str, commit: str | None) -> None:
    """Remember which commit answered, so that the next run asks for the same."""
    if commit and pinned(name) is None:
        known = json.loads(_pins().read_text()) if _pins().exists() else {}
        store.write_atomic(_pins(), json.dumps(dict(sorted((known | {name: commit}).items())), indent=1) + "\n")


def offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


# ---------------------------------------------------------------- tables


def open_table(source: Source, allow_drift: bool = False):
    """The rows of a table (a `datasets.Dataset`, pictures undecoded), and in words what was opened.

    Raises OSError where none of the ids can be had (no network, gated, unknown) and ValueError where what came is not
    the table meant: other columns, another number of rows (unless `allow_drift`), damaged files. Each says what to do.
    """
    tried = []
    for name in source.ids:
        try:
            table, commit = _load(source, name)
        except OSError as error:
            tried.append(str(error))
            if isinstance(error, Unreachable) and not offline():
                break  # the next id would wait for the same network
            continue
        check(source, name, table.column_names, len(table), commit, allow_drift)
        config = f"{source.config} " if source.config else ""
        return table, f"{name}@{commit[:18]} {config}{source.split}"
    raise OSError("\n".join(tried))


class Unreachable(OSError):
    """The Hub does not answer, or may not be asked."""


def _load(source: Source, name: str):
    import datasets

    folder = local_copy(name)
    revision = None if folder else pinned(name, source.revision if name == source.ids[0] else None)
    if os.environ.get("VRH_PROGRESS") == "text":
        datasets.disable_progress_bars()  # in a notebook they leave dead widgets behind
    # `datasets` knows a local folder by its path: without a cache of its own, a changed one is served as it was before.
    cache = str(Path(datasets.config.HF_DATASETS_CACHE) / f"local-{_listing(folder, times=True)}") if folder else None
    try:
        table = datasets.load_dataset(
            str(folder or name), source.config, split=source.split, revision=revision, cache_dir=cache,
            verification_mode="no_checks",  # rows are counted below
        )  # fmt: skip
    except Exception as error:  # `datasets` has many ways to say so; each becomes one line with the next step
        raise _explained(name, source, folder, error) from error
    commit = f"local:{_listing(folder)}" if folder else _commit(table) or revision or "unknown"
    if revision and re.fullmatch("[0-9a-f]{40}", revision) and commit != revision:
        raise Unreachable(  # offline, `datasets` serves whichever commit it has
            f"{name} is on this machine at commit {commit}, but {revision} is pinned, and that one is not here. "
            "Connect once, or correct the pin: data/hub.json, or vrhlib/real.py."
        )
    if not folder:
        pin(name, _commit(table))
    for column, feature in table.features.items():
        if isinstance(feature, datasets.Image):
            table = table.cast_column(column, datasets.Image(decode=False))
    return table, commit


def _explained(name: str, source: Source, folder: Path | None, error: Exception) -> Exception:
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    said = " ".join(str(error).split())[:300]
    page = f"https://huggingface.co/datasets/{name}"
    bring = f"or put a copy of it at {store.ROOT / 'data' / 'local' / name}"
    if isinstance(error, DatasetNotFoundError) and "gated" in said:
        return OSError(f"{name} is gated. Accept its terms at {page}, then `hf auth login` with your token; {bring}.")
    if isinstance(error, DatasetNotFoundError) and said.startswith("Revision"):
        return OSError(f"{said} Correct its pin: data/hub.json, or vrhlib/real.py. Commits are listed at {page}.")
    if isinstance(error, DatasetNotFoundError):
        return OSError(f"{name} is not on the Hub (any more), or not public: {said} Look at {page}, {bring}.")
    arrow = type(error).__module__.startswith("pyarrow") or "thrift" in said  # the schema is read before the rows
    if isinstance(error, DatasetGenerationError) or arrow:
        again = f"put them at {folder} anew" if folder else f"`hf cache rm dataset/{name}`, and run this again"
        return ValueError(
            f"The files of {name} cannot be read: {' '.join(str(error.__cause__ or error).split())[:200]} They are "
            f"damaged, or not what their name says (a pointer of git-lfs?). Fetch them again: {again}."
        )
    silent = isinstance(error, ConnectionError) or re.search("connect|timeout", type(error).__name__, re.IGNORECASE)
    if silent or "offline" in said.casefold():
        return Unreachable(
            f"{name} is not on this machine and the Hub cannot be reached ({said}). Connect once (a proxy needs "
            f"HTTPS_PROXY), take over another machine's HF_HOME, {bring}."
        )
    if isinstance(error, ValueError | RuntimeError | FileNotFoundError):
        kind = ValueError if folder else OSError
        more = f" Put a whole copy at {folder}." if folder else f" Look at {page}: the data set may have moved."
        return kind(f"{name} is laid out in another way than expected: {said} Wanted: {_wanted(source)}.{more}")
    return OSError(f"Cannot load {name}: {type(error).__name__}: {said} See {page}, {bring}.")


def _wanted(source: Source) -> str:
    config = f"configuration {source.config!r}, " if source.config else ""
    return f"{config}split {source.split!r}, {source.rows} rows"


def drift_allowed(allow_drift: bool = False) -> bool:
    return allow_drift or os.environ.get("VRHLIB_ALLOW_DRIFT") == "1"


def check(source: Source, name: str, columns: Sequence[str], rows: int, commit: str, allow_drift: bool) -> None:
    """Raises ValueError where a table lacks columns, or has other rows than published and drift is not allowed."""
    if missing := [c for c in source.columns if c not in columns]:
        raise ValueError(
            f"{name} at {commit} lacks the columns {', '.join(missing)}; it has {', '.join(columns)}. Another version "
            "of the data set: pin an older commit (vrhlib/real.py, or data/hub.json where that pins none)."
        )
    if rows != source.rows and not drift_allowed(allow_drift):
        raise ValueError(
            f"{name} at {commit}, split {source.split}, has {rows} rows, not {source.rows} as published: numbers would "
            "not be comparable. Pin an older commit (vrhlib/real.py, or data/hub.json where that pins none), or go on "
            "with allow_drift=True (VRHLIB_ALLOW_DRIFT=1) and say so."
        )


def _commit(table) -> str | None:
    """The commit that a table was downloaded at: `datasets` names the folder of its files after it."""
    for file in table.cache_files:
        if found := re.search(r"/([0-9a-f]{40})/", file["filename"]):
            return found[1]
    return None


def _listing(folder: Path, times: bool = False) -> str:
    """Names and sizes (and times) of a local copy's files; their bytes can be gigabytes."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and ".cache" not in p.parts)
    facts = [(str(p.relative_to(folder)), p.stat()) for p in files]
    return store.digest([[name, stat.st_size, *[stat.st_mtime_ns] * times] for name, stat in facts])


# ---------------------------------------------------------------- single files


class FileMissing(OSError):
    """A file that could not be had, and why."""


_silent: Counter[str] = Counter()  # hosts, and how often they did not answer at all
GIVE_UP = 3


def fetch(name: str, folders: Sequence[str], urls: Iterable[str] = (), sha256: str | None = None) -> Path:
    """A file: in one of `folders` below data/local, else fetched from the first address that answers, into the first.

    Raises FileMissing with the reason. A file of another checksum than `sha256` is not used, nor is a web page. A host
    that did not answer three times is not asked again by this process.
    """
    places = [store.ROOT / "data" / "local" / folder / name for folder in folders]
    reason = "not in data/local"
    for place in places:
        if place.is_file() and _fits(place, sha256):
            return place
    for url in [] if offline() else urls:
        host = urllib.parse.urlsplit(url).netloc
        if _silent[host] >= GIVE_UP:
            reason = f"no answer from {host}, given up"
            continue
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                page, content = answer.headers.get_content_type() == "text/html", answer.read()
        except urllib.error.HTTPError as error:
            reason = f"no answer from {host} ({error.code})"
            continue
        except (OSError, http.client.HTTPException, ValueError) as error:  # no network, cut short, not an address
            _silent[host] += 1
            reason = f"no answer from {host} ({type(error).__name__})"
            continue
        if page:
            reason = f"{host} gives a web page in its place"
            continue
        target = store.write_atomic(places[0], content)
        if _fits(target, sha256):
            return target
        target.unlink()
        reason = f"{host} gives another file (checksum)"
    raise FileMissing(reason + (", and HF_HUB_OFFLINE forbids to fetch it" if offline() else ""))


def _fits(path: Path, sha256: str | None) -> bool:
    import hashlib

    if sha256 is None:
        return path.stat().st_size > 0
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sha256


# ---------------------------------------------------------------- before a run


def cached(name: str, kind: str, revision: str | None = None) -> bool:
    """Whether a repository was downloaded before (to this HF_HOME), or stands in data/local."""
    if local_copy(name):
        return True
    if kind == "dataset":
        from datasets import config

        owner, _, repo = name.rpartition("/")
        snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", repo)).lower()
        return any(Path(config.HF_DATASETS_CACHE).glob(f"{owner}___{snake}/**/*.arrow"))
    from huggingface_hub import try_to_load_from_cache

    weights = ("model.safetensors.index.json", "model.safetensors")
    return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in weights)


def reachable(name: str, kind: str, revision: str | None = None) -> str | None:
    """None if the Hub would hand over this repository now; else why not, and what to do."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name}"
    if offline():
        return f"{name} is not on this machine, and HF_HUB_OFFLINE is set. Unset it once, or bring the files along."
    try:
        info = HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=TIMEOUT)
        if info.gated:
            HfApi().auth_check(name, repo_type=kind)
    except GatedRepoError:
        return f"{name} is gated: accept its terms at {page}, then `hf auth login`."
    except RevisionNotFoundError:
        return f"{name} has no commit {revision} any more: correct its pin (vrhlib/profiles.py or data/hub.json)."
    except RepositoryNotFoundError:
        return f"{name} is not on the Hub (any more), or needs `hf auth login`: see {page}."
    except Exception as error:  # httpx, requests, sockets: all mean that it did not answer
        return f"The Hub does not answer for {name} ({type(error).__name__}): check network and proxy, or HF_ENDPOINT."
    return None


def free_gb(path: Path) -> float:
    """Free space where a path is, or will be."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / 1e9


def cache_folder() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
