"""Where a result comes from: the commit of a checkout or a copy, and the hash of weights."""

import subprocess
from pathlib import Path

import pytest
import torch

from adlm.evaluate import provenance
from tests.world import random_model


def test_the_commit_of_a_copy_and_of_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "adlm" / "evaluate" / "provenance.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("", "utf-8")
    monkeypatch.setattr(provenance, "__file__", str(copy))
    monkeypatch.delenv("ADLM_COMMIT", raising=False)
    assert provenance.get_commit() is None
    monkeypatch.setenv("ADLM_COMMIT", "f00d")
    assert provenance.get_commit() == "f00d"
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm one", "tag v1"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    commit = provenance.get_commit()
    assert (
        commit and len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    )  # a checkout needs no variable
    (tmp_path / "untracked").write_text("", "utf-8")
    assert provenance.get_commit() == commit
    copy.write_text("changed", "utf-8")
    assert provenance.get_commit() == f"{commit}+"


def test_weights_are_known_by_their_hash() -> None:
    model = random_model()
    before = provenance.hash_weights(model)
    assert before == provenance.hash_weights(random_model())
    with torch.no_grad():
        model.head.bias[0] += 1
    assert provenance.hash_weights(model) != before
