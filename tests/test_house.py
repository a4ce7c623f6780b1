"""What every file of the package keeps: public names, fast imports, working snippets, no traces of a machine."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import adlm

ROOT = Path(__file__).resolve().parent.parent


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_public_names_exist_and_are_documented() -> None:
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse((ROOT / "adlm/__init__.py").read_text("utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("adlm")
        for alias in node.names
    }
    assert set(adlm.__all__) == imported | {"__version__"}, (
        "type checkers see what the lazy table has"
    )
    names = [name for name in adlm.__all__ if name != "__version__"]
    assert [name for name in names if not (getattr(adlm, name).__doc__ or "").strip()] == []
    assert f'version = "{adlm.__version__}"' in (ROOT / "pyproject.toml").read_text("utf-8")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text("utf-8") for page in pages)
    assert [name for name in names if not re.search(rf"adlm\.{name}\b|`{name}\b", text)] == []
    with pytest.raises(AttributeError, match="no attribute 'trane'"):
        _ = adlm.trane


STATEMENTS = (
    "import adlm.training.train as train; train.train_steps",
    "import adlm.training.ema, adlm; assert callable(adlm.train)",
    "import adlm.evaluate as evaluate; evaluate.perplexity",
    "import adlm.evaluate.ppl as ppl, adlm.evaluate; ppl.compare; assert callable(adlm.evaluate.perplexity)",
    "import adlm; adlm.evaluate.perplexity; adlm.load",
    "from adlm.diffusion import corrupt, sample, training_loss",
    "from adlm.models import LanguageModel, ModelConfig",
)
FORK = """
import multiprocessing, sys, adlm.training.train  # other libraries once for all, because they take the time
for name in [name for name in sys.modules if name.partition(".")[0] == "adlm"]:
    del sys.modules[name]
for statement in sys.argv[1:]:
    child = multiprocessing.get_context("fork").Process(target=exec, args=(statement, {}))
    child.start()
    child.join()
    assert child.exitcode == 0, statement
"""


def test_ordinary_imports_work() -> None:
    subprocess.run([sys.executable, "-c", FORK, *STATEMENTS], cwd=ROOT, check=True)


def test_the_command_line_does_not_wait_for_slow_imports() -> None:
    """A command imports what is slow when it runs: this is what `--help` and completion load."""
    code = "import sys, adlm.cli.main; print({name.split('.')[0] for name in sys.modules})"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    slow = {
        "torch",
        "numpy",
        "scipy",
        "yaml",
        "tokenizers",
        "safetensors",
        "transformers",
        "matplotlib",
        "jinja2",
    }
    assert not slow & ast.literal_eval(printed.stdout)


SLOW_PAGE = pytest.param("docs/generate.md", marks=pytest.mark.slow)


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", SLOW_PAGE])
def test_the_snippets_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / page).read_text("utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 2
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for number, snippet in enumerate(snippets, 1):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), namespace)


@pytest.mark.parametrize(
    "command", ["make demo", "make test", "make test-all", "make bench", "make docs"]
)
def test_the_readme_and_the_makefile_name_the_same_commands(command: str) -> None:
    assert command in (ROOT / "README.md").read_text("utf-8")
    assert re.search(
        rf"^{command.removeprefix('make ')}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE
    )


def tracked_files() -> list[Path]:
    """What is or would be committed; outside a repository, everything that is not hidden."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]
    hidden = {".venv", ".git"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not hidden & set(path.relative_to(ROOT).parts)
    ]


# Put together here, so that this file does not find itself.
TRACES = [f"/{name}/" for name in ("work", "root", "tmp", "home")] + [
    "index" + "-url",
    "local" + "host:",
]


def traces_in(text: str) -> list[str]:
    return [trace for trace in TRACES if re.search(rf"(?<![\w.>}}]){re.escape(trace)}", text)]


def test_no_file_names_a_machine() -> None:
    texts = {path: path.read_text("utf-8", errors="ignore") for path in tracked_files()}
    assert {path: traces for path, text in texts.items() if (traces := traces_in(text))} == {}
    assert traces_in(f"see {os.sep}tmp{os.sep}x") and traces_in("--extra-" + "index" + "-url x")
    assert not traces_in("frame" + "work/") and not traces_in(f"src{TRACES[0]}")


def test_every_part_of_the_package_imports() -> None:
    for path in sources("adlm"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # triton comes with CUDA builds of torch alone; these modules are made of classes of an extra.
            extras = {"adlm.serve": "fastapi pydantic prometheus_client ray"}
            extras |= {"adlm.interop": "transformers diffusers lm_eval"}
            of_extra = extras.get(name.rpartition(".")[0], "").split()
            if error.name != "triton" and str(error.name).partition(".")[0] not in of_extra:
                raise
