#!/usr/bin/env bash
# Every table and figure from a fresh clone. Two commands are all there is to know on a laptop:
#
#     ./run_all.sh          set up an environment, run all notebooks with the embedded models; those that are
#                           up to date since last time are not run again (--again runs them all the same)
#     ./run_all.sh test     set up the same way, run the tests
#
# and two on a GPU:
#
#     ./run_all.sh plan paper   what the real models and benchmarks would take: downloads, memory, hours
#     ./run_all.sh paper        the same notebooks with them; it first makes sure that nothing is missing
#
# The rest is in ./run_all.sh help. Written for bash 3.2, the one that macOS ships.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

usage() {
    cat <<'EOT'
./run_all.sh [nano|paper] [01 03 ...] [NAME=VALUE ...] [--limit N] [--jobs N] [--again] [--strict] [--cluster N|ADDRESS]
                             run notebooks; all of them if none is named. What is up to date is not run again
./run_all.sh plan [nano|paper] [01 03 ...] [NAME=VALUE ...] [--limit N]   what that would run, what it costs, what is
                             cached; how good the embedded models are, or what real ones need (no GPU, no network)
./run_all.sh test [pytest arguments]    run the tests
./run_all.sh test browser [...]         of the tests, those that look at a page in Chromium (apt install chromium)
./run_all.sh page [nano|paper] [MODELS=...]    write figures/<profile>/page/index.html: heads to click away and replies to
                             step through, of six pictures, in one file without a kernel or network, to share
./run_all.sh lab                        open JupyterLab in notebooks/: on this machine only, and with a token, whatever
                             your Jupyter configuration says (JUPYTER_TOKEN chooses the token)
./run_all.sh help                       this text

  nano    (default) embedded models and scenes: CPU, minutes, no network once installed
  paper   four real models on RefCOCO and four more: a GPU (48 GB for full batches of all), 78 GB with downloads, hours. GPU,
          disk and Hub are looked at first; what is missing is said, all at once, and nothing else ever stands in for it

  ./run_all.sh 01                   one notebook
  ./run_all.sh 01 K=3 N_TEST=100    other values for names in a notebook's parameters cell
  ./run_all.sh MODELS=nano-qwen3-vl,nano-internvl3.5    some of a profile's models (BENCHMARKS=: another benchmark)
  ./run_all.sh paper --limit 20     at most 20 samples in every evaluation: a dress rehearsal (the same as N_TEST=20)

  --jobs N         notebooks at once, each in a process of its own. nano: one a core, four at most; paper: one
  --again          also those that are up to date: nothing has changed since that they depend on (cells, parameters,
                   vrhlib, embedded models, published numbers, versions), and all they wrote is still there
  --strict         replies are decoded plainly, without draft verification: slower, to check that it changes none
  --cluster N      samples are shared out to N worker processes (Dask: pip install -e ".[sweep]"), also of several
                   machines: --cluster tcp://host:8786 or DASK_SCHEDULER names a scheduler that runs already, or its
                   scheduler file by its whole path (examples/slurm.md)
  Stopped (Ctrl-C, SIGTERM) or died (out of memory), a run says how to resume. Finished samples are kept.

Environment: the active one if it has what pyproject.toml asks for; else .venv in this folder, made with
a Python >= 3.11 and filled from requirements.lock. Your own always wins: activate it first.
  CUDA             install the torch build for your driver in an environment of your own
                   (pip install torch==2.13.0 torchvision==0.28.0), then pip install -e ".[test]"
  Linux, no GPU    the CPU build of torch spares 2 GB:
                   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ./run_all.sh
  conda            conda env create -f environment.yml && conda activate vrhlib
  the Hub          HF_HOME (where downloads go), HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE=1 (use what is there) work
                   for paper as everywhere; a folder data/local/<Hub id> goes before the Hub. nano never asks it
  VRHLIB_DEVICE    cuda:1 or cpu, say, if you mean it
  VRHLIB_FEATURES_GB    keep vision features of pictures on disk (data/runs), up to so many GB; 0, the default: none
  VRHLIB_BROWSER   the Chromium or Chrome of the tests; else the first on PATH, else Playwright's. Without any, the tests
                   that need one are skipped and say so (where CI is set they fail, unless VRHLIB_NO_BROWSER=1)
EOT
}

say() { printf '\n== %s\n' "$*"; }
refuse() { printf 'run_all.sh: %s\n' "$*" >&2; exit 2; }   # the request is wrong
give_up() { printf 'run_all.sh: %s\n' "$*" >&2; exit 1; }  # the machine is

# ---- 1. Read the command line. All of it, before anything slow: a typo should cost a second, not an install.

# VRHLIB_ROOT moves notebooks, data and figures elsewhere (a writable copy, say); the code stays here.
if [ -n "${VRHLIB_ROOT:-}" ]; then
    VRHLIB_ROOT=$(cd "$VRHLIB_ROOT" 2>/dev/null && pwd -P) || refuse "VRHLIB_ROOT is not a folder"
    export VRHLIB_ROOT
fi
NOTEBOOKS="${VRHLIB_ROOT:-$ROOT}/notebooks"

# Is there a notebook of this number (01) or name (01_detect)?
is_notebook() {
    local path name
    for path in "$NOTEBOOKS"/[0-9][0-9]_*.ipynb; do
        name=$(basename "$path" .ipynb)
        if [ -e "$path" ] && { [ "$1" = "$name" ] || [ "$1" = "${name%%_*}" ]; }; then return 0; fi
    done
    return 1
}

list_notebooks() {
    local path
    for path in "$NOTEBOOKS"/[0-9][0-9]_*.ipynb; do
        [ ! -e "$path" ] || printf ' %s' "$(basename "$path" .ipynb)"
    done
}

command=run
profile=
limit=
cluster=
jobs=
page_models=
words=()
case "${1:-}" in
    -h | --help | help) usage; exit 0 ;;
    plan | page | test | lab) command=$1; shift ;;
esac

if [ "$command" = test ]; then
    words=(${@+"$@"})  # pytest's business; `${@+...}` because an empty "$@" is "unbound" to old bashes
else
    while [ $# -gt 0 ]; do
        word=$1
        shift
        [ "$command" != lab ] || refuse "lab takes no arguments, got '$word'"
        case "$word" in
            nano | paper)
                [ -z "$profile" ] || refuse "one profile at a time, got '$profile' and '$word'"
                profile=$word ;;
            --limit | --limit=*)
                [ -z "$limit" ] || refuse "one --limit at a time"
                case "$word" in
                    *=*) limit=${word#*=} ;;
                    *) limit=${1:-}; [ $# -eq 0 ] || shift ;;
                esac
                case "$limit" in
                    '' | *[!0-9]* | 0*) refuse "--limit takes a whole number >= 1, got '$limit'" ;;
                esac
                words+=(--limit "$limit") ;;
            --jobs | --jobs=*)
                [ "$command" != plan ] || refuse "a plan runs nothing: --jobs is for a run"
                [ -z "$jobs" ] || refuse "one --jobs at a time"
                case "$word" in
                    *=*) jobs=${word#*=} ;;
                    *) jobs=${1:-}; [ $# -eq 0 ] || shift ;;
                esac
                case "$jobs" in
                    '' | *[!0-9]* | 0*) refuse "--jobs takes a whole number >= 1, got '$jobs'" ;;
                esac
                words+=(--jobs "$jobs") ;;
            --cluster | --cluster=*)
                [ -z "$cluster" ] || refuse "one --cluster at a time"
                case "$word" in
                    *=*) cluster=${word#*=} ;;
                    *) cluster=${1:-}; [ $# -eq 0 ] || shift ;;
                esac
                case "$cluster" in
                    '' | -* | 0*) refuse "--cluster takes a number of worker processes or an address like tcp://host:8786," \
                        "got '$cluster'" ;;
                esac
                words+=(--cluster "$cluster") ;;
            --again)
                [ "$command" != plan ] || refuse "a plan runs nothing: --again is for a run"
                words+=(--again) ;;
            --strict)
                words+=(--strict) ;;
            plan | page | test | lab | help)
                refuse "'$word' comes first: ./run_all.sh $word" ;;
            -*)
                refuse "unknown option '$word'; ./run_all.sh help lists what there is" ;;
            [A-Za-z_]*=*)
                words+=("$word") ;;  # whether a notebook knows it, the runner says before it runs anything
            [0-9]*)
                is_notebook "$word" || refuse "no notebook '$word'; there are:$(list_notebooks)"
                words+=("$word") ;;
            *)
                refuse "unknown word '$word'; a notebook (01), nano, paper, plan, page, test, lab, help or NAME=VALUE" ;;
        esac
        if [ "$command" = page ]; then
            case "$word" in
                nano | paper) ;;
                MODELS=?*) page_models=${word#*=} ;;
                *) refuse "page takes a profile and MODELS=..., got '$word'" ;;
            esac
        fi
    done
fi
profile=${profile:-nano}

# ---- 2. Find a Python that can run it.

# The code of this checkout, whatever vrhlib is installed: results must belong to the commit they name.
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

# Silent if the Python at $1 meets pyproject.toml (and its test extra, if $2 is "test"); else prints what is unmet.
# The code in it is old-fashioned on purpose: any Python may be asked, and should answer, not trip over syntax.
unmet() {
    "$1" - "$ROOT" "$2" 2>/dev/null <<'EOT' || echo "it cannot be run"
import sys
root, extra = sys.argv[1:]
if sys.version_info < (3, 11):
    sys.exit(print("it is Python %d.%d, older than 3.11" % sys.version_info[:2]))
import importlib.metadata, importlib.util, os, re, tomllib
with open(os.path.join(root, "pyproject.toml"), "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + (project["optional-dependencies"]["test"] if extra == "test" else [])
installed = {}
for text in wanted:
    try:
        installed[text] = importlib.metadata.version(re.match(r"[\w.-]+", text).group())
    except importlib.metadata.PackageNotFoundError:
        sys.exit(print("it lacks " + text))
from packaging.requirements import Requirement  # present wherever jupyterlab and matplotlib are
for text, version in installed.items():
    if not Requirement(text).specifier.contains(version, prereleases=True):
        sys.exit(print("it has %s %s, not %s" % (Requirement(text).name, version, text)))
found = importlib.util.find_spec("vrhlib")
if found is None or not os.path.samefile(os.path.dirname(os.path.dirname(found.origin)), root):
    print("it imports vrhlib from elsewhere: %s" % (found and found.origin))
EOT
}

# What `python` means to you now: first on PATH, else the environment that says it is active.
active_pythons() {
    command -v python || true
    [ ! -x "${VIRTUAL_ENV:-/nowhere}/bin/python" ] || echo "$VIRTUAL_ENV/bin/python"
    [ ! -x "${CONDA_PREFIX:-/nowhere}/bin/python" ] || echo "$CONDA_PREFIX/bin/python"
    command -v python3 || true
}

# A Python to build .venv from. The named versions first: they are the ones every pinned wheel exists for.
# Being on PATH isn't enough (pyenv puts there a stub of each version it has ever seen), so each is run.
base_python() {
    local name path
    for name in python3.11 python3.12 python3.13 python3 python; do
        path=$(command -v "$name") || continue
        if "$path" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$path"
            return 0
        fi
    done
    return 1
}

VENV="$ROOT/.venv"
MARK="$VENV/installed-from"  # checksum of the lock and pyproject.toml, written when an install is complete
checksum() { cat "$ROOT/requirements.lock" "$ROOT/pyproject.toml" | cksum; }

venv_is_ready() {
    [ -f "$MARK" ] && [ "$(cat "$MARK")" = "$(checksum)" ] && [ -z "$(unmet "$VENV/bin/python" test)" ]
}

build_venv() {
    local base
    base=$(base_python) || give_up "no usable Python >= 3.11 on PATH. Install one with its venv module (apt install" \
        "python3-venv, brew install python@3.12, conda env create -f environment.yml), then run this again."
    say "Installing requirements.lock into .venv, with $base (once; minutes, up to 2 GB, 5 with CUDA's torch)"
    rm -f "$MARK"  # an interrupted install must not look like a finished one
    if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        "$base" -m venv --clear "$VENV" || give_up "could not create $VENV. Is this folder writable and the disk not full?"
    fi
    # The package itself goes in without dependencies, since the lock brought them, setuptools included.
    "$VENV/bin/python" -m pip install --disable-pip-version-check -r "$ROOT/requirements.lock" &&
        "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e "$ROOT" ||
        give_up "pip failed, see above. Check network and disk space, then run the same command again (it continues)," \
            "or activate an environment of your own that has what pyproject.toml asks for."
    checksum >"$MARK"
}

# Sets PYTHON. $1 is "test" when the test tools are needed too.
set_up() {
    local candidate reason
    while read -r candidate; do
        reason=$(unmet "$candidate" "$1")
        if [ -z "$reason" ]; then
            PYTHON=$candidate
            say "Using the active environment, $PYTHON (it has what pyproject.toml asks for)"
            return
        fi
        say "Not using $candidate: $reason"
    done < <(active_pythons | awk '!seen[$0]++')
    venv_is_ready || build_venv
    PYTHON="$VENV/bin/python"
    export PATH="$VENV/bin:$PATH"  # the tests call ruff and nbstripout by name
    say "Using .venv, as requirements.lock says"
}

# ---- 3. Run it.

export TOKENIZERS_PARALLELISM=false  # else tokenizers warns in every forked process
export HF_HUB_DISABLE_TELEMETRY=1
if [ "$command" = test ] || { [ "$profile" = nano ] && { [ "$command" = run ] || [ "$command" = page ]; }; }; then
    # The embedded models are files of this repository; looking for a newer version of them online would be a bug.
    export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
fi

# `python -m` looks in the current folder first, and somebody's current folder may hold another vrhlib.
cd "$ROOT"

case "$command" in
    run)
        set_up run
        say "Running notebooks, $profile profile (stop with Ctrl-C; finished samples are kept)"
        exec "$PYTHON" -m vrhlib.notebooks run --profile "$profile" ${words[@]+"${words[@]}"}
        ;;
    plan)
        # A plan is read before deciding to install anything, so any Python that can import the runner will do; for
        # real benchmarks it has to read their table, which asks for a little more (no torch).
        needed=vrhlib.notebooks
        [ "$profile" = nano ] || needed="vrhlib.benchmarks, vrhlib.notebooks, datasets"
        while read -r PYTHON; do
            if "$PYTHON" -c "import $needed" 2>/dev/null; then
                exec "$PYTHON" -m vrhlib.notebooks plan --profile "$profile" ${words[@]+"${words[@]}"}
            fi
        done < <([ ! -x "$VENV/bin/python" ] || echo "$VENV/bin/python"; active_pythons; base_python || true)
        echo "No environment yet: ./run_all.sh would first make .venv and install requirements.lock into it, then run"
        echo "$(list_notebooks | tr ' ' '\n' | sed '/^$/d')"
        echo "Costs are in README.md; this table shows them and what is cached once there is an environment."
        ;;
    test)
        set_up test
        say "Running the tests"
        if [ ${#words[@]} -eq 0 ]; then  # all: a process per core, four at most (each loads torch), a file at a time
            words=(-n auto --maxprocesses 4 --dist loadfile)
            export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # processes that share cores and spin threads crawl
        elif [ "${words[0]}" = browser ]; then  # in one process: they share a browser and a JupyterLab
            words[0]=-v
            words=(tests/browser ${words[@]+"${words[@]}"})
        fi
        exec "$PYTHON" -m pytest ${words[@]+"${words[@]}"}
        ;;
    page)
        set_up run
        say "Writing the page to share, $profile profile"
        exec "$PYTHON" -m vrhlib.page --profile "$profile" ${page_models:+--models "$page_models"}
        ;;
    lab)
        set_up run
        say "Opening JupyterLab in notebooks/, for this machine only (stop with Ctrl-C)"
        export JUPYTER_PREFER_ENV_PATH=1  # this environment's kernel, not one that the user registered for another
        exec "$PYTHON" -m vrhlib.notebooks lab
        ;;
esac
