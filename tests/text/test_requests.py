"""Requests: names of other libraries, what a call returns, and errors with value, expectation and remedy."""

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adlm
from adlm import Hole, checkpoint
from adlm.defaults import DEFAULT_SAMPLER, DEFAULT_TEMPERATURE, DEFAULT_TOP_P
from adlm.diffusion.samplers import SAMPLERS
from adlm.models.language_model import LanguageModel
from adlm.text.lm import LM
from tests.text.models import lm, tokenizer, wrap

FRAMED, WRAPPED = lm("adlm", "bytes", "documents"), lm("mdlm", "bytes")


def assert_refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value}"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"length": 63}, ("between 1 and 62", "got 63", "64 tokens, 2 of which begin or end")),
        ({"length": 9.5}, ("whole number", "got 9.5")),
        ({"prompt": "x" * 70}, ("'xxx", "has 70 tokens", "62 in all", "make the prompt shorter")),
        ({"prompt": "hello", "length": 5}, ("'hello'", "5 tokens", "make length larger (at most 62)")),
        ({"prompt": []}, ("nothing to generate", "give a prompt")),
        ({"prompt": 5}, ("a text is a string", "got 5")),
        ({"prompt": "a\ud800b"}, ("character 1", "\\ud800", "surrogate", "errors='replace'")),
        ({"sampler": "magic"}, ("unknown sampler 'magic'", ", ".join(SAMPLERS))),
        ({"temperature": -0.5}, ("temperature", "0 (take the likeliest token) or above", "-0.5")),
        ({"top_p": None}, ("top_p must be a number (1 changes nothing)", "None")),
        ({"n": 0}, ("n must be a whole number from 1", "got 0")),
        ({"steps": 2.0}, ("steps must be a whole number", "2.0")),
        ({"block": 0}, ("block must be a whole number from 1", "got 0")),
        ({"seed": -1}, ("seed must be a whole number from 0", "got -1")),
        ({"sampler": "ancestral", "eta": 0.1}, ("unknown setting 'eta'", "steps (of ancestral)", "temperature, top_p")),
        ({"temprature": 0.1}, ("unknown setting 'temprature'", f"(of {DEFAULT_SAMPLER})", "steps", "temperature")),
        ({"sampler": "remask_loop", "temprature": 1}, ("'temprature'", "(of remask_loop)", "eta", "temperature")),
        ({"sampler": "first_hitting", "steps": 5}, ("'steps'", "first_hitting")),
        ({"prompt": "hello", "length": 9, "max_new_tokens": 4}, ("length=9", "max_new_tokens=4", "give one")),
        ({"prompt": "hello", "max_new_tokens": 58}, ("max_new_tokens is 58", "at most 62", "up to 57")),
        ({"max_new_tokens": 4, "gen_length": 5}, ("max_new_tokens=4 and gen_length=5", "give max_new_tokens alone")),
    ],
)  # fmt: skip
def test_errors_of_generate(arguments: dict[str, Any], parts: tuple[str, ...]) -> None:
    assert_refused(lambda: FRAMED.generate(**arguments), *parts)
    assert_refused(
        lambda: FRAMED.stream(**arguments), *parts
    )  # at the call, not with the first step


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        ("The cat sat.", ("'The cat sat.'", "no hole", "___{5}", "___{2,8}", "adlm.Hole")),
        (["a", "b"], ("'a'", "no hole")),
        ([], ("nothing to generate",)),
        (7, ("a template is a string", "got 7")),
        ([Hole(), 7], ("it holds 7", "strings and Holes")),
        ("a ___{0} b", ("at least 1 token", "___{0}", "remove the hole")),
        ("a ___{5,2} b", ("___{5,2}", "write ___{2,5}")),
        (
            "x" * 60 + "___{3}",
            ("takes 65 tokens", "rows have 64", "shortest holes", "make it shorter"),
        ),
        (
            "a ___{1000000000000}",
            ("takes 1000000000004 tokens", "rows have 64"),
        ),  # refused, not tried
    ],
)
def test_errors_of_infill(template: Any, parts: tuple[str, ...]) -> None:
    assert_refused(lambda: FRAMED.infill(template), *parts)


CAUSAL = lm("a2r")


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: FRAMED.stream("a", template="a ___"), ("leave prompt, length and max_new_tokens out",)),
        (lambda: FRAMED.stream(guesses=257), ("between 0 and 256", "got 257")),
        (lambda: Hole(13), ("___{13,12}", "write ___{12,13}")),
        (lambda: CAUSAL.infill("The ___ sat"), ("'The ___{1,12} sat'", "text after a hole", "masked model")),
        (lambda: CAUSAL.infill("___ ___{2}"), ("text after a hole",)),
        (lambda: CAUSAL.generate(sampler="remask_loop"), ("left to right", "leave remask_loop out")),
        (lambda: CAUSAL.generate(steps=4), ("left to right", "leave steps out")),
        (lambda: CAUSAL.generate(eta=0.1), ("leave eta out",)),
        (lambda: CAUSAL.generate(block=4), ("block=4", "left to right", "leave block out")),
        (lambda: lm("ar", "bare"), ("no BOS token", "name bos_token")),
        (lambda: FRAMED.score([]), ("no text to score", "give one")),
        (lambda: FRAMED.score(""), ("has 0 tokens", "give more text")),
        (lambda: lm("mdlm", "bert-base-uncased").score("\u200b\n"), ("has 0 tokens", "give more text")),
        (lambda: FRAMED.score("x" * 63), ("takes 65 tokens", "rows have 64", "make it shorter")),
        (lambda: FRAMED.score("a", draws=1), ("draws must be at least 2", "got 1")),
        (lambda: FRAMED.score("a", draws=2.5), ("draws must be a whole number", "2.5")),  # type: ignore[arg-type]
        (lambda: wrap(FRAMED.model, tokenizer("gpt2")), ("mask is token 257", "the tokenizer's 50257", "trained with")),
        (lambda: adlm.load(device="gpu"), ("'gpu'", "auto, cpu, cuda")),
        (lambda: adlm.load(device="mps"), ("'mps'", "sees no Apple GPU")),
    ],
)  # fmt: skip
def test_other_errors(call: Callable[[], object], parts: tuple[str, ...]) -> None:
    assert_refused(call, *parts)


def test_a_request_is_checked_before_a_network_chooses_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LM, "predictor", property(lambda self: pytest.fail("the network ran")))
    assert_refused(lambda: FRAMED.infill("a ___ b", sampler="magic"), "unknown sampler")


def test_what_a_causal_model_can_do() -> None:
    assert CAUSAL.infill("The ___").texts[0].startswith("The ")
    assert CAUSAL.generate(sampler="left_to_right", length=5).texts


def test_names_and_numbers_of_other_libraries_are_accepted() -> None:
    """transformers, diffusers and LLaDA: their names give the same texts as ours."""
    ours = FRAMED.generate(
        "hello", max_new_tokens=8, n=2, steps=4, block=4, temperature=0.0, seed=1
    )
    theirs = FRAMED.generate(
        "hello",
        gen_length=8,
        num_return_sequences=2,
        num_inference_steps=4,
        block_length=4,
        do_sample=False,
        seed=1,
    )
    assert ours.texts == theirs.texts and ours.settings == theirs.settings
    assert (
        ours.texts
        == FRAMED.generate("hello", length=13, n=2, steps=4, block=4, temperature=0.0, seed=1).texts
    )
    sampled = FRAMED.generate(
        "a", length=np.int64(9), steps=np.int64(2), seed=np.int64(0), do_sample=True
    )
    assert sampled.texts == FRAMED.generate("a", length=9, steps=2).texts


def test_the_output_is_a_sequence_of_texts_with_settings() -> None:
    given: dict[str, Any] = {"steps": 2, "eta": 0.1, "seed": 3, "temperature": 0.5, "n": 2}
    output = FRAMED.generate(["a", "b"], max_new_tokens=3, sampler="remask_loop", **given)
    assert len(output) == 4 and list(output) == output.texts and output[0] == output.texts[0]
    assert output[1:3] == output.texts[1:3] and output.texts[3] in output
    assert (
        output.nfe == max(output.nfe_each)
        and output.seconds > 0
        and str(output) == "\n\n".join(output.texts)
    )
    settings = given | {"sampler": "remask_loop", "top_p": DEFAULT_TOP_P, "length": 4}
    assert settings.items() <= output.settings.items()
    defaults = {
        "sampler": DEFAULT_SAMPLER,
        "temperature": DEFAULT_TEMPERATURE,
        "top_p": DEFAULT_TOP_P,
    }
    assert defaults.items() <= FRAMED.generate("a", length=4, steps=2).settings.items()
    assert output.as_dict().keys() == {"texts", "nfe", "seconds", "settings", "nfe_each"}
    assert lm("ar").generate("a", length=9).settings["sampler"] == "left_to_right"


def test_repr_and_save(tmp_path: Path) -> None:
    assert repr(FRAMED).startswith("LM('") and "device='cpu'" in repr(FRAMED)
    assert f"parameters={sum(p.numel() for p in FRAMED.model.parameters()):,}" in repr(FRAMED)
    folder = FRAMED.save(tmp_path / "saved")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in folder.iterdir()
    }
    again = adlm.load(folder, device="cpu", verify=True)
    assert again.model.config == FRAMED.model.config and again.row_format.is_framed
    for name, weight in FRAMED.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], weight)
    assert again.generate(length=9, steps=3).texts == FRAMED.generate(length=9, steps=3).texts


def test_few_frames_lie_between_generate_and_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who steps from LM.generate into LanguageModel.forward passes seven functions of ours, both included."""
    depths: list[int] = []
    forward = LanguageModel.forward

    def spy(*args: Any, **kwargs: Any) -> Any:
        frames = inspect.stack(0)[1:]
        inside = frames[: [frame.function for frame in frames].index("generate") + 1]
        depths.append(1 + sum("/adlm/" in frame.filename for frame in inside))
        return forward(*args, **kwargs)

    monkeypatch.setattr(LanguageModel, "forward", spy)
    FRAMED.generate(length=9, steps=3)
    FRAMED.generate(length=9, sampler="confidence", steps=3)
    assert depths and max(depths) <= 7


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def forget(path: Path) -> None:
    path.unlink()
    path.with_name("checksums.json").unlink()


def widen(path: Path) -> None:
    config = json.loads(path.read_text("utf-8"))
    config["model"]["dim"] = 32
    path.write_text(json.dumps(config), "utf-8")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("config.json", cut, r"config\.json is not JSON"),
        ("tokenizer.json", cut, r"tokenizer\.json"),
        ("tokenizer.json", Path.unlink, r"tokenizer\.json is missing or was changed"),
        (
            "tokenizer.json",
            forget,
            r"has no tokenizer\.json.*copy the one that its data was prepared with",
        ),
        (
            "config.json",
            widen,
            r"does not fit model\.safetensors: embed\.weight is .*, expected float \(258, 32\)",
        ),
        ("model.safetensors", Path.unlink, r"model\.safetensors"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    folder = checkpoint.export_model(
        checkpoint.LoadedModel(WRAPPED.model, WRAPPED.tokenizer, "mdlm", 7), tmp_path / "a"
    )
    assert adlm.load(folder, verify=True).step == 7
    damage(folder / name)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        adlm.load(folder)


def test_signatures_list_the_settings() -> None:
    for method in (LM.generate, LM.infill, LM.stream, LM.record):
        shown = inspect.signature(method).parameters
        assert {"max_new_tokens", "n", "steps", "sampler", "seed"} <= set(shown)
        assert (
            shown["top_p"].default == DEFAULT_TOP_P
            and shown["top_p"].kind is inspect.Parameter.KEYWORD_ONLY
        )
        assert shown["temperature"].default == DEFAULT_TEMPERATURE


def test_compat_has_the_nucleus_of_the_lineage_too() -> None:
    settings: dict[str, Any] = {"sampler": "ancestral", "steps": 8, "top_p": 0.5, "n": 2, "seed": 3}
    request = WRAPPED.build_request(compat=True, **settings)
    lineage = replace(request, sampling=replace(request.sampling, nucleus="lineage"))
    usual = replace(
        request, sampler=replace(request.sampler, fill_argmax=False)
    )  # nothing is left to fill here
    own, same, other = (WRAPPED.run_request(each).texts for each in (request, lineage, usual))
    assert own == same != other
