"""Parts of error messages: names that are suggested, and commands that can be run."""

import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from adlm.errors import CHECKOUT, check_known, install_command, list_requirements, suggest_names

needs_pip = pytest.mark.skipif(find_spec("pip") is None, reason="pip is not installed")


@needs_pip
def test_an_extra_is_installed_from_the_checkout_with_its_constraints() -> None:
    python, *words = shlex.split(install_command("eval"))
    assert python == sys.executable and words[:3] == ["-m", "pip", "install"]
    assert words[3:] == ["-c", str(CHECKOUT / "constraints.txt"), "-e", f"{CHECKOUT}[eval]"]
    assert Path(words[4]).is_file()


@needs_pip
def test_installed_from_a_wheel_an_extra_is_its_packages(tmp_path: Path) -> None:
    words = shlex.split(install_command("data", tmp_path))
    assert [re.split("[<>=]", word)[0] for word in words[4:]] == ["datasets", "pyarrow"]
    assert "torch" in " ".join(list_requirements()[""])


def test_no_page_and_no_message_installs_by_a_name_that_no_index_has() -> None:
    pages = [
        CHECKOUT / "README.md",
        *(CHECKOUT / "docs").rglob("*.md"),
        *(CHECKOUT / "adlm").rglob("*.py"),
    ]
    assert [
        page
        for page in pages
        if re.search(r"adlm\[|install adlm\b(?! again)", page.read_text("utf-8"))
    ] == []


def test_the_closest_names_are_suggested() -> None:
    assert (
        suggest_names("remask_lop", ["ancestral", "remask_loop"]) == " (did you mean remask_loop?)"
    )
    assert suggest_names("ADLM-Prose", ["adlm-prose"]) == " (did you mean adlm-prose?)"
    assert suggest_names("nonsense", ["ancestral"]) == ""
    expected = r"unknown sampler 'ancestrall' \(did you mean ancestral\?\): expected one of ancestral, margin"
    with pytest.raises(ValueError, match=expected):
        check_known("sampler", "ancestrall", ["ancestral", "margin"])
    check_known("sampler", "ancestral", ["ancestral", "margin"])
