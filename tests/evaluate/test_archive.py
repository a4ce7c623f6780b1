"""Kept readings are those that a judge would give again, and are never taken for those of anything else."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adlm.evaluate import verdicts
from adlm.evaluate.archive import ALL, Archive, fill
from adlm.evaluate.judges import Judge, load_judge
from adlm.evaluate.verdicts import Request, Verdict, judged
from tests.evaluate.small_judges import causal, causal_folder, documents, encoder, needs

LENGTHS = [5, 40, 12, 33, 60, 7, 21]


def request(judge: Judge | None = None, **how) -> Request:
    judge = judge or causal()
    texts = [document[:200] for document in documents()[: len(LENGTHS)]]
    pieces = [piece.cut(length) for piece, length in zip(judge.encode(texts), LENGTHS)]
    return Request(judge, pieces, **({"with_nats": judge.is_causal, "with_features": True} | how))


def whole(asked: Request, **how) -> Verdict:
    return judged(
        asked.judge,
        asked.pieces,
        with_nats=asked.with_nats,
        with_features=asked.with_features,
        window=asked.window,
        **how,
    )


def filled(folder: Path | None, *requests: Request, **how) -> Archive:
    archive = Archive(folder, every=0.0)
    archive.merge()
    archive.load()
    fill(archive, requests, **how)
    archive.merge()
    return archive


def same(one: Verdict, other: Verdict, abs: float = 0.0) -> None:
    assert len(one.nats) == len(other.nats) and (one.features is None) == (other.features is None)
    for mine, theirs in zip(one.nats, other.nats, strict=True):
        assert mine == pytest.approx(theirs, abs=abs, rel=0, nan_ok=True)
    if one.features is not None:
        assert one.features == pytest.approx(other.features, abs=abs, rel=0)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("with_features", [True, False])
@pytest.mark.parametrize("window", [None, 16])
def test_what_is_kept_is_what_was_found(tmp_path: Path, bos: bool, with_features: bool, window: int | None) -> None:
    asked = request(causal(bos), with_features=with_features, window=window)
    filled(tmp_path, asked, batch=3)
    again = Archive(tmp_path)
    again.load()
    same(again.verdict(asked), whole(asked, batch=3))
    assert [path.name for path in tmp_path.iterdir()] == [ALL]


def test_an_encoders_too(tmp_path: Path) -> None:
    asked = request(encoder(), window=20)
    same(filled(tmp_path, asked).verdict(asked), whole(asked))


@pytest.mark.parametrize("batch", [1, 7, 32])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_and_batches_change_nothing(tmp_path: Path, batch: int, size: int) -> None:
    asked = [request(), request(with_nats=False), request(encoder(), window=20)]
    for number in range(size):  # each knows only what all knew when they began
        fill(Archive(tmp_path, owner=number), asked, share=(number, size), batch=batch)
    together = filled(tmp_path, *asked)
    for each in asked:
        same(together.verdict(each), whole(each), abs=1e-5)


def test_what_is_known_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request()
    filled(tmp_path, asked)
    monkeypatch.setattr(verdicts, "passed", lambda *_: pytest.fail("a text was read again"))
    told: list[tuple[int, int]] = []
    filled(tmp_path, asked, on_texts=lambda *each: told.append(each))
    assert told == [(len(LENGTHS), len(LENGTHS))]
    fewer = replace(asked, pieces=asked.pieces[2:5][::-1])
    same(filled(tmp_path, fewer).verdict(fewer), filled(tmp_path, asked).verdict(fewer))


def test_equal_texts_are_read_once_and_counted_each() -> None:
    asked = request()
    twice = replace(asked, pieces=[*asked.pieces, *asked.pieces[:3]])
    told: list[tuple[int, int]] = []
    archive = filled(None, twice, asked, batch=2, on_texts=lambda *each: told.append(each))
    assert len(archive.known) == len(LENGTHS) and told[0] == (0, 17) and told[-1] == (17, 17)
    found = archive.verdict(twice)
    assert found.features is not None and (found.features[:3] == found.features[-3:]).all()


def test_what_was_found_before_an_error_is_kept(tmp_path: Path) -> None:
    asked = request()

    def stop(done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    archive = Archive(tmp_path, every=1e9)
    archive.merge()
    with pytest.raises(KeyboardInterrupt):
        fill(archive, [asked], batch=2, on_texts=stop)
    told: list[int] = []
    again = filled(tmp_path, asked, batch=2, on_texts=lambda done, _: told.append(done))
    assert told[0] == 4 and told[-1] == len(LENGTHS)
    same(again.verdict(asked), whole(asked), abs=1e-5)


def test_a_file_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    asked = request()
    fill(Archive(tmp_path), [replace(asked, pieces=asked.pieces[:2])])
    content = (tmp_path / "0-0.safetensors").read_bytes()
    (tmp_path / "1-0.safetensors.part").write_bytes(content[: len(content) // 2])
    told: list[int] = []
    filled(tmp_path, asked, on_texts=lambda done, _: told.append(done))
    assert told[0] == 2
    assert [path.name for path in tmp_path.iterdir()] == [ALL]


def test_a_file_that_is_broken_is_told(tmp_path: Path) -> None:
    filled(tmp_path, request())
    content = (tmp_path / ALL).read_bytes()
    kept = load_file(tmp_path / ALL)
    (tmp_path / ALL).write_bytes(content[:-8])
    with pytest.raises(ValueError, match=r"all\.safetensors holds no verdicts .*delete it, and its texts are judged"):
        filled(tmp_path, request())
    save_file(kept | {"tokens": kept["tokens"] - 1}, tmp_path / ALL)
    with pytest.raises(ValueError, match="values where"):
        filled(tmp_path, request())
    save_file({"x": kept["nats"]}, tmp_path / ALL)
    with pytest.raises(ValueError, match=r"holds no verdicts \('keys'\)"):
        filled(tmp_path, request())


def test_texts_that_are_not_judged_are_told() -> None:
    with pytest.raises(ValueError, match="7 of 7 texts are not judged yet, text 0 among them"):
        Archive().verdict(request())
    with pytest.raises(ValueError, match="batch must be at least 1, got 0"):
        fill(Archive(), [request()], batch=0)
    with pytest.raises(ValueError, match="1 of 1 texts are empty"):
        fill(Archive(), [Request(causal(), causal().encode([""]))])


def test_a_key_is_of_all_that_a_reading_follows_from() -> None:
    asked = request()
    others = [
        replace(asked, window=16),
        replace(asked, with_nats=False),
        replace(asked, with_features=False),
        replace(asked, pieces=[piece.cut(len(piece) - 1) for piece in asked.pieces]),
        request(causal(bos=False)),
        request(causal(positions=256)),
    ]
    keys = [key for each in (asked, *others) for key in each.keys]
    assert len(set(keys)) == len(keys) and {len(key) for key in keys} == {64}
    assert request().keys == asked.keys


def test_a_changed_judge_is_another(tmp_path: Path) -> None:
    """Its weights or its configuration, in the same folder; not where that folder lies."""
    needs("transformers")
    copies = [tmp_path / name for name in ("same", "weights", "config")]
    for folder in copies:
        shutil.copytree(causal_folder(), folder)
    tensors = load_file(copies[1] / "model.safetensors")
    save_file(
        tensors | {"transformer.ln_f.weight": tensors["transformer.ln_f.weight"] * np.float32(1.1)},
        copies[1] / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((copies[2] / "config.json").read_text("utf-8"))
    (copies[2] / "config.json").write_text(json.dumps(config | {"layer_norm_epsilon": 1e-3}), "utf-8")
    judges = [load_judge(folder) for folder in copies]
    assert judges[0].identity == causal().identity
    assert len({judge.identity for judge in judges}) == 3
    archive = filled(tmp_path / "kept", request())
    for judge in judges:
        asked = request(judge)
        archive = filled(tmp_path / "kept", asked)
        same(archive.verdict(asked), whole(asked))


def test_a_judge_without_files_is_known_by_its_values() -> None:
    needs("transformers")
    judge = load_judge(causal_folder())
    far = replace(judge, place=replace(judge.place, source="owner/name", found_as="Hub"))
    assert far.settings["weights_sha256"] is None
    before = far.identity
    far.model.transformer.ln_f.bias.data += 1
    assert replace(far).identity != before
