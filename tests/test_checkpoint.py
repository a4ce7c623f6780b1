"""Checkpoints: complete or absent, verified before they are used, and without code in them."""

import errno
import json
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adlm import files
from adlm.data.shards import open_data
from adlm.models import folder as folder_module
from adlm.models.folder import list_checkpoints, load_model
from adlm.models.language_model import LanguageModel
from adlm.models.methods import METHODS
from adlm.training import state as run_state
from adlm.training.state import CheckpointWriter, Snapshot, name_checkpoint, verify_checkpoint
from tests.cli.terminal import invoke
from tests.training.runs import arguments, curve, data, limit_file_size, run, tensors, tiny_config

FILES = (
    "model.safetensors",
    "config.json",
    "state.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "checksums.json",
)
SHARD = "training/shard-00001-model-00001-of-00001.safetensors"


def tree(folder: Path) -> dict[str, str]:
    """Every file and link, and what is in it."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else files.hash_file(path)
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@pytest.fixture(scope="module")
def ten_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("checkpoints") / "run").folder


@pytest.fixture
def trained(ten_steps: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(ten_steps, tmp_path / "run", symlinks=True)


def tiny() -> LanguageModel:
    return LanguageModel(
        tiny_config(vocab_size=300, mask_id=299, dim=16, heads=2, length=8), seed=3
    )


def writer(folder: Path, **options: Any) -> CheckpointWriter:
    tokenizer = open_data(data()).tokenizer
    model = tiny()
    described = folder_module.LoadedModel(model, tokenizer, "adlm", 0).describe(model)
    return CheckpointWriter(folder, described, tokenizer, **options)


def snapshot(step: int, *, is_best: bool = False) -> Snapshot:
    weights = {name: p.detach() + step for name, p in tiny().named_parameters()}
    return Snapshot(
        step,
        weights,
        {f"weights.{name}": p for name, p in weights.items()},
        {"step": step},
        is_best,
    )


def test_the_layout_is_a_contract(trained: Path) -> None:
    newest = trained / "checkpoints" / "latest"
    assert (
        newest.is_symlink() and os.readlink(newest) == "step-00000010"
    )  # relative: a run can be moved
    paths = [
        *(newest / name for name in (*FILES, SHARD)),
        trained / "metrics.jsonl",
        trained / "config.yaml",
    ]
    assert all(path.is_file() for path in paths)
    assert [path.name for path in trained.rglob(".*")] == [".lock"], "something unfinished was left"
    weights = load_file(newest / "model.safetensors")
    assert weights.keys() == dict(load_model(trained).model.named_parameters()).keys()
    assert json.loads((newest / "state.json").read_text("utf-8"))["step"] == 10
    assert json.loads((newest / "config.json").read_text("utf-8"))["method"] == "adlm"
    moved = trained.rename(trained.with_name("moved"))
    assert load_model(moved).step == 10 and verify_checkpoint(moved / "checkpoints" / "latest")


CALLS = ("fsync", "rename", "replace", "symlink", "mkdir")  # of os: all that a checkpoint becomes


@pytest.mark.parametrize("name", CALLS)
def test_an_error_at_any_call_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    call, failures = 0, 1
    while failures:  # each call of the function fails once, until there is none left
        folder = tmp_path / str(call)
        failures = write_with_error(folder, monkeypatch, name, call)
        call += 1
    assert call > 1


def write_with_error(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, call: int) -> int:
    """Write a second checkpoint while a call of a function of `os` fails; return whether it did."""
    writing = writer(folder)
    writing.save(snapshot(1))
    writing.wait()
    first, second = folder / name_checkpoint(1), folder / name_checkpoint(2)
    before, plain, calls = tree(first), getattr(os, name), []

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == call + 1:
            raise RuntimeError("the lights went out")
        return plain(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        with suppress(RuntimeError, OSError):
            writing.save(snapshot(2))
            writing.wait()
    assert tree(first) == before
    latest = folder_module.find_latest_checkpoint(folder)
    assert latest == second if len(calls) <= call else latest in (first, second)
    assert not list(folder.glob(f"{files.PARTIAL}*"))
    for path in list_checkpoints(folder):
        verify_checkpoint(path)
    writing.save(snapshot(2))  # and the writer can go on
    writing.wait()
    assert folder_module.find_latest_checkpoint(folder) == verify_checkpoint(second)
    stored = folder_module.read_weights(folder / "latest")["head.bias"]
    assert torch.equal(stored, snapshot(2).weights["head.bias"])
    return int(len(calls) > call)


def test_the_partial_folder_of_a_killed_run_is_ignored_and_removed(tmp_path: Path) -> None:
    writing = writer(tmp_path, background=False)
    writing.save(snapshot(1))
    first = tmp_path / name_checkpoint(1)
    shutil.copytree(first, tmp_path / f"{files.PARTIAL}{name_checkpoint(2)}")
    assert (
        list_checkpoints(tmp_path) == [first]
        and folder_module.find_latest_checkpoint(tmp_path) == first
    )
    writing.save(snapshot(3))
    assert not list(tmp_path.glob(f"{files.PARTIAL}*"))


def test_the_latest_and_the_best_are_kept(tmp_path: Path) -> None:
    run(tmp_path, "checkpoint.every=1", "checkpoint.keep=3", "valid.every=4")
    nll = {record["step"]: record["val/nll"] for record in curve(tmp_path) if "val/nll" in record}
    best, folder = min(nll, key=lambda step: nll[step]), tmp_path / "checkpoints"
    assert (
        os.readlink(folder / "best") == name_checkpoint(best)
        and os.readlink(folder / "latest") == "step-00000010"
    )
    assert {path.name for path in list_checkpoints(folder)} == {
        name_checkpoint(n) for n in (8, 9, 10, best)
    }
    writing = writer(tmp_path / "other", keep=2)
    for step in range(1, 7):
        writing.save(snapshot(step, is_best=step == 2))
    writing.wait()
    assert [path.name for path in list_checkpoints(tmp_path / "other")] == [
        name_checkpoint(n) for n in (2, 5, 6)
    ]


DAMAGES = [*((name, "flipped") for name in (*FILES, SHARD)), (SHARD, "cut"), ("state.json", "gone")]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_file_is_named_and_nothing_is_changed(
    trained: Path, name: str, damage: str
) -> None:
    checkpoints = trained / "checkpoints"
    file = checkpoints / "latest" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x80
    file.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    if damage == "gone":
        file.unlink()
    before = tree(trained)
    with pytest.raises(
        ValueError, match=r"step-00000010.*Nothing was changed; resume=\S*step-00000005"
    ) as caught:
        run(trained, "steps=12")
    assert name in str(caught.value)
    assert tree(trained) == before
    run(trained, f"resume={checkpoints / 'step-00000005'}", "steps=12")
    assert load_model(trained, verify=True).step == 12


def test_damaged_weights_are_not_loaded(tmp_path: Path) -> None:
    writer(tmp_path, background=False).save(snapshot(1))
    path = tmp_path / name_checkpoint(1)
    os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size - 100)
    with pytest.raises(
        ValueError, match=r"model\.safetensors is missing or was changed.*there is none"
    ):
        verify_checkpoint(path)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(path)


@pytest.mark.parametrize(
    ("method", "tied"), [*((method, False) for method in METHODS), ("adlm", True), ("ar", True)]
)
def test_a_model_is_loaded_from_its_run_or_its_checkpoint(
    tmp_path: Path, method: str, tied: bool
) -> None:
    one_stage = () if METHODS[method].two_stages else ("model.anchor_layers=null",)
    run(tmp_path, f"method={method}", *one_stage, f"model.tied={tied}", "steps=5")
    whole = tensors(tmp_path)
    checkpoints = tmp_path / "checkpoints"
    for place in (
        tmp_path,
        str(tmp_path),
        checkpoints / "latest",
        checkpoints / name_checkpoint(5),
    ):
        loaded = load_model(place)
        assert (loaded.method, loaded.step, loaded.model.training) == (method, 5, False)
        assert (
            loaded.tokenizer is not None
            and loaded.tokenizer.sha256 == open_data(data()).tokenizer.sha256
        )
        for name, parameter in loaded.model.named_parameters():
            assert torch.equal(parameter, whole[f"model.{name}"])
        assert (loaded.model.head.weight is loaded.model.embed.weight) == tied
    # The average is loaded, not the trained weights.
    assert not torch.equal(whole["model.embed.weight"], whole["weights.embed.weight"])


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a run folder nor a model folder"):
        load_model(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        load_model(tmp_path)
    writer(tmp_path / "checkpoints", background=False).save(snapshot(1))
    path = tmp_path / "checkpoints" / name_checkpoint(1) / "config.json"
    content = json.loads(path.read_text("utf-8"))
    for change, message in (
        ({"format": 99}, "format=99: expected .*update adlm"),
        ({"model": content["model"] | {"wings": 2}}, "wings"),
    ):
        path.write_text(json.dumps(content | change), "utf-8")
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path)


def test_another_optimizer_or_model_is_named_by_its_tensor(trained: Path) -> None:
    for name, message in (
        ("optimizer.x.momentum_buffer", r"has no optimizer\.x\.momentum_buffer"),
        ("weights.embed.weight", r"has weights\.embed\.weight of shape .*, expected shape \(2,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run_state.load_training_tensors(
                trained / "checkpoints" / "latest", {name: torch.zeros(2)}
            )


def test_nothing_is_unpickled(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a checkpoint must not be able to run code")

    files = [
        path for path in (trained / "checkpoints" / "latest").resolve().rglob("*") if path.is_file()
    ]
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert load_model(trained, verify=True).step == 10
    assert run(trained, "steps=12").step == 12


def test_a_run_on_a_full_disk_ends_with_a_clear_error_and_resumes(tmp_path: Path) -> None:
    run(tmp_path, "steps=5")
    before = tree(tmp_path / "checkpoints")
    with limit_file_size(60_000):
        result = invoke("train", *arguments(tmp_path))
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert all(
        part in result.stderr for part in ("could not be written", "step-00000005", "Make room")
    )
    assert tree(tmp_path / "checkpoints") == before
    assert load_model(tmp_path, verify=True).step == 5
    run(tmp_path)  # with room again, it resumes
    assert load_model(tmp_path, verify=True).step == 10


@pytest.mark.parametrize("large", ["training", "weights", "state"])
def test_a_full_disk_is_a_clear_error(tmp_path: Path, large: str) -> None:
    """Whichever of a checkpoint's files does not fit: the limit is the operating system's."""
    checkpoints, tensors = writer(tmp_path, background=False), {"x": torch.zeros(10)}
    checkpoints.save(snapshot(5))
    before = tree(tmp_path)
    parts: dict[str, Any] = {"weights": tensors, "training": tensors, "state": {"step": 10}}
    parts[large] = {"x": "long" * 100_000} if large == "state" else {"x": torch.zeros(100_000)}
    with limit_file_size(200_000), pytest.raises(OSError, match=r"step-00000005.*Make room"):
        checkpoints.save(Snapshot(10, **parts))
    assert tree(tmp_path) == before and verify_checkpoint(tmp_path / "latest")


def test_a_full_disk_is_foreseen(tmp_path: Path) -> None:
    petabytes = {"x": torch.zeros(1).expand(2**50)}
    with pytest.raises(OSError, match=r"are free.*Make room") as raised:
        writer(tmp_path, background=False).save(Snapshot(10, petabytes, petabytes, {"step": 10}))
    assert raised.value.errno == errno.ENOSPC and not tree(tmp_path)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    loaded = folder_module.LoadedModel(tiny().eval(), open_data(data()).tokenizer, "adlm", 1)
    return folder_module.export_model(loaded, folder)


@pytest.fixture
def model_folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of an exported model without checksums, so that what is wrong has to be found."""
    folder = shutil.copytree(exported, tmp_path / "model")
    (folder / "checksums.json").unlink()
    return folder


HUGE = {"length": 10**9, "denoiser_layers": 10**6, "vocab_size": 2**40, "dim": 10**12}
WRONG_SIZES = [
    *HUGE.items(),
    ("length", -8),
    ("heads", 0),
    ("dim", "16"),
    ("cond_dim", 0.5),
    ("tied", "no"),
]


@pytest.mark.parametrize(("key", "value"), WRONG_SIZES)
def test_sizes_are_checked_before_anything_is_built(
    model_folder: Path, key: str, value: object
) -> None:
    change_config(model_folder, model={key: value})
    with pytest.raises(ValueError, match=rf"config\.json: {key}=.*: expected .*copy or download"):
        load_model(model_folder)


def change_config(folder: Path, model: dict[str, Any], **changes: Any) -> None:
    content = json.loads((folder / "config.json").read_text("utf-8"))
    content = content | changes | {"model": content["model"] | model}
    (folder / "config.json").write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"vocab_size": 301}, r"embed\.weight is I8 \(300, 16\), expected float \(301, 16\)"),
        ({"denoiser_layers": 900}, r"denoiser\.layers\.\d+\.\S+ is missing, expected float"),
        ({"anchor_layers": 0}, r"is \w+ \(.*\), expected no such tensor"),
        ({"dim": 32}, "does not fit model.safetensors"),
    ],
)
def test_the_config_is_compared_with_the_header_of_the_weights(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, Any], message: str
) -> None:
    change_config(model_folder, model)
    monkeypatch.setattr(
        folder_module, "load_file", lambda path: pytest.fail("the weights were read")
    )
    with pytest.raises(ValueError, match=message):
        load_model(model_folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "1"}, "format='1': expected a whole number"),
        ({"step": -1}, "step=-1: expected"),
        ({"rows": ["wrapped"]}, r"rows=\[\'wrapped\'\]: expected"),
        ({"rows": "loose"}, "rows='loose': expected"),
        ({"method": None}, "method=None: expected a text"),
        ({"method": "bert"}, "'bert'"),
    ],
)
def test_the_rest_of_the_config_is_checked(
    model_folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(model_folder, {}, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(model_folder)


@pytest.mark.parametrize(
    "content", ["[" * 200_000, "[]", "{}", "3", "\ufeff{}", '{"model": []}', "1" * 10_000]
)
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]
)
def test_files_that_are_something_else_are_refused(
    model_folder: Path, name: str, content: str
) -> None:
    (model_folder / name).write_text(content, "utf-8")
    if (name, content) in (
        ("tokenizer_config.json", "{}"),
        ("tokenizer_config.json", '{"model": []}'),
    ):
        assert load_model(model_folder).step == 1  # names no special tokens
        return
    with pytest.raises(ValueError, match=r"(copy|make|fetch|damaged|download)"):
        load_model(model_folder)


def test_a_flipped_bit_is_found_when_a_model_is_loaded(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "model")
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"model\.safetensors is missing or was changed.*delete checksums\.json"
    ):
        load_model(folder)
    assert load_model(folder, verify=False).step == 1
    for checksums, problem in (
        ("{}", "does not list config.json"),
        ("[]", "does not list"),
        ("", "cannot be read"),
    ):
        (folder / "checksums.json").write_text(checksums, "utf-8")
        with pytest.raises(ValueError, match=problem):
            load_model(folder)
        with pytest.raises(ValueError, match=problem):
            verify_checkpoint(folder)
    (folder / "checksums.json").unlink()
    assert load_model(folder).step == 1  # nothing to compare with
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(folder, verify=True)


def test_checksums_of_files_outside_the_folder_are_refused(trained: Path) -> None:
    latest = (trained / "checkpoints" / "latest").resolve()
    expected = json.loads((latest / "checksums.json").read_text("utf-8"))
    files.write_json(latest / "checksums.json", {"../../config.yaml": "0" * 64} | expected)
    with pytest.raises(ValueError, match=r"config\.yaml', which is outside the folder"):
        verify_checkpoint(latest)


def test_a_file_that_is_loaded_must_be_in_the_checksums(exported: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(exported, tmp_path / "model")
    (folder / "special_tokens_map.json").write_text("{}", "utf-8")
    with pytest.raises(ValueError, match=r"does not list special_tokens_map\.json"):
        load_model(folder)
    folder_module.export_model(load_model(folder, verify=False), folder)
    assert load_model(folder, verify=True).step == 1


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("head.bias", torch.int8, r"head\.bias is I8 \(300,\), expected float \(300,\)"),
        ("embed.weight.scale", torch.int8, r"embed\.weight\.scale is I8 \(300,\), expected float"),
        ("embed.weight", torch.int32, r"embed\.weight is I32 \(300, 16\), expected float"),
    ],
)
def test_only_matrices_may_be_int8(
    model_folder: Path, name: str, dtype: torch.dtype, message: str
) -> None:
    weights = load_file(model_folder / "model.safetensors")
    weights[name] = weights[name].to(dtype)
    if dtype == torch.int8:
        weights[name + ".scale"] = torch.ones(len(weights[name]))
    save_file(weights, model_folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(model_folder)


@pytest.mark.parametrize("damaged", [(), ("step",), ("latest",)])
def test_the_sound_copy_of_a_checkpoint_is_kept(tmp_path: Path, damaged: tuple[str, ...]) -> None:
    writer(tmp_path, background=False).save(snapshot(1))
    named, latest = tmp_path / name_checkpoint(1), tmp_path / "latest"
    latest.unlink()
    shutil.copytree(named, latest)
    before = tree(named)
    for folder in (named, latest):
        if folder.name[:4] in {name[:4] for name in damaged}:
            (folder / "model.safetensors").write_bytes(b"")
    run_state.restore_links(tmp_path)
    assert os.readlink(latest) == named.name and tree(named) == before
