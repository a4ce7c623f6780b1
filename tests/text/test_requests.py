"""Requests that cannot be met: the error says what was given, what is expected and what to do, before anything runs."""

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adlm
from adlm import Hole, checkpoint
from adlm.bundled import MODELS
from adlm.methods import SAMPLERS
from adlm.models.language_model import LanguageModel
from adlm.text.lm import LM
from tests.text.models import lm, tokenizer

FRAMED, WRAPPED = lm("adlm", "bytes", "documents"), lm("mdlm", "bytes")
ALL = ", ".join(SAMPLERS)


def refused(call: Any, *said: str) -> None:
    """It is refused, and the message holds all of this."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    for part in said:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"length": 63}, ("between 1 and 62", "got 63", "64 tokens, 2 of which begin or end")),
        ({"length": 9.5}, ("whole number", "got 9.5")),
        ({"prompt": "x" * 70}, ("'xxx", "has 70 tokens", "62 in all", "make the prompt shorter")),
        ({"prompt": "hello", "length": 5}, ("'hello'", "5 tokens", "make length larger (at most 62)")),
        ({"prompt": []}, ("nothing to generate", "give a prompt")),
        ({"prompt": 5}, ("a text is a string", "got 5")),
        ({"prompt": "a\ud800b"}, ("character 1", "\\ud800", "surrogate", "errors='replace'")),
        ({"sampler": "magic"}, ("unknown sampler 'magic'", ALL)),
        ({"sampler": adlm.build_sampler("ancestral", steps=3)}, ("must be a name", "ancestral", "got a Plan")),
        ({"temperature": -0.5}, ("temperature", "0 (take the likeliest token) or above", "-0.5")),
        ({"top_p": None}, ("top_p must be a number (1 changes nothing)", "None")),
        ({"n": 0}, ("n must be a whole number from 1", "got 0")),
        ({"steps": 0}, ("steps must be a whole number from 1", "got 0")),
        ({"steps": 2.0}, ("steps must be a whole number", "2.0")),
        ({"block": 0}, ("block must be a whole number from 1", "got 0")),
        ({"seed": -1}, ("seed must be a whole number from 0", "got -1")),
        ({"sampler": "ancestral", "eta": 0.1}, ("no setting eta", "ancestral", "steps", "temperature, top_p")),
        ({"temprature": 0.1}, ("no setting temprature", "remask_loop", "eta", "temperature")),
        ({"sampler": "first_hitting", "steps": 5}, ("first_hitting", "unknown option 'steps'")),
        ({"template": "a ___", "prompt": "a"}, ("leave prompt, length and max_new_tokens out",)),
        ({"prompt": "hello", "length": 9, "max_new_tokens": 4}, ("length=9", "max_new_tokens=4", "give one")),
        ({"prompt": "hello", "max_new_tokens": 58}, ("max_new_tokens is 58", "at most 62", "up to 57")),
        ({"max_new_tokens": 0}, ("max_new_tokens must be a whole number from 1", "got 0")),
        ({"max_new_tokens": 4, "gen_length": 5}, ("max_new_tokens=4 and gen_length=5", "give max_new_tokens alone")),
        ({"temperature": 0.7, "do_sample": False}, ("do_sample=False contradicts temperature=0.7",)),
    ],
)  # fmt: skip
def test_what_cannot_be_written(how: dict[str, Any], said: tuple[str, ...]) -> None:
    refused(lambda: FRAMED.build_request(**how), *said)
    refused(lambda: FRAMED.stream(**how), *said)  # at the call, not with the first step
    if "template" not in how:
        refused(lambda: FRAMED.generate(**how), *said)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("The cat sat.", ("'The cat sat.'", "no hole", "___{5}", "___{2,8}", "adlm.Hole")),
        (["a", "b"], ("'a'", "no hole")),
        ([], ("nothing to generate",)),
        (7, ("a template is a string", "got 7")),
        ([Hole(), 7], ("it holds 7", "strings and Holes")),
        ("a ___{0} b", ("at least 1 token", "___{0}", "remove the hole")),
        ("a ___{5,2} b", ("___{5,2}", "write ___{2,5}")),
        ("x" * 60 + "___{3}", ("takes 65 tokens", "rows have 64", "shortest holes", "make it shorter")),
        ("a ___{1000000000000}", ("takes 1000000000004 tokens", "rows have 64")),  # said, not tried
        ("a \udfff ___", ("character 2", "surrogate")),
    ],
)
def test_what_cannot_be_filled(template: Any, said: tuple[str, ...]) -> None:
    refused(lambda: FRAMED.infill(template), *said)


@pytest.mark.parametrize("make", [lambda: Hole(0), lambda: Hole(13), lambda: Hole(1.5, 2), lambda: Hole("3", 4)])  # type: ignore[arg-type]
def test_holes_that_cannot_be(make: Any) -> None:
    refused(make, "a hole")


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_what_a_causal_model_cannot_do(method: str) -> None:
    model = lm(method)
    after = "text after a hole"
    refused(lambda: model.infill("The ___ sat"), "'The ___{1,12} sat'", after, "generate(prompt=…)", "masked model")
    refused(lambda: model.infill("___ ___{2}"), after)
    refused(lambda: model.generate(sampler="remask_loop"), "left to right", "leave remask_loop out")
    refused(lambda: model.generate(steps=4), "left to right", "leave steps out")
    refused(lambda: model.generate(eta=0.1), "leave eta out")
    refused(lambda: model.generate(block=4), "block=4", "left to right", "leave block out")
    bare = lm(method, "bare")
    refused(lambda: bare.generate(), "has no tokens", "give a prompt to continue")
    refused(lambda: bare.score("t"), "has 1 tokens", "at least 2", "no token that begins one")
    assert model.infill("The ___").texts[0].startswith("The ")
    assert model.generate(sampler="left_to_right", length=5).texts
    assert bare.generate("the", length=9).texts[0].startswith("the")


def test_what_cannot_be_scored() -> None:
    refused(lambda: FRAMED.score([]), "no text to score", "give one")
    refused(lambda: FRAMED.score(""), "has 0 tokens", "give more text")
    refused(lambda: lm("mdlm", "bert-base-uncased").score("\u200b\n"), "has 0 tokens", "give more text")
    refused(lambda: FRAMED.score("x" * 63), "takes 65 tokens", "rows have 64", "make it shorter")
    refused(lambda: FRAMED.score([None]), "a text is a string", "None")
    refused(lambda: FRAMED.score(3), "a text is a string", "3")
    refused(lambda: FRAMED.score("a", draws=1), "draws must be at least 2", "got 1")
    refused(lambda: FRAMED.score("a", draws=2.5), "draws must be a whole number", "2.5")
    refused(lambda: FRAMED.score("a", batch=0), "batch must be a whole number from 1")
    refused(lambda: FRAMED.score("a", seed=-3), "seed must be a whole number from 0", "-3")


def test_what_cannot_be_guessed() -> None:
    for wrong in (-1, 257, 1.5):
        refused(lambda wrong=wrong: FRAMED.stream(length=3, guesses=wrong), "between 0 and 256", f"got {wrong}")


def test_a_request_is_checked_before_a_network_looks_for_lengths() -> None:
    class Unused(LM):
        @property
        def predictor(self) -> Any:  # type: ignore[override]
            raise AssertionError("the network ran")

    loaded = checkpoint.LoadedModel(FRAMED.model, FRAMED.tokenizer, "adlm", 0, "documents")
    refused(lambda: Unused(loaded, "x", device="cpu").infill("a ___ b", sampler="magic"), "unknown sampler")


def test_names_of_other_libraries_are_accepted() -> None:
    """transformers, diffusers and LLaDA: their names give the same texts as ours."""
    ours = FRAMED.generate("hello", max_new_tokens=8, n=2, steps=4, block=4, temperature=0.0, seed=1)
    theirs = FRAMED.generate(
        "hello", gen_length=8, num_return_sequences=2, num_inference_steps=4, block_length=4, do_sample=False, seed=1
    )
    assert ours.texts == theirs.texts and ours.settings == theirs.settings
    assert ours.texts == FRAMED.generate("hello", length=13, n=2, steps=4, block=4, temperature=0.0, seed=1).texts
    sampled = FRAMED.generate("a", length=9, steps=2, do_sample=True)
    assert sampled.texts == FRAMED.generate("a", length=9, steps=2).texts


def test_the_output_is_a_sequence_of_texts() -> None:
    output = FRAMED.generate(["a", "b"], max_new_tokens=3, n=2, steps=2)
    assert len(output) == 4 and list(output) == output.texts and output[0] == output.texts[0]
    assert output[1:3] == output.texts[1:3] and output.texts[3] in output
    assert output.nfe == max(output.nfe_each) and output.seconds > 0 and output.settings["length"] == 4


def test_repr_and_save(tmp_path: Path) -> None:
    assert repr(FRAMED).startswith("LM('") and "device='cpu'" in repr(FRAMED)
    assert f"parameters={sum(p.numel() for p in FRAMED.model.parameters()):,}" in repr(FRAMED)
    folder = FRAMED.save(tmp_path / "saved")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    again = adlm.load(folder, device="cpu", verify=True)
    assert again.model.config == FRAMED.model.config and again.row_format.is_framed
    for name, weight in FRAMED.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight)
    assert again.generate(length=9, steps=3).texts == FRAMED.generate(length=9, steps=3).texts


def test_few_frames_lie_between_generate_and_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who steps from LM.generate into LanguageModel.forward passes seven functions of ours, both included."""
    stacks: list[list[str]] = []
    forward = LanguageModel.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        frames = [frame.filename for frame in inspect.stack(0)[1:]]
        names = [frame.function for frame in inspect.stack(0)[1:]]
        here = [file for file in frames[: names.index("generate") + 1] if "/adlm/" in file]
        stacks.append([*here, "forward"])
        return forward(*args, **kwargs)

    monkeypatch.setattr(LanguageModel, "forward", spy)
    FRAMED.generate(length=9, steps=3)
    FRAMED.generate(length=9, sampler="confidence", steps=3)
    assert stacks and max(map(len, stacks)) <= 7


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert FRAMED.generate(length=np.int64(5), n=np.int64(2), seed=np.int64(3), steps=np.int64(2)).texts


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        adlm.load("no-such-model")
    assert all(part in str(caught.value) for part in ("'no-such-model'", "a run folder", *MODELS))
    with pytest.raises(FileNotFoundError, match=r"neither a run folder nor a model folder: it has no config\.json"):
        adlm.load(tmp_path)
    loaded = checkpoint.LoadedModel(FRAMED.model, None, "adlm", 0)
    refused(lambda: LM(loaded, "mine"), "mine has no tokenizer.json", "copy the one that its data was prepared with")
    checkpoint.export_model(loaded, tmp_path / "silent")
    refused(lambda: adlm.load(tmp_path / "silent"), "has no tokenizer.json")
    other = checkpoint.LoadedModel(FRAMED.model, tokenizer("gpt2"), "adlm", 0)
    refused(lambda: LM(other, "mine"), "mask is token 257", "the tokenizer's 50257", "trained with")
    for device in ("gpu", "mps", "meta"):
        refused(lambda device=device: adlm.load(device=device), f"'{device}'", "auto, cpu, cuda")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    loaded = checkpoint.LoadedModel(WRAPPED.model, WRAPPED.tokenizer, "mdlm", 7)

    def damaged(name: str, change: Any) -> Path:
        folder = checkpoint.export_model(loaded, tmp_path / str(len(list(tmp_path.iterdir()))))
        change(folder / name)
        return folder

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[:-100])

    def other_width(path: Path) -> None:
        about = json.loads(path.read_text("utf-8"))
        about["model"]["dim"] = 32
        path.write_text(json.dumps(about), "utf-8")

    def flip(path: Path) -> None:
        found = bytearray(path.read_bytes())
        found[-1] ^= 1
        path.write_bytes(bytes(found))

    whole = checkpoint.export_model(loaded, tmp_path / "whole")
    assert adlm.load(whole, verify=True).step == 7
    refused(lambda: adlm.load(damaged("model.safetensors", cut)), "model.safetensors is damaged")
    refused(lambda: adlm.load(damaged("config.json", cut)), "config.json is not JSON", "damaged")
    refused(lambda: adlm.load(damaged("tokenizer.json", cut)), "tokenizer.json")
    refused(lambda: adlm.load(damaged("config.json", other_width)), "does not fit model.safetensors", "size mismatch")
    changed = damaged("model.safetensors", flip)
    refused(lambda: adlm.load(changed, verify=True), "model.safetensors is missing or was changed")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        adlm.load(damaged("model.safetensors", Path.unlink))
