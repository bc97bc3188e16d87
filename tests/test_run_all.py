"""run_all.sh: what it refuses before doing anything, which Python it chooses, when it installs; and the packaging.

Most tests run a copy of the script in a folder of its own, on a PATH that holds a few tools and, in place
of Python, a script that writes down what it was asked. So they need no network and take no time.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = ("bash", "env", "cat", "dirname", "basename", "cksum", "awk", "rm", "tr", "sed", "mkdir", "cp", "touch")
FAKE_PYTHON = """#!/usr/bin/env bash
# A Python that has everything in requirements.lock once pip was run in its environment, and nothing before.
here=$(dirname "$0")
case "$*" in
    "- "*) cat >/dev/null; [ -e "$here/packages" ] || echo "it lacks torch"; exit ;;
    "-c import sys"*) exit ;;
    "-c import vrhlib"*) [ -e "$here/packages" ]; exit ;;
    "-m pip --version") [ -e "$here/pip" ]; exit ;;
    "-m venv"*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python"; touch "$folder/bin/pip" ;;
    "-m pip install"*) [ ! -e "$here/broken" ] || exit 1; touch "$here/packages" ;;
esac
echo "$(basename "$0") $* | offline=${HF_HUB_OFFLINE:-}" >>"$CALLS"
"""


class Sandbox:
    """A checkout with nothing but the script, its two lists of packages, and two empty notebooks."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.calls_file = folder / "a repository", folder / "bin", folder / "calls"
        (self.root / "notebooks").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("run_all.sh", "pyproject.toml", "requirements.lock"):
            shutil.copy(ROOT / name, self.root)
        for name in ("01_one", "02_two"):
            (self.root / "notebooks" / f"{name}.ipynb").touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.environment = {"PATH": str(self.bin), "CALLS": str(self.calls_file)}

    def python(self, name: str, *, packages: bool = False) -> Path:
        path = self.bin / name
        path.write_text(FAKE_PYTHON)
        path.chmod(0o755)
        if packages:
            (self.bin / "packages").touch()
        return path

    def __call__(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
        script = self.root / "run_all.sh"
        return subprocess.run([script, *words], env=self.environment, cwd=cwd, capture_output=True, text=True)

    def calls(self) -> list[str]:
        """What Python was asked to do since the last look."""
        calls = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        self.calls_file.unlink(missing_ok=True)
        return [call.replace(str(self.root), ".") for call in calls]


@pytest.fixture
def sandbox(tmp_path):
    return Sandbox(tmp_path)


# ---- the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("papr", "unknown word 'papr'"),
        ("09", "no notebook '09'; there are: 01_one 02_two"),
        ("01_on", "no notebook '01_on'"),
        ("paper nano", "one profile at a time"),
        ("01 test", "'test' comes first: ./run_all.sh test"),
        ("--fast", "unknown option '--fast'"),
        ("lab 01", "lab takes no arguments"),
        ("--limit", "--limit takes a whole number >= 1, got ''"),
        ("paper --limit 0", "--limit takes a whole number >= 1, got '0'"),
        ("plan --limit=1.5 01", "--limit takes a whole number >= 1, got '1.5'"),
        ("--limit -3", "--limit takes a whole number >= 1, got '-3'"),
        ("--limit 01 --limit", "got '01'"),
        ("--limit 3 --limit=4", "one --limit at a time"),
        ("--limited 3", "unknown option '--limited'"),
        ("--jobs", "--jobs takes a whole number >= 1, got ''"),
        ("--jobs 0", "--jobs takes a whole number >= 1, got '0'"),
        ("--jobs=two", "--jobs takes a whole number >= 1, got 'two'"),
        ("--jobs 2 --jobs 3", "one --jobs at a time"),
        ("plan --jobs 2", "a plan runs nothing: --jobs is for a run"),
        ("plan --again", "a plan runs nothing: --again is for a run"),
        ("--cluster", "--cluster takes a number of worker processes or an address like tcp://host:8786, got ''"),
        ("--cluster --strict", "got '--strict'"),
        ("--cluster 0", "got '0'"),
        ("--cluster 2 --cluster=3", "one --cluster at a time"),
        ("lab --jobs 2", "lab takes no arguments"),
        ("page --strict", "page takes a profile and MODELS=..., got '--strict'"),
        ("lab --limit 3", "lab takes no arguments"),
        ("plan 09", "no notebook '09'"),
        ("page 01", "page takes a profile and MODELS=..., got '01'"),
        ("page --limit 3", "page takes a profile and MODELS=..., got '--limit'"),
        ("page MODELS=", "page takes a profile and MODELS=..., got 'MODELS='"),
        ("01 page", "'page' comes first: ./run_all.sh page"),
    ],
)
def test_a_typo_is_refused_in_one_line_before_any_python_is_looked_for(sandbox, words, message):
    sandbox.python("python3.11")
    done = sandbox(*words.split())
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1 and not done.stdout
    assert not sandbox.calls() and not (sandbox.root / ".venv").exists()


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_lists_every_command(sandbox, word):
    done = sandbox(word)
    assert done.returncode == 0
    words = "nano paper plan page test lab NAME=VALUE CUDA HF_HOME MODELS=".split()
    for command in (*words, "--limit N", "test browser", "--jobs N", "--again", "--strict", "--cluster N"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ([], "-m vrhlib.notebooks run --profile nano | offline=1"),
        (["paper"], "-m vrhlib.notebooks run --profile paper | offline="),
        (["02", "01_one", "K=a b"], "-m vrhlib.notebooks run --profile nano 02 01_one K=a b | offline=1"),
        (["01", "paper"], "-m vrhlib.notebooks run --profile paper 01 | offline="),
        (["plan", "paper", "01"], "-m vrhlib.notebooks plan --profile paper 01 | offline="),
        (["plan", "K=3", "paper"], "-m vrhlib.notebooks plan --profile paper K=3 | offline="),
        (["--limit", "5", "01"], "-m vrhlib.notebooks run --profile nano --limit 5 01 | offline=1"),
        (["paper", "01", "--limit=5"], "-m vrhlib.notebooks run --profile paper 01 --limit 5 | offline="),
        (["test", "--limit", "5"], "-m pytest --limit 5 | offline=1"),
        (["test", "-k", "a b"], "-m pytest -k a b | offline=1"),
        (["test"], "-m pytest -n auto --maxprocesses 4 --dist loadfile | offline=1"),
        (["test", "browser"], "-m pytest tests/browser -v | offline=1"),
        (["test", "browser", "-k", "a b"], "-m pytest tests/browser -v -k a b | offline=1"),
        (["test", "-k", "browser"], "-m pytest -k browser | offline=1"),
        (["--jobs", "3", "01", "--again"], "-m vrhlib.notebooks run --profile nano --jobs 3 01 --again | offline=1"),
        (["--strict", "--jobs=2"], "-m vrhlib.notebooks run --profile nano --strict --jobs 2 | offline=1"),
        (["--cluster=2"], "-m vrhlib.notebooks run --profile nano --cluster 2 | offline=1"),
        (
            ["plan", "paper", "--cluster", "tcp://gpu:8786", "--strict"],
            "-m vrhlib.notebooks plan --profile paper --cluster tcp://gpu:8786 --strict | offline=",
        ),
        (["lab"], "-m vrhlib.notebooks lab | offline="),
        (["page"], "-m vrhlib.page --profile nano | offline=1"),
        (["page", "paper", "MODELS=a,b"], "-m vrhlib.page --profile paper --models a,b | offline="),
    ],
)
def test_words_reach_the_runner_and_only_nano_and_tests_are_kept_offline(sandbox, tmp_path, words, call):
    sandbox.python("python", packages=True)
    done = sandbox(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sandbox.calls() == [f"python {call}"]


def test_what_the_user_says_about_the_hub_reaches_a_paper_run_untouched(sandbox):
    sandbox.python("python", packages=True)
    said = {"HF_HOME": "/data/hf", "HF_ENDPOINT": "https://mirror", "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "1"}
    sandbox.environment |= said | {"SEEN": " ".join(f"${name}" for name in said)}
    python = sandbox.bin / "python"
    python.write_text(python.read_text() + 'eval "echo $SEEN" >>"$CALLS"\n')
    assert sandbox("paper").returncode == 0
    assert sandbox.calls()[-1] == " ".join(said.values())


def test_a_plan_without_an_environment_installs_nothing(sandbox):
    sandbox.python("python3.11")
    done = sandbox("plan")
    assert done.returncode == 0 and "01_one" in done.stdout and "would first make .venv" in done.stdout
    assert not sandbox.calls()


# ---- the environment


def test_the_active_environment_is_used_when_it_has_everything(sandbox):
    sandbox.python("python", packages=True)
    done = sandbox()
    assert "Using the active environment" in done.stdout and not (sandbox.root / ".venv").exists()


def test_else_a_venv_is_made_once_and_reused(sandbox):
    sandbox.python("python3.11")
    sandbox.python("python")
    first = sandbox("01")
    assert f"Not using {sandbox.bin}/python: it lacks torch" in first.stdout
    assert [call.split(" |")[0] for call in sandbox.calls()] == [
        "python3.11 -m venv --clear ./.venv",
        "python -m pip install --disable-pip-version-check -r ./requirements.lock",
        "python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .",
        "python -m vrhlib.notebooks run --profile nano 01",
    ]
    assert sandbox("01").returncode == 0
    assert len(sandbox.calls()) == 1, "the second time it just runs"
    (sandbox.root / "requirements.lock").write_text("another==1\n")
    assert sandbox("01").returncode == 0
    assert len(sandbox.calls()) == 3, "another lock is installed into the same .venv"


def test_a_failed_or_interrupted_install_is_repeated(sandbox):
    sandbox.python("python3.11")
    sandbox.root.joinpath(".venv/bin").mkdir(parents=True)
    sandbox("01")
    (sandbox.root / ".venv" / "bin" / "broken").touch()
    (sandbox.root / "requirements.lock").write_text("another==1\n")
    failed = sandbox("01")
    assert failed.returncode == 1
    assert "run_all.sh: pip failed, see above." in failed.stderr and failed.stderr.count("\n") == 1
    (sandbox.root / ".venv" / "bin" / "broken").unlink()
    sandbox.calls()
    assert sandbox("01").returncode == 0
    assert "pip install" in sandbox.calls()[0]


def test_without_a_python_it_says_how_to_get_one(sandbox):
    done = sandbox()
    assert done.returncode == 1
    assert "no usable Python >= 3.11" in done.stderr and done.stderr.count("\n") == 1


def test_a_real_run_ends_with_a_rendered_notebook_and_a_real_typo_with_one_line(sandbox, tmp_path):
    from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

    (sandbox.root / "vrhlib").symlink_to(ROOT / "vrhlib")
    cells = [
        new_markdown_cell("# A claim"),
        new_code_cell('PROFILE = "nano"\nK = 2', metadata={"tags": ["parameters"]}),
    ]
    for name in ("01_one", "02_two"):
        book = json.dumps(new_notebook(cells=[*cells, new_code_cell("print('k is', K)")]))
        (sandbox.root / "notebooks" / f"{name}.ipynb").write_text(book)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    # Should the check of the environment be wrong, it must not end in a download.
    sandbox.environment = {**os.environ, "PATH": path, "VRHLIB_ROOT": str(sandbox.root), "PIP_NO_INDEX": "1"}
    sandbox.environment |= {"PYTHONPATH": "", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    done = sandbox("01", "K=3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "      k is 3" in done.stdout.splitlines()
    assert [path.name for path in (sandbox.root / "notebooks/rendered/nano").iterdir()] == ["01_one.ipynb"]
    typo = sandbox("KK=3")
    assert typo.returncode == 2
    assert typo.stderr == "vrhlib: No parameter KK in 01_one, 02_two; did you mean K?\n"


def test_the_script_keeps_to_bash_3():
    code = re.sub(r"^\s*#.*$", "", (ROOT / "run_all.sh").read_text(), flags=re.M)
    newer = r"declare -A|local -n|mapfile|readarray|\$\{\w+(,,|\^\^|@[A-Z])|\|&|&>>|coproc|\[\[ -v "
    assert re.findall(newer, code) == []
    assert not re.findall(r'(?<!\+)"\$\{\w+\[@\]\}"', code), "an empty array is an unbound variable there"


# ---- JupyterLab, on this machine only

HOSTILE = """
from jupyter_server.auth.identity import IdentityProvider, User
class Open(IdentityProvider):
    def get_user(self, handler):
        return User("anybody")
c.ServerApp.identity_provider_class = Open
c.ServerApp.ip = "0.0.0.0"
c.ServerApp.allow_remote_access = True
c.ServerApp.sock = "/nowhere/socket"
c.ServerApp.token = ""
c.ServerApp.password = ""
c.IdentityProvider.token = ""
c.PasswordIdentityProvider.token = ""
c.ServerApp.open_browser = False
c.LabApp.open_browser = False
c.ServerApp.allow_root = True  # tests may run as root
c.ServerApp.port_retries = 0
"""


def asked(url: str, token: str = "") -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"token {token}"} if token else {})
    try:
        return urllib.request.urlopen(request, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code


def test_lab_listens_on_this_machine_only_and_asks_for_a_token_whatever_is_configured(tmp_path):
    config, runtime = tmp_path / "config", tmp_path / "runtime"
    config.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name in ("jupyter_config.py", "jupyter_server_config.py", "jupyter_lab_config.py"):
        (config / name).write_text(f"{HOSTILE}c.ServerApp.port = {port}\n")
    (config / "jupyter_server_config.json").write_text('{"PasswordIdentityProvider": {"token": ""}}')
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | {"PATH": path, "PYTHONPATH": "", "PIP_NO_INDEX": "1", "JUPYTER_TOKEN": ""}
    environment |= {"JUPYTER_CONFIG_DIR": str(config), "JUPYTER_RUNTIME_DIR": str(runtime)}
    log = (tmp_path / "log").open("w+")
    lab = subprocess.Popen([ROOT / "run_all.sh", "lab"], env=environment, stdout=log, stderr=log)
    try:
        info = runtime / f"jpserver-{lab.pid}.json"
        for _ in range(600):
            if lab.poll() is not None or (info.exists() and info.read_text().endswith("}")):
                break
            time.sleep(0.1)
        assert lab.poll() is None, (tmp_path / "log").read_text()
        told = json.loads(info.read_text())
        assert len(told["token"]) >= 32 and told["port"] == port
        url = f"http://127.0.0.1:{port}/api/contents"
        assert asked(url) == 403 and asked(url, "wrong") == 403 and asked(url, told["token"]) == 200
        processes = [psutil.Process(lab.pid), *psutil.Process(lab.pid).children(recursive=True)]
        assert told["token"] not in str([process.cmdline() for process in processes])
        bound = [c.laddr.ip for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert bound and set(bound) <= {"127.0.0.1", "::1"}
        assert Path(told["root_dir"]) == ROOT / "notebooks"
    finally:
        lab.terminate()
        lab.wait(timeout=30)
        log.close()


# ---- the browser of CI


class CI(Sandbox):
    """.ci/run up to the tests: run_all.sh is a script that writes down what it was told, and fails."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        (self.root / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "run", self.root / ".ci")
        for name, tool in {"mktemp": "mktemp", "sleep": "true"}.items():
            (self.bin / name).symlink_to(shutil.which(tool))
        told = 'echo "${VRHLIB_BROWSER:-none} ${VRHLIB_NO_BROWSER:-}" >>"$CALLS"; exit 1'
        self.program(self.root / "run_all.sh", told)
        self.program("id", "echo 0")

    def program(self, name: str | Path, text: str) -> None:
        (self.bin / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def apt(self, *, works: bool) -> None:
        self.program("browser-of-debian", "")
        install = 'cp "$(dirname "$0")/browser-of-debian" "$(dirname "$0")/chromium"' if works else "exit 100"
        self.program("apt-get", f'echo "apt $2" >>"$CALLS"; [ "$2" = update ] || {install}')

    def __call__(self) -> str:
        return subprocess.run([self.root / ".ci" / "run"], env=self.environment, capture_output=True, text=True).stdout


@pytest.fixture
def ci(tmp_path):
    return CI(tmp_path)


def test_ci_names_the_first_browser_that_answers(ci):
    ci.program("chromium-browser", "echo install the snap; exit 1")
    ci.program("google-chrome", "echo Google Chrome 1.2.3")
    ci.apt(works=True)
    assert "SKIPPED" not in ci() and ci.calls() == ["google-chrome "]
    ci.environment["VRHLIB_BROWSER"] = "/nowhere"
    assert "SKIPPED" not in ci() and ci.calls() == ["/nowhere "], "the tests say what is wrong with it"


def test_ci_installs_a_browser_where_it_can(ci):
    ci.apt(works=True)
    assert "SKIPPED" not in ci() and ci.calls() == ["apt update", "apt install", "chromium "]


def test_ci_says_that_it_has_no_browser_and_why(ci):
    assert "ci: BROWSER TESTS WILL BE SKIPPED: there is no Chromium or Chrome on PATH, and no apt-get" in ci()
    assert ci.calls() == ["none 1"]
    ci.apt(works=False)
    assert "SKIPPED: there is no Chromium or Chrome on PATH, and apt-get could not install one" in ci()
    assert ci.calls() == ["apt update", "apt install"] * 2 + ["none 1"]
    ci.program("id", "echo 1000")
    assert "SKIPPED: there is no Chromium or Chrome on PATH, and only root could" in ci()
    ci.environment["VRHLIB_NO_BROWSER"] = "1"
    assert "SKIPPED: VRHLIB_NO_BROWSER=1" in ci() and ci.calls() == ["none 1"] * 2


# ---- the packages, said once


def test_environment_yml_leaves_every_package_to_pyproject():
    (pip,) = [d["pip"] for d in environment()["dependencies"] if isinstance(d, dict)]
    conda = [d for d in environment()["dependencies"] if isinstance(d, str)]
    assert pip == ["-e ."]
    assert [re.split(r"[=<>]", d)[0] for d in conda] == ["python", "pip"], "stated in pyproject.toml, and only there"
    assert environment()["channels"] == ["conda-forge"]
    (python,) = [d.split("=")[-1] for d in conda if d.startswith("python")]
    assert Requirement(f"python{PROJECT['requires-python']}").specifier.contains(python)


def environment() -> dict:
    return yaml.safe_load((ROOT / "environment.yml").read_text())


def lock() -> dict[str, Version]:
    lines = [line.strip() for line in (ROOT / "requirements.lock").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), "nothing but name==version"
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_the_lock_satisfies_every_requirement():
    pins = lock()
    for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]:
        requirement = Requirement(text)
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{text} is not in requirements.lock"
        assert requirement.specifier.contains(version), f"{text} but {version} is locked"


def test_the_lock_fits_cpu_and_cuda_alike():
    pins = lock()
    assert "torchvision" not in pins, "without its matching torch it breaks transformers' processors"
    assert not [name for name in pins if name.startswith(("nvidia", "triton", "cuda"))]
    assert not [name for name, version in pins.items() if version.local], "a +cpu pin exists on one index only"


def test_torch_and_transformers_are_held_to_one_minor_version():
    bounds = {Requirement(text).name: str(Requirement(text).specifier) for text in PROJECT["dependencies"]}
    assert set(bounds["torch"].split(",")) == {">=2.13", "<2.14"}
    assert set(bounds["transformers"].split(",")) == {">=5.24", "<5.25"}
