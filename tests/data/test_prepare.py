"""The prepared folder depends on the text and the settings only, not on workers or interruptions."""

import errno
import hashlib
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adlm.data import formats
from adlm.data import prepare as module
from adlm.data.prepare import PrepareProgress, count_valid_rows, prepare
from adlm.data.shards import open_data
from adlm.data.sources import Source, load_excerpt, open_source
from adlm.data.tokenizers import END_OF_TEXT, load_tokenizer, train_bpe
from adlm.data.workers import chunk_documents
from tests.data.test_packing import wrap_rows

TEXTS = [part for part in load_excerpt()[:60_000].split("\n\n") if part]
TEXT_BYTES = sum(len(text.encode()) for text in TEXTS)
SMALL: dict[str, Any] = {"tokenizer": "bytes", "length": 64, "shard_tokens": 64 * 100, "workers": 2}


def make_source(texts: list[str], name: str = "texts") -> Source:
    sizes = [len(text.encode("utf-8", "replace")) for text in texts]
    digest = hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()
    return Source(
        name,
        {"texts": digest},
        sum(sizes),
        lambda: zip(texts, accumulate(sizes), itertools.repeat(True)),
    )


def stop_after(rows: int) -> Callable[[PrepareProgress], None]:
    def stop(progress: PrepareProgress) -> None:
        if progress.rows > rows:
            raise KeyboardInterrupt

    return stop


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module,
        "chunk_documents",
        lambda documents, skip: chunk_documents(documents, skip=skip, characters=2000),
    )


def test_rows_are_the_stream_and_the_last_of_them_are_held_out(tmp_path: Path) -> None:
    manifest = prepare(make_source(TEXTS), tmp_path, **SMALL | {"tokenizer": "gpt2"})
    gpt2, data = load_tokenizer("gpt2"), open_data(tmp_path, verify=True)
    expected, _ = wrap_rows(
        [token for text in TEXTS for token in [*gpt2.encode(text), 50_256]], 64, 50_256, 50_256
    )
    train, valid = (
        data.rows(split).fetch(range(len(data.rows(split))))[0].numpy()
        for split in ("train", "valid")
    )
    assert np.array_equal(np.concatenate([train, valid]), expected)
    assert len(valid) == count_valid_rows(len(expected), 0.01)
    assert np.array_equal(data.counts().numpy(), np.bincount(train.ravel(), minlength=50_258))
    splits = manifest.splits
    assert (splits["train"].rows, splits["train"].tokens) == (len(train), train.size)
    # The bytes of the rows are those of their text, except for tokens that the end of a row divides.
    for rows, split in ((train, "train"), (valid, "valid")):
        text = sum(len(gpt2.decode(row, skip_special=True).encode()) for row in rows.tolist())
        assert abs(splits[split].bytes - text) < 0.02 * text + 100
    assert splits["train"].bytes + splits["valid"].bytes <= TEXT_BYTES
    assert len(TEXTS) <= splits["train"].documents + splits["valid"].documents <= len(TEXTS) + 1


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_the_number_of_workers_changes_nothing(tmp_path: Path, rows: str) -> None:
    for workers in (1, 2, 3):
        prepare(
            make_source(TEXTS),
            tmp_path / str(workers),
            **SMALL | {"workers": workers, "rows": rows},
        )
    one = contents(tmp_path / "1")
    assert one == contents(tmp_path / "2") == contents(tmp_path / "3")
    assert len([name for name in one if name.endswith(".bin")]) > 2
    assert not any(name.endswith((".part", ".ends")) for name in one)


def test_rows_of_one_document_are_cut_padded_and_measured(tmp_path: Path) -> None:
    texts = ["short", "", "x" * 200, "Grüße"] * 5
    options = SMALL | {"tokenizer": "bert-base-uncased", "length": 8, "rows": "documents"}
    manifest = prepare(make_source(texts), tmp_path, **options)
    data, bert = open_data(tmp_path), load_tokenizer("bert-base-uncased")
    assert manifest.rows == "documents" and data.is_padded
    tokens, lengths = data.rows("train").fetch(range(len(data.rows("train"))))
    assert lengths is not None
    for text, row, length in zip(texts, tokens.tolist(), lengths.tolist()):
        assert row == ([101, *bert.encode(text)[:6], 102] + [0] * 8)[:8]
        assert length == min(8, len(bert.encode(text)) + 2)
    assert manifest.splits["train"].tokens == int(lengths.sum()) == int(data.counts().sum())
    assert manifest.splits["train"].documents == len(tokens) == 18


def prepare_in_child(
    seconds: float | None, syncs: int | None, *arguments: Any, **options: Any
) -> int:
    """Prepare in a process that is killed after so many seconds, or at its n-th fsync; return its status."""
    child = os.fork()
    if child == 0:
        fsync, left = os.fsync, itertools.count(syncs or 0, -1)

        def count(handle: int) -> None:
            if next(left) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            fsync(handle)

        os.fsync = count
        try:  # slowed down, so that the kill is likely to come in between
            prepare(*arguments, **options, on_progress=lambda _: time.sleep(0.01))
        except BaseException:
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize(("rows", "valid"), [("wrapped", "cut"), ("documents", "own")])
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bytes(
    tmp_path: Path, rows: str, valid: str
) -> None:
    source = make_source(TEXTS)
    options: dict[str, Any] = SMALL | {
        "rows": rows,
        "shard_tokens": 64 * (60 if rows == "wrapped" else 15),
    }
    options |= (
        {"valid": make_source(TEXTS[:40], "other")} if valid == "own" else {"valid_share": 0.15}
    )
    prepare(source, tmp_path / "whole", **options)
    rng, killed, shards = random.Random(f"{rows} {valid}"), 0, []
    for attempt in range(40):
        is_timed = attempt in (0, 2, 4)  # on a busy machine little is done by then, so not always
        seconds, syncs = (rng.uniform(0.02, 0.15), None) if is_timed else (None, rng.randint(3, 32))
        status = prepare_in_child(seconds, syncs, source, tmp_path / "killed", **options)
        shards.append(len(list((tmp_path / "killed").glob("train-*.bin"))))
        if os.WIFSIGNALED(status):
            killed += 1
        elif status == 0:
            break
    assert status == 0 and killed >= 3
    assert len(set(shards)) > 2  # it resumed, and did not start over each time
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


@pytest.mark.parametrize("syncs", [1, 2, 4, 6])
def test_a_kill_while_the_valid_split_is_cut_off_loses_nothing(tmp_path: Path, syncs: int) -> None:
    """The last steps, one by one: copying the end of the stream, shortening, counting, the manifest."""
    source, options = make_source(TEXTS[:60]), SMALL | {"valid_share": 0.5, "workers": 1}
    with mock.patch("os.fsync", wraps=os.fsync) as fsync:
        prepare(source, tmp_path / "whole", **options)
    status = prepare_in_child(
        None, fsync.call_count + 1 - 2 * syncs, source, tmp_path / "killed", **options
    )
    assert os.WIFSIGNALED(status)
    prepare(source, tmp_path / "killed", **options)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_finished_shards_are_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(make_source(TEXTS), tmp_path, **SMALL, on_progress=stop_after(500))
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("train-*.bin")}
    assert len(before) == 5
    again: list[PrepareProgress] = []
    prepare(make_source(TEXTS), tmp_path, **SMALL, on_progress=again.append)
    assert again[-1].rows > 800 and again[-1].bytes < 0.6 * TEXT_BYTES
    assert all((tmp_path / name).stat().st_mtime_ns == moment for name, moment in before.items())
    assert again[-1].consumed == again[-1].total


def test_a_full_disk_is_an_error_and_finished_shards_are_kept(tmp_path: Path) -> None:
    prepare(make_source(TEXTS), tmp_path / "whole", **SMALL)
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("os.fsync", side_effect=[None] * 20 + [full] * 100),
        pytest.raises(OSError, match=r"is full.* GB free.* run the same command again") as raised,
    ):
        prepare(make_source(TEXTS), tmp_path / "full", **SMALL)
    assert raised.value.errno == errno.ENOSPC
    assert list((tmp_path / "full").glob("train-*.bin")) and not list(
        (tmp_path / "full").glob("*.part")
    )
    prepare(make_source(TEXTS), tmp_path / "full", **SMALL)
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_other_settings_need_another_folder_or_overwrite(tmp_path: Path) -> None:
    first = prepare(make_source(TEXTS), tmp_path, **SMALL)
    (tmp_path / "notes.txt").write_text("not ours")
    times = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert (
        prepare(make_source(TEXTS), tmp_path, **SMALL | {"workers": 1}) == first
    )  # workers decide nothing
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    changed = SMALL | {"length": 32, "tokenizer": "gpt2"}
    message = r"(?s)tokenizer: .* there, .*50258.* now.*length: 64 there, 32 now.*--overwrite"
    with pytest.raises(ValueError, match=message):
        prepare(make_source(TEXTS), tmp_path, **changed)
    with pytest.raises(ValueError, match=r"source: {'texts': "):
        prepare(make_source(TEXTS[1:]), tmp_path, **SMALL)
    assert prepare(make_source(TEXTS), tmp_path, **changed, overwrite=True).length == 32
    assert open_data(tmp_path, verify=True).vocab_size == 50_258
    assert (tmp_path / "notes.txt").read_text() == "not ours"


def test_a_valid_source_of_its_own_is_used_whole(tmp_path: Path) -> None:
    manifest = prepare(
        make_source(TEXTS), tmp_path, **SMALL, valid=make_source(TEXTS[:20], "other")
    )
    assert manifest.splits["train"].rows == (TEXT_BYTES + len(TEXTS)) // 62  # none held out
    assert manifest.splits["valid"].rows == sum(len(text.encode()) + 1 for text in TEXTS[:20]) // 62
    assert manifest.valid_from == "a source of its own"
    assert list(prepare(make_source(TEXTS), tmp_path / "all", **SMALL, valid_share=0).splits) == [
        "train"
    ]


@given(st.integers(3, 100_000), st.sampled_from([0.001, 0.01, 0.3]))
def test_held_out_rows_are_a_share_but_not_too_few_nor_all(rows: int, share: float) -> None:
    held = count_valid_rows(rows, share)
    assert 2 <= held < rows and held >= int(share * rows) and held >= min(64, rows // 10)
    assert held <= max(share * rows, 64)


@pytest.mark.parametrize(
    ("texts", "message"), [(["tiny"], "5? ?fills no row"), (["x" * 70], "1 rows of length 64")]
)
def test_too_little_text_is_an_error_and_leaves_nothing_behind(
    tmp_path: Path, texts: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(make_source(texts), tmp_path, **SMALL)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    prepare(make_source(texts * 40), tmp_path, **SMALL)  # the folder is free for another try


def test_a_tokenizer_is_trained_and_survives_a_stop(tmp_path: Path) -> None:
    options = SMALL | {"tokenizer": None, "train_tokenizer": 600}
    manifest = prepare(make_source(TEXTS), tmp_path / "whole", **options)
    assert (manifest.tokenizer.vocab_size, manifest.tokenizer.mask_id) == (600, 599)
    assert manifest.tokenizer.sha256 == train_bpe(TEXTS, 600, end_token=END_OF_TEXT).sha256
    with pytest.raises(KeyboardInterrupt):
        prepare(make_source(TEXTS), tmp_path / "stopped", **options, on_progress=stop_after(0))
    prepare(make_source(TEXTS), tmp_path / "stopped", **options)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_a_tokenizer_is_trained_on_the_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOKENIZER_BYTES", 5000)
    first = "".join(module.read_first_documents(make_source(TEXTS), 5000))
    assert "".join(TEXTS).startswith(first) and 4900 < len(first.encode()) < 5100
    manifest = prepare(make_source(TEXTS), tmp_path, length=64, train_tokenizer=400)
    expected = train_bpe(
        module.read_first_documents(make_source(TEXTS), 5000), 400, end_token=END_OF_TEXT
    )
    assert manifest.tokenizer.sha256 == expected.sha256


def test_a_named_dataset_has_its_own_settings(tmp_path: Path) -> None:
    (tmp_path / "lm1b.txt").write_text(
        "\n".join(f"Sentence {i} , as the news had it ." for i in range(50))
    )
    manifest = prepare(f"lm1b:{tmp_path / 'lm1b.txt'}", tmp_path / "a", workers=1)
    settings = (manifest.tokenizer.name, manifest.length, manifest.rows)
    assert settings == ("bert-base-uncased", 128, "documents")
    assert manifest.valid_from == "the end of the stream"  # one file is every split
    (tmp_path / "ptb").mkdir()
    for split in ("train", "valid"):
        (tmp_path / "ptb" / f"ptb.{split}.txt").write_text("the cat sat on the mat\n" * 40 + split)
    manifest = prepare(f"ptb:{tmp_path / 'ptb'}", tmp_path / "b", length=16, workers=1)
    assert (manifest.tokenizer.name, manifest.length) == ("gpt2", 16)
    assert manifest.valid_from == "a source of its own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": "sentences"}, "rows is 'sentences': expected wrapped or documents"),
        ({"valid_share": 1.0}, "valid_share is 1.0: .*below 1"),
        ({"shard_tokens": 63}, "length is 64: expected at most shard_tokens, 63"),
        ({"length": 2}, "at least 3"),
        ({"train_tokenizer": 257}, "at least 258"),
        ({"train_tokenizer": 10**30}, "at most 16,777,216"),
        ({"tokenizer": train_bpe(["text"], 260)}, "has no BOS or no EOS token"),
        ({"train_tokenizer": 300}, "'bytes' and train_tokenizer are both given: leave one out"),
    ],
)
def test_invalid_settings_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(make_source(TEXTS), tmp_path, **SMALL | changes)


@pytest.mark.parametrize(
    ("length", "text"), [(1024, "too short"), (3, "too short"), (64, "long enough " * 100)]
)
def test_files_of_the_user_are_never_removed(tmp_path: Path, length: int, text: str) -> None:
    """Neither if the text is too short nor with `overwrite`, even if their names resemble those of shards."""
    for name in (
        "train-small.txt",
        "valid-notes.txt",
        "train-00000-of-00001.parquet",
        "film.mkv.part",
        "a.ends",
    ):
        (tmp_path / name).write_text(text)
    kept = contents(tmp_path)
    options: dict[str, Any] = {"tokenizer": "bytes", "workers": 1, "length": length}
    for overwrite in (False, True):
        with suppress(ValueError):  # too short
            prepare(tmp_path / "train-small.txt", tmp_path, overwrite=overwrite, **options)
    assert kept.items() <= contents(tmp_path).items()


def test_outputs_that_are_not_free_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"text": "mine"}')
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=r"holds tokenizer.json, which no preparation wrote"):
            prepare(make_source(TEXTS), tmp_path, overwrite=overwrite, **SMALL)
    assert contents(tmp_path) == {"tokenizer.json": b'{"text": "mine"}', ".lock": b""}
    (tmp_path / "a.txt").write_text(load_excerpt()[:20_000])
    with pytest.raises(ValueError, match=r"a\.txt is a file: give --out a folder"):
        prepare(make_source(TEXTS), tmp_path / "a.txt", **SMALL)
    for out in (tmp_path, tmp_path / "data", tmp_path / "deep" / "data"):
        with pytest.raises(ValueError, match="whose files are read as text"):
            prepare(tmp_path, out, **SMALL)
    prepare(tmp_path / "a.txt", tmp_path / "data", **SMALL)


def test_two_processes_do_not_prepare_one_folder(tmp_path: Path) -> None:
    refusals = []

    def prepare_again(_: PrepareProgress) -> None:
        with pytest.raises(
            ValueError, match=r"another process prepares .*: wait for it, or change --out"
        ):
            prepare(make_source(TEXTS), tmp_path, **SMALL, overwrite=True)
        refusals.append(1)

    first = prepare(make_source(TEXTS), tmp_path, **SMALL, on_progress=prepare_again)
    assert refusals and prepare(make_source(TEXTS), tmp_path, **SMALL) == first


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_long_documents_are_cut_without_a_trace_and_resumed(
    tmp_path: Path, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(
        "\n<|endoftext|>\n".join(["\n\n".join(TEXTS), *TEXTS[:30]]), "utf-8"
    )
    source, options = open_source(tmp_path / "a.txt"), SMALL | {"rows": rows, "tokenizer": "gpt2"}
    options["shard_tokens"] = 64 * (30 if rows == "wrapped" else 5)
    before = prepare(source, tmp_path / "whole", **options)
    monkeypatch.setattr(formats, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(formats, "PART_CHARACTERS", 3000)
    after = prepare(source, tmp_path / "cut", **options)
    assert [shard.sha256 for shard in after.splits["train"].shards] == [
        shard.sha256 for shard in before.splits["train"].shards
    ]
    for split, totals in after.splits.items():
        assert totals.documents == before.splits[split].documents
        assert abs(totals.bytes - before.splits[split].bytes) < 0.05 * before.splits[split].bytes
    with pytest.raises(KeyboardInterrupt):
        prepare(
            source,
            tmp_path / "stopped",
            **options,
            on_progress=stop_after(100 if rows == "wrapped" else 10),
        )
    prepare(source, tmp_path / "stopped", **options)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "cut")
    tokenizers = []
    for characters in (3000, 10**9):
        monkeypatch.setattr(formats, "PART_CHARACTERS", characters)
        tokenizers.append(train_bpe(module.read_first_documents(source, 50_000), 400).sha256)
    assert tokenizers[0] == tokenizers[1]


def test_a_source_is_hashed_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adlm.data.sources.MIN_KNOWN_BYTES", 1)
    monkeypatch.setattr("adlm.data.sources.KNOWN_HASHES", known := {})
    monkeypatch.setattr(module, "KNOWN_HASHES", known)
    path, out = tmp_path / "a.txt", tmp_path / "out"
    path.write_text(text := load_excerpt()[:20_000])
    os.utime(path, (1000, 1000))
    prepare(path, out, **SMALL)
    known.clear()
    with mock.patch("adlm.data.sources.hash_file", side_effect=AssertionError("hashed again")):
        prepare(path, out, **SMALL)
    assert list(known.values()) == [hashlib.sha256(text.encode()).hexdigest()]
    hashes = (out / "hashes.json").read_bytes()
    for damage in (b"[1]", b'{"a": 1}', b'{"a": "0"}', b"7", b"{", b"\xff"):
        known.clear()
        (out / "hashes.json").write_bytes(damage)
        prepare(path, out, **SMALL)
        assert (out / "hashes.json").read_bytes() == hashes
    path.write_text(text[:10_000] + "X" + text[10_001:])  # in the middle
    with pytest.raises(
        ValueError, match=r"(?s)with other settings:\n  source: .*'sha256': '\w{64}'.* there"
    ):
        prepare(path, out, **SMALL)


def test_damage_to_an_unfinished_preparation_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        prepare(make_source(TEXTS), tmp_path, on_progress=stop_after(350), **SMALL)
    progress, state = (
        tmp_path / "progress.json",
        json.loads((tmp_path / "progress.json").read_text("utf-8")),
    )

    def change(**values: object) -> Callable[[], object]:
        return lambda: progress.write_text(json.dumps(state | values), "utf-8")

    damages: list[tuple[Callable[[], object], str]] = [
        (change(splits=state["splits"] | {"valid": [[]]}), "progress.json has splits"),
        (change(tokenizer="7"), "progress.json has tokenizer '7'"),
        (
            change(splits={"train": state["splits"]["train"] | {"end": [0, "1", 2]}}),
            "progress.json has splits",
        ),
        (
            lambda: (change()(), os.truncate(tmp_path / "train-00001.bin", 100)),
            "train-00001.bin has 100 bytes, 12,800 expected",
        ),
        ((tmp_path / "train-00001.bin").unlink, "train-00001.bin is missing"),
        (lambda: (tmp_path / "progress.json").write_text("{"), "progress.json is not JSON"),
    ]
    for damage, message in damages:
        damage()
        with pytest.raises(ValueError, match=f"{message}.*--overwrite"):
            prepare(make_source(TEXTS), tmp_path, **SMALL)
    prepare(make_source(TEXTS), tmp_path, overwrite=True, **SMALL)
