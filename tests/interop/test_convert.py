"""Checkpoints of the lineage, written here with the golden weights: converted, converted back, damaged, malicious."""

import json
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import adlm
from adlm.convert import StoredObject, load_lineage, map_names, read_pickle, write_lightning
from adlm.models.folder import export_model, load_model
from tests.cli.terminal import answer_json, assert_error, invoke
from tests.goldens import HEADS, arrays, model, weights
from tests.interop.omegaconf_objects import OmegaConf, make_node, omegaconf_modules
from tests.text.models import tokenizer

POSSIBLE = -1e5  # below this an entry is the lineage's stand-in for minus infinity
DIM, VOCAB, COND = 32, 65, 16


@pytest.fixture(autouse=True)
def named_modules() -> Iterator[None]:
    """Give the stored settings the names of their library."""
    with omegaconf_modules():
        yield


class Modulated(nn.Module):
    """A part of the lineage's network: named children in its order, weights by shape."""

    def __init__(self, **shapes: tuple[int, ...] | nn.Module) -> None:
        super().__init__()
        for name, shape in shapes.items():
            if isinstance(shape, nn.Module):
                self.add_module(name, shape)
            elif len(shape) == 1:
                self.register_module(name, norm := nn.Module())
                norm.weight = nn.Parameter(torch.empty(shape))
            else:
                self.register_module(name, nn.Linear(shape[1], shape[0], bias=len(shape) == 3))


class LineageStage(nn.Module):
    """The modules of a DiT of the lineage, in the order in which its code makes them."""

    def __init__(self, layers: int, embed: nn.Module, is_causal: bool) -> None:
        super().__init__()
        self.vocab_embed = embed
        if not is_causal:
            self.sigma_map = Modulated(
                mlp=nn.Sequential(nn.Linear(256, COND), nn.SiLU(), nn.Linear(COND, COND))
            )
        self.rotary_emb = nn.Module()
        self.rotary_emb.register_buffer("inv_freq", torch.empty(DIM // HEADS // 2))
        rate: dict[str, Any] = {} if is_causal else {"adaLN_modulation": (6 * DIM, COND, 1)}
        self.blocks = nn.ModuleList(
            Modulated(
                norm1=(DIM,),
                attn_qkv=(3 * DIM, DIM),
                attn_out=(DIM, DIM),
                norm2=(DIM,),
                mlp=nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)),
                **rate,
            )
            for _ in range(layers)
        )
        last: dict[str, Any] = {} if is_causal else {"adaLN_modulation": (2 * DIM, COND, 1)}
        self.output_layer = Modulated(norm_final=(DIM,), linear=(VOCAB, DIM, 1), **last)


class Lineage(nn.Module):
    """What the lineage's LightningModule has in its state dict, and how it loads a checkpoint."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        embed = nn.Module()
        embed.embedding = nn.Parameter(torch.empty(VOCAB, DIM))
        self.backbone = LineageStage(4, embed, kind == "ar")
        if kind == "adlm":
            self.denoiser = LineageStage(2, nn.Sequential(nn.Linear(VOCAB, DIM)), False)

    def load(self, checkpoint: dict[str, Any]) -> list[Tensor]:
        self.load_state_dict(checkpoint["state_dict"], strict=True)
        loops = checkpoint["loops"]["fit_loop"]
        assert loops["epoch_progress"]["current"]["completed"] == 0
        assert loops["epoch_loop.batch_progress"]["current"]["completed"] == 0
        shadow = checkpoint["ema"]["shadow_params"]
        for average, parameter in zip(shadow, self.parameters(), strict=True):
            assert average.shape == parameter.shape
        return shadow


def lineage_config(kind: str, **changes: Any) -> dict[str, Any]:
    shape = {
        "hidden_size": DIM,
        "n_heads": HEADS,
        "n_blocks": 4,
        "length": 16,
        "cond_dim": COND,
        "dropout": 0.0,
    }
    config = {
        "parameterization": "ar" if kind == "ar" else "subs",
        "time_conditioning": False,
        "model": shape,
    }
    config |= {
        "data": {"wrap": True},
        "loader": {"batch_size": "${div_up:${loader.global_batch_size}, 8}"},
    }
    for name, value in changes.items():
        group, _, key = name.rpartition("__")
        (config[group] if group else config)[key] = value
    return config


def make_checkpoint(kind: str, *, is_ema: bool = True, **changes: Any) -> dict[str, Any]:
    """A checkpoint as Lightning writes it: the golden weights are its EMA, or without one its weights."""
    lineage = Lineage(kind)
    lineage.load_state_dict(weights(kind), strict=True)
    state = lineage.state_dict()
    checkpoint: dict[str, Any] = {
        "epoch": 1,
        "global_step": 7,
        "pytorch-lightning_version": "2.2.1",
        "callbacks": {},
    }
    if is_ema:
        shadow = [parameter.detach().clone() for parameter in lineage.parameters()]
        checkpoint["ema"] = {"decay": 0.9999, "num_updates": 7, "shadow_params": shadow}
        state = {name: value if "inv_freq" in name else value * 2 for name, value in state.items()}
    hyper = {"config": make_node(lineage_config(kind, **changes))}
    return checkpoint | {
        "state_dict": state,
        "hyper_parameters": hyper,
        "optimizer_states": [{"state": {}}],
    }


def save_checkpoint(path: Path, kind: str = "adlm", **options: Any) -> Path:
    torch.save(make_checkpoint(kind, **options), path)
    return path


def assert_golden(folder: Path, kind: str, time_conditioning: bool = False) -> None:
    """The model of a folder gives the authors' log-probabilities."""
    golden = arrays(
        "ar_gpt2like" if kind == "ar" else f"forward_{kind}_gpt2like_tc{int(time_conditioning)}"
    )
    inputs = (golden["input_tokens"],) if kind == "ar" else (golden["xt"], golden["sigma"])
    with torch.no_grad():
        _, log_probs = load_model(folder).model.log_probs(*inputs)
    possible = golden["log_probs"] > POSSIBLE
    torch.testing.assert_close(
        log_probs[possible], golden["log_probs"][possible], atol=1e-4, rtol=0
    )


def make_tokenizer(folder: Path) -> str:
    """A tokenizer of 64 words, whose mask is token 64."""
    vocabulary = {f"w{i}": i for i in range(64)}
    bpe = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    bpe.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


@pytest.mark.parametrize("is_ema", [False, True])
@pytest.mark.parametrize(
    ("kind", "time_conditioning"),
    [("adlm", False), ("adlm", True), ("mdlm", False), ("mdlm", True), ("ar", False)],
)
def test_a_converted_checkpoint_gives_the_golden_log_probs(
    tmp_path: Path, kind: str, is_ema: bool, time_conditioning: bool
) -> None:
    path = save_checkpoint(
        tmp_path / "last.ckpt", kind, is_ema=is_ema, time_conditioning=time_conditioning
    )
    summary = answer_json("convert", path, "--out", tmp_path / "model")
    assert (
        summary["method"] == kind
        and summary["weights"] == ("ema" if is_ema else "raw")
        and summary["step"] == 7
    )
    assert summary["length"] == 16 and summary["time_conditioning"] is time_conditioning
    assert (
        summary["layers"] == ([4, 2] if kind == "adlm" else [0, 4]) and summary["tokenizer"] is None
    )
    assert_golden(tmp_path / "model", kind, time_conditioning)
    config = load_model(tmp_path / "model", verify=True).model.config
    assert config.heads == HEADS and config.is_causal == (kind == "ar") and config.dropout == 0.0


def test_raw_weights_and_the_older_name_of_the_denoiser(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("adlm")
    state = {
        name.replace("denoiser.", "replica."): value
        for name, value in checkpoint["state_dict"].items()
    }
    torch.save(checkpoint | {"state_dict": state}, tmp_path / "old.ckpt")
    for flag, factor in (("--raw", 2), ("--ema", 1)):
        assert (
            answer_json("convert", tmp_path / "old.ckpt", "--out", tmp_path / flag, flag)["weights"]
            == flag[2:]
        )
        converted = load_file(tmp_path / flag / "model.safetensors")
        assert all(
            torch.equal(converted[name], factor * value)
            for name, value in model("adlm").state_dict().items()
        )
    state["denoiser.extra"] = torch.zeros(1)
    torch.save(checkpoint | {"state_dict": state}, tmp_path / "old.ckpt")
    assert_error(
        invoke("convert", tmp_path / "old.ckpt", "--out", tmp_path / "x"), "denoiser.extra"
    )


@pytest.mark.parametrize("kind", ["adlm", "mdlm", "ar"])
def test_round_trips_are_bit_identical(tmp_path: Path, kind: str) -> None:
    path = save_checkpoint(tmp_path / "last.ckpt", kind, is_ema=False)
    for source, out, words in (
        (path, "model", ()),
        (tmp_path / "model", "back.ckpt", ("--to", "lightning")),
        (tmp_path / "back.ckpt", "again", ()),
        (
            tmp_path / "last.ckpt",
            "other",
            ("--to", "lightning"),
        ),  # to a folder, without one of ours between
    ):
        assert invoke("convert", source, "--out", tmp_path / out, *words).exit_code == 0
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    golden = torch.load(path, weights_only=False)["state_dict"]
    for file in (tmp_path / "back.ckpt", tmp_path / "other" / "model.ckpt"):
        back = torch.load(file, weights_only=True)  # plain values only
        assert list(back["state_dict"]) == list(golden)
        assert all(torch.equal(back["state_dict"][name], value) for name, value in golden.items())
        lineage = Lineage(kind)
        shadow = lineage.load(back)
        assert all(
            torch.equal(average, p) for average, p in zip(shadow, lineage.parameters(), strict=True)
        )
        assert back["global_step"] == back["ema"]["num_updates"] == 7
        assert back["hyper_parameters"]["config"]["model"]["length"] == 16


def test_a_tokenizer_that_a_checkpoint_cannot_hold_gives_a_warning(tmp_path: Path) -> None:
    loaded, _ = load_lineage(save_checkpoint(tmp_path / "last.ckpt", "mdlm"))
    export_model(
        replace(loaded, tokenizer=tokenizer("bytes")), tmp_path / "model", is_quantized=False
    )
    result = invoke(
        "convert", tmp_path / "model", "--out", tmp_path / "back.ckpt", "--to", "lightning"
    )
    assert result.exit_code == 0 and "has no tokenizer; give --tokenizer" in result.output


def test_the_order_of_names_is_that_of_the_parameters() -> None:
    for kind in ("adlm", "mdlm", "ar"):
        assert [name for name, _ in Lineage(kind).named_parameters()] == list(
            map_names(model(kind).config)
        )


def test_models_that_the_lineage_does_not_have_are_refused(tmp_path: Path) -> None:
    result = invoke("convert", "adlm-prose", "--out", tmp_path / "x.ckpt", "--to", "lightning")
    assert_error(
        result,
        "the lineage's code has no model with norm_bias = True, tied = True, bridge = 'direct', embed_norm = True, "
        "qk_norm = True, cond_dim = None",
    )
    assert_error(
        invoke("convert", "adlm-prose", "--out", tmp_path / "x"),
        "the only conversion of it is --to lightning",
    )
    result = invoke("convert", "adlm-prose", "--out", tmp_path / "x", "--to", "lightning", "--raw")
    assert_error(result, "the only conversion of it is --to lightning")
    assert not any(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "last.ckpt")
    before = path.read_bytes()
    assert_error(invoke("convert", path, "--out", tmp_path), "already exists")
    assert_error(invoke("convert", path, "--out", path, "--to", "lightning"), "already exists")
    assert_error(invoke("models", path), "is a checkpoint of other code: `adlm convert")
    assert path.read_bytes() == before


def test_a_tokenizer_is_kept_and_must_fit(tmp_path: Path) -> None:
    path, tokenizer = save_checkpoint(tmp_path / "last.ckpt", "mdlm"), make_tokenizer(tmp_path)
    summary = answer_json("convert", path, "--out", tmp_path / "model", "--tokenizer", tokenizer)
    assert summary["tokenizer"] is not None
    lm = adlm.load(tmp_path / "model", device="cpu")
    assert lm.generate(length=8, steps=4)[0].split() and lm.method == "mdlm"
    result = invoke("convert", path, "--out", tmp_path / "x", "--tokenizer", "gpt2")
    assert_error(result, "gpt2 has 50258 tokens with the mask, the model 65")
    path = save_checkpoint(tmp_path / "other.ckpt", data__tokenizer_name_or_path="some/where")
    assert_error(
        invoke("convert", path, "--out", tmp_path / "x"),
        "'some/where' is not bundled",
        "--tokenizer",
    )
    path = save_checkpoint(tmp_path / "text8.ckpt", data__tokenizer_name_or_path="text8")
    assert_error(
        invoke("convert", path, "--out", tmp_path / "x"), "characters has 35 tokens with the mask"
    )


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"model__n_heads": 8}, (), "do not fit heads = 8"),
        ({"model__n_heads": 5}, (), "heads=5: expected dim to be a multiple of heads"),
        ({"model__n_heads": 0}, (), "heads=0: expected a whole number at least 1"),
        ({"model__hidden_size": 64}, (), "dim is 64, but the weights are of 32"),
        ({"model__n_blocks": 12}, (), "layers is 12, but the weights are of 4"),
        ({"model__cond_dim": 128}, (), "cond_dim is 128, but the weights are of 16"),
        (
            {"parameterization": "sedd"},
            (),
            "parameterization is 'sedd', but the weights are of 'subs'",
        ),
        ({"model__length": "long"}, (), "length='long': expected a whole number"),
        ({"time_conditioning": 1}, (), "time_conditioning=1: expected true or false"),
        ({"is_ema": False}, ("--ema",), "there is no EMA: convert with --raw"),
    ],
)
def test_contradictions_are_errors(
    tmp_path: Path, changes: dict[str, Any], words: tuple[object, ...], message: str
) -> None:
    path = save_checkpoint(tmp_path / "last.ckpt", **changes)
    assert_error(invoke("convert", path, "--out", tmp_path / "model", *words), str(path), message)
    assert not (tmp_path / "model").exists()


def test_settings_that_the_file_lacks(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("adlm")
    del checkpoint["hyper_parameters"]
    torch.save(checkpoint, tmp_path / "bare.ckpt")
    loaded, _ = load_lineage(tmp_path / "bare.ckpt")
    assert (
        loaded.model.config.heads == HEADS and loaded.model.config.length == 1024
    )  # heads by the frequencies
    assert invoke("convert", tmp_path / "bare.ckpt", "--out", tmp_path / "model").exit_code == 0
    assert_golden(tmp_path / "model", "adlm")
    torch.save(
        {name: v for name, v in checkpoint["state_dict"].items() if "inv_freq" not in name},
        tmp_path / "b.ckpt",
    )
    with pytest.raises(ValueError, match="number of heads is unknown"):
        load_lineage(tmp_path / "b.ckpt")


def test_rows_of_documents(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "last.ckpt", data__wrap=False)
    loaded, _ = load_lineage(path)
    assert loaded.rows == "documents"
    write_lightning(loaded, tmp_path / "back.ckpt")
    assert load_lineage(tmp_path / "back.ckpt")[0].rows == "documents"


def test_keys_without_a_place_are_listed(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("adlm")
    extra = [f"backbone.extra.{i}" for i in range(3)] + [
        "noise.sigma",
        "head.rotary_emb.inv_freq",
        "denoiser.blocks.1.x",
    ]
    torch.save(
        checkpoint
        | {"state_dict": checkpoint["state_dict"] | dict.fromkeys(extra, torch.zeros(1))},
        tmp_path / "x.ckpt",
    )
    assert_error(
        invoke("convert", tmp_path / "x.ckpt", "--out", tmp_path / "m"), "6 keys", ", ".join(extra)
    )
    many = {f"extra.{i}": torch.zeros(1) for i in range(30)}
    torch.save(checkpoint | {"state_dict": checkpoint["state_dict"] | many}, tmp_path / "x.ckpt")
    assert_error(
        invoke("convert", tmp_path / "x.ckpt", "--out", tmp_path / "m"),
        "30 keys",
        "extra.19 and 10 more",
    )
    state = dict(checkpoint["state_dict"])
    del state["denoiser.blocks.0.norm1.weight"]
    torch.save(checkpoint | {"state_dict": state}, tmp_path / "x.ckpt")
    assert_error(
        invoke("convert", tmp_path / "x.ckpt", "--out", tmp_path / "m"),
        "denoiser.blocks.0.norm1.weight",
    )
    state = checkpoint["state_dict"] | {"denoiser.output_layer.linear.bias": torch.zeros(64)}
    torch.save(checkpoint | {"state_dict": state, "ema": None}, tmp_path / "x.ckpt")
    assert_error(
        invoke("convert", tmp_path / "x.ckpt", "--out", tmp_path / "m"),
        "float32 (64,), expected float (65,)",
    )
    scalar = checkpoint["state_dict"] | {"backbone.sigma_map.mlp.2.weight": torch.zeros(())}
    torch.save(checkpoint | {"state_dict": scalar, "ema": None}, tmp_path / "x.ckpt")
    assert_error(invoke("convert", tmp_path / "x.ckpt", "--out", tmp_path / "m"), "expected float")
    for value, message in (
        (torch.zeros(VOCAB).long(), "int64 (65,), expected float (65,)"),
        (torch.zeros(VOCAB).to_sparse(), "float32 (65,), expected float (65,)"),
    ):
        state["denoiser.output_layer.linear.bias"] = value
        torch.save(checkpoint | {"state_dict": state, "ema": None}, tmp_path / "x.ckpt")
        assert_error(invoke("convert", tmp_path / "x.ckpt", "--out", tmp_path / "m"), message)
    huge = checkpoint["state_dict"] | {
        "backbone.vocab_embed.embedding": torch.zeros(1).expand(2**24, 2**16)
    }
    torch.save(checkpoint | {"state_dict": huge, "ema": None}, tmp_path / "x.ckpt")
    assert_error(
        invoke("convert", tmp_path / "x.ckpt", "--out", tmp_path / "m"), str(tmp_path / "x.ckpt")
    )


def test_an_average_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint("adlm")
    shadow, path = checkpoint["ema"]["shadow_params"], tmp_path / "x.ckpt"
    for wrong, message in (
        (shadow[:-1], "80 tensors for 81 parameters"),
        ([shadow[1], shadow[0], *shadow[2:]], "backbone.vocab_embed.embedding is float32"),
        ({"a": 1}, "is no list of tensors"),
    ):
        torch.save(checkpoint | {"ema": {"shadow_params": wrong}}, path)
        assert_error(invoke("convert", path, "--out", tmp_path / "model"), message, "--raw")
    ordered = dict(sorted(checkpoint["state_dict"].items()))
    torch.save(checkpoint | {"state_dict": ordered}, path)
    assert_error(
        invoke("convert", path, "--out", tmp_path / "model"),
        "not in the order that the EMA follows",
        "--raw",
    )
    assert invoke("convert", path, "--out", tmp_path / "model", "--raw").exit_code == 0


class Call:
    """Unpickles to the result of a call."""

    def __init__(self, function: Any, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("place", ["state_dict", "hyper_parameters", "callbacks"])
def test_a_malicious_pickle_is_refused_and_not_executed(
    tmp_path: Path, place: str, is_zip: bool
) -> None:
    marker, path = tmp_path / "marker", tmp_path / "evil.ckpt"
    source = f"open({str(marker)!r}, 'w').close()"
    for function, argument in (
        (os.system, f"touch {marker}"),
        (exec, source),
        (eval, source),
        (Path.touch, marker),
    ):
        checkpoint = make_checkpoint("adlm")
        checkpoint[place]["x"] = Call(function, argument)
        torch.save(checkpoint, path, _use_new_zipfile_serialization=is_zip)
        name = "getattr" if function is Path.touch else function.__name__
        name = name if is_zip else "not a zip file"
        assert_error(invoke("convert", path, "--out", tmp_path / "model"), name, str(path))
        with pytest.raises(ValueError, match=name):
            adlm.load(path)
        assert not marker.exists() and not (tmp_path / "model").exists()
        (folder := tmp_path / "hub").mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "mdlm"}), "utf-8")
        state = checkpoint["state_dict"] | {"x": Call(function, argument)}
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
        assert_error(invoke("convert", folder, "--out", tmp_path / "model"), name)
        assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()  # the file would have run its code


def test_stored_objects_are_neither_imported_nor_called(tmp_path: Path) -> None:
    """Names of allowed packages are read as data, whatever they are."""
    checkpoint = make_checkpoint("adlm", time_conditioning=True)
    checkpoint["callbacks"]["x"] = Call(OmegaConf.register_new_resolver, "stolen", 3)
    path = tmp_path / "x.ckpt"
    torch.save(checkpoint, path)
    with pytest.raises(ValueError, match=r"builtins\.getattr"):
        read_pickle(path)  # a method needs getattr, which is no stored type
    checkpoint["callbacks"]["x"] = Call(OmegaConf, "argument")
    torch.save(checkpoint, path)
    assert isinstance(read_pickle(path)["callbacks"]["x"], StoredObject)
    assert load_lineage(path)[0].model.config.time_conditioning
    assert OmegaConf.resolvers == {}


def test_the_tokenizer_in_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make_tokenizer(tmp_path)
    checkpoint = make_checkpoint("mdlm")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), unk_token="w0"
    )
    checkpoint["hyper_parameters"]["tokenizer"] = tokenizer
    torch.save(checkpoint, tmp_path / "last.ckpt")
    assert load_lineage(tmp_path / "last.ckpt")[0].model.config.heads == HEADS


def test_damaged_and_wrong_files_give_one_line(tmp_path: Path) -> None:
    whole = save_checkpoint(tmp_path / "last.ckpt", "mdlm").read_bytes()
    draws, path, harmless = random.Random(0), tmp_path / "x.ckpt", []
    cases = {
        "empty": b"",
        "text": b"hello world\n",
        "zip": b"PK\x03\x04" + bytes(100),
        "pickle": b"\x80\x02}q\x00.",
    }
    cases |= {
        f"cut {share}": whole[: int(share * len(whole))] for share in (0.01, 0.5, 0.99, 0.9999)
    }
    cases |= {f"noise {i}": draws.randbytes(300) for i in range(3)}
    for start in range(0, len(whole), len(whole) // 6):
        cases[f"changed {start}"] = whole[:start] + draws.randbytes(64) + whole[start + 64 :]
    for name, content in cases.items():
        path.write_bytes(content)
        if (
            name.startswith("changed")
            and invoke("convert", path, "--out", tmp_path / name).exit_code == 0
        ):
            assert_golden(tmp_path / name, "mdlm")  # between the records
            harmless.append(name)
        else:
            assert_error(invoke("convert", path, "--out", tmp_path / "model"), str(path))
    assert len(harmless) < 3
    states: list[Any] = [[1], {}, {"a": 1}, {1: torch.zeros(1)}, {"a": torch.zeros(1)}]
    for value in ([1, 2], {}, *({"state_dict": state} for state in states)):
        torch.save(value, path)
        assert_error(invoke("convert", path, "--out", tmp_path / "model"), "state", str(path))
    assert_error(
        invoke("convert", tmp_path / "none.ckpt", "--out", tmp_path / "model"), "there is no model"
    )


def make_hub_folder(folder: Path, *, is_safe: bool = True, **changes: Any) -> Path:
    """MDLM's layout on the Hub."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "mdlm",
        "vocab_size": VOCAB,
        "model_length": 16,
        "hidden_dim": DIM,
        "cond_dim": COND,
    }
    config |= {
        "n_blocks": 4,
        "n_heads": HEADS,
        "dropout": 0.1,
        "time_conditioning": False,
        "auto_map": {"AutoModel": "x"},
    }
    (folder / "config.json").write_text(json.dumps(config | changes), "utf-8")
    make_tokenizer(folder)
    if is_safe:
        save_file(weights("mdlm"), folder / "model.safetensors")
    else:
        torch.save(weights("mdlm"), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("is_safe", [True, False])
def test_mdlms_layout_on_the_hub(tmp_path: Path, is_safe: bool) -> None:
    folder = make_hub_folder(tmp_path / "mdlm-owt", is_safe=is_safe)
    summary = answer_json("convert", folder, "--out", tmp_path / "model")
    assert (
        summary["method"] == "mdlm"
        and summary["weights"] == "raw"
        and summary["tokenizer"] == "mdlm-owt"
    )
    assert_golden(tmp_path / "model", "mdlm")
    texts = [
        adlm.load(path, device="cpu").generate(length=8, steps=4, seed=3)[0]
        for path in (folder, tmp_path / "model")
    ]
    assert texts[0] == texts[1]
    assert_error(invoke("convert", folder, "--out", tmp_path / "x", "--ema"), "there is no EMA")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "bert"}, "model_type is 'bert', supported is 'mdlm'"),
        ({"vocab_size": 66}, "vocab_size is 66, but the weights are of 65"),
        ({"n_heads": 2}, "do not fit heads = 2"),
        ({"hidden_dim": 33}, "dim is 33, but the weights are of 32"),
        ({"dropout": 2.0}, "dropout=2.0: expected a number"),
    ],
)
def test_a_hub_folder_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = make_hub_folder(tmp_path / "hub", **changes)
    with pytest.raises(ValueError, match=message):
        adlm.load(folder)


def test_a_damaged_hub_folder_gives_one_line(tmp_path: Path) -> None:
    folder = make_hub_folder(tmp_path / "hub")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_error(
        invoke("convert", folder, "--out", tmp_path / "model"), "model.safetensors cannot be read"
    )
    path.unlink()
    assert_error(
        invoke("convert", folder, "--out", tmp_path / "model"),
        "no weights: expected model.safetensors",
    )


@pytest.mark.parametrize("is_safe", [True, False])
def test_a_model_by_its_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_safe: bool
) -> None:
    """Offline, from a cache as huggingface_hub keeps it."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"none of that name on the Hub .the Hub cannot be reached"
    ):
        adlm.load("some-group/mdlm-tiny")
    stored = tmp_path / "cache" / "models--some-group--mdlm-tiny"
    make_hub_folder(stored / "snapshots" / ("0" * 40), is_safe=is_safe)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("0" * 40, "utf-8")
    lm = adlm.load("some-group/mdlm-tiny", device="cpu")
    assert lm.name == "some-group/mdlm-tiny" and torch.equal(
        lm.model.head.weight, model("mdlm").head.weight
    )
    answer_json("convert", "some-group/mdlm-tiny", "--out", tmp_path / "model")
    assert_golden(tmp_path / "model", "mdlm")
