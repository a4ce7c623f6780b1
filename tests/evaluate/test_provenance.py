"""Where figures come from."""

import subprocess
from pathlib import Path

import pytest

from adlm.evaluate import provenance


def test_a_copy_without_its_history_may_be_told_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "adlm" / "evaluate" / "provenance.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("", "utf-8")
    monkeypatch.setattr(provenance, "__file__", str(copy))
    monkeypatch.delenv("ADLM_COMMIT", raising=False)
    assert provenance.get_commit() is None
    monkeypatch.setenv("ADLM_COMMIT", "f00d")
    assert provenance.get_commit() == "f00d"
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one", "--allow-empty"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    known = provenance.get_commit()
    assert known and len(known) == 40 and "f00d" not in known  # a checkout knows better


def test_a_changed_checkout_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "adlm" / "evaluate" / "provenance.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("", "utf-8")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(provenance, "__file__", str(copy))
    clean = provenance.get_commit()
    copy.write_text("changed", "utf-8")
    assert provenance.get_commit() == f"{clean}+"
