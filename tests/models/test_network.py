"""Networks of a user's file: trained, scored, sampled, saved and loaded as the built-in one."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adlm
from adlm import LM, estimate_nll
from adlm.data.batches import TensorRows
from adlm.diffusion.anchors import every_token
from adlm.diffusion.features import compute_features
from adlm.diffusion.masking import ForwardProcess, corrupt
from adlm.diffusion.objectives import MaskedDiffusion, NextToken, ScoreEntropy, training_loss
from adlm.diffusion.rng import CounterRng
from adlm.models.folder import LoadedModel, export_model, load_model
from adlm.models.language_model import LanguageModel, ModelConfig
from adlm.models.network import (
    NetworkClass,
    build_network,
    compile_network,
    find_tied,
    fold_network,
    list_layers,
)
from adlm.text.lm import load_models
from tests.cli.terminal import invoke
from tests.models.networks import Odd, OneStage, Shifted, SmallConfig, TwoStages, take_steps
from tests.text.models import tokenizer

MASK, VOCAB = 257, 258
KINDS: dict[str, NetworkClass] = {"one": OneStage, "two": TwoStages, "odd": Odd}
ROWS = torch.randint(256, (24, 12), generator=torch.Generator().manual_seed(0))


def build(kind: Any = OneStage, *, is_causal: bool = False, length: int = 32) -> Any:
    config = SmallConfig(
        vocab_size=VOCAB, mask_id=None if is_causal else MASK, length=length, is_causal=is_causal
    )
    return build_network(kind, config, seed=3)


def wrap(model: Any) -> LM:
    words = tokenizer("bytes")
    is_causal = model.config.is_causal
    assert words.mask_id == MASK or is_causal
    kind = type(model)
    name = f"{kind.__module__}:{kind.__qualname__}"
    loaded = LoadedModel(
        model,
        words,
        name,
        0,
        network=name,
        objective_name="causal" if is_causal else "masked",
    )
    return LM(loaded, "own", device="cpu")


def test_a_build_follows_from_its_seed_and_leaves_the_global_generator() -> None:
    before = torch.get_rng_state()
    one, other = build(), build()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_nothing_but_itself(kind: str) -> None:
    model = build(KINDS[kind]).eval()
    lengths = torch.arange(24) % 11 + 2
    padded = estimate_nll(model, TensorRows(ROWS, lengths), draws=3)
    for batch in (1, 7):
        again = estimate_nll(model, TensorRows(ROWS, lengths), draws=3, batch=batch)
        torch.testing.assert_close(again.row_nats, padded.row_nats, rtol=1e-5, atol=1e-5)
    lm = wrap(model)
    together = lm.generate(["the", "a", "of it"], seed=1, max_new_tokens=5, batch=3)
    assert list(lm.generate(["the", "a", "of it"], seed=1, max_new_tokens=5, batch=1)) == list(
        together
    )
    assert lm.infill("the ___{3} cat", seed=1)[0].startswith("the ")


def test_a_network_with_two_stages_has_the_anelbo_and_guesses() -> None:
    model = build(TwoStages)
    process = ForwardProcess(MASK, anchor_rule=every_token())
    noisy = corrupt(ROWS, process, CounterRng.from_seed(0, 24), 0)
    loss = training_loss(model, noisy, anchor_weight=0.5)
    torch.testing.assert_close(loss.total, loss.nll + 0.5 * loss.anchor)
    loss.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    *_, last = wrap(model).stream("the", guesses=2, seed=1, max_new_tokens=4)
    assert last.guesses is not None and last.guesses.tokens.shape[-1] == 2
    with pytest.raises(ValueError, match="two-stage model"):
        training_loss(build(OneStage), noisy, anchor_weight=0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_takes_steps_in_half_precision_and_in_the_background(kind: str) -> None:
    runs = []
    for in_background in (False, True):
        model = build(KINDS[kind])
        rule = every_token() if kind == "two" else None
        objective = MaskedDiffusion(ForwardProcess(MASK, anchor_rule=rule, multiple=4))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        options = {"precision": torch.bfloat16, "in_background": in_background}
        metrics = take_steps(model, objective, ROWS, **options)
        assert all(torch.isfinite(each.values).all() for each in metrics)
        assert [each.anchor_weight for each in metrics] == [3e-3 if kind == "two" else 0.0] * 2
        still = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
        assert still == []
        runs.append([each.values for each in metrics])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_causal_network_without_caches_is_read_from_left_to_right() -> None:
    model = build(is_causal=True).eval()
    log_probs = model.head(model(ROWS).final).log_softmax(-1)[:, :-1]
    nats = -log_probs.gather(2, ROWS[:, 1:, None])[..., 0].sum(1)
    exact = estimate_nll(model, ROWS, batch=5)
    torch.testing.assert_close(exact.row_nats, nats.double(), rtol=1e-5, atol=1e-5)
    assert exact.noise_stderr == 0
    assert estimate_nll(model, ROWS, NextToken(ForwardProcess(None)), batch=5) == exact


def test_a_causal_network_without_caches_writes_from_left_to_right() -> None:
    model = build(is_causal=True).eval()
    lm = wrap(model)
    prompts = ["the", "", "of the cat"]
    together = lm.generate(prompts, max_new_tokens=6, temperature=0)
    for prompt, row in zip(prompts, together.rows, strict=True):
        ids = [lm.tokenizer.bos_id, *lm.tokenizer.encode(prompt)]
        while len(ids) < len(row.ids):
            logits = model.head(model(torch.tensor([ids])).final[0, -1])
            logits[[256, 257]] = -torch.inf  # no text goes on after its end
            ids.append(int(logits.argmax()))
        assert row.ids == ids


def test_a_shifted_network_is_read_one_position_later() -> None:
    inner = build().eval()
    model = Shifted(inner).eval()
    plain, aligned = (compute_features(each, ROWS).final for each in (inner, model))
    assert torch.equal(aligned[:, 1:], plain[:, 1:])
    lm, other = wrap(model), wrap(inner)
    texts = [each.generate("the", seed=1, max_new_tokens=6) for each in (lm, other)]
    assert list(texts[0]) == list(texts[1])  # position 0 is given
    bad = Shifted(inner)
    bad.shift = 2
    with pytest.raises(ValueError, match="shift is 2: expected 0 or 1"):
        compute_features(bad, ROWS)


def test_any_head_has_the_loss_and_the_gradients_of_a_linear_one() -> None:
    linear = build().double()
    for kind in (MaskedDiffusion, ScoreEntropy):
        objective = kind(ForwardProcess(MASK))
        noisy = corrupt(ROWS, objective.process, CounterRng.from_seed(0, 24), 0)
        found = []
        for head in (linear.head, nn.Sequential(linear.head)):
            linear.zero_grad()
            inner, linear.head = linear.head, head
            loss = objective.loss(linear, noisy)
            loss.total.backward()
            linear.head = inner
            grads = [parameter.grad.clone() for parameter in linear.parameters()]
            found.append((loss.total.detach(), loss.row_nll, *grads))
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


def outputs(model: Any) -> Tensor:
    with torch.no_grad():
        return model.head(model(ROWS).final)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_network_is_the_same_when_it_is_loaded(kind: str, tmp_path: Path) -> None:
    model = build(KINDS[kind])
    lm = wrap(model.eval())
    folder = lm.save(tmp_path / "model")
    for given in (KINDS[kind], f"tests.models.networks:{KINDS[kind].__name__}", build(KINDS[kind])):
        loaded = adlm.load(folder, network=given, device="cpu")
        assert torch.equal(outputs(loaded.model), outputs(model))
        assert find_tied(loaded.model) == find_tied(model)
        assert [name for name, _ in loaded.model.named_buffers()] == [
            name for name, _ in model.named_buffers()
        ]
    export_model(lm.loaded, tmp_path / "small")
    small = load_model(tmp_path / "small", network=KINDS[kind]).model
    assert (outputs(small) - outputs(model)).abs().max() < 0.1 * outputs(model).abs().max()


def test_a_buffer_counts_on_and_is_stored(tmp_path: Path) -> None:
    model = build(Odd).train()
    for _ in range(3):
        compute_features(model, ROWS)
    folder = wrap(model.eval()).save(tmp_path / "model")
    loaded = adlm.load(folder, network=Odd, device="cpu").model
    assert int(loaded.steps) == 3 and torch.equal(loaded.scale, model.scale)


def test_layers_are_compiled_one_by_one_and_a_network_without_them_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: compiled.append(self))
    two, one = build(TwoStages), build()
    compile_network(two)
    assert compiled == list_layers(two) == [two.mix, two.denoiser]
    compiled.clear()
    compile_network(one)
    assert compiled == [one]


def test_a_folded_network_is_a_copy() -> None:
    model = build().train()
    folded = fold_network(model)
    assert not folded.training and not any(p.requires_grad for p in folded.parameters())
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert torch.equal(outputs(folded), outputs(model))


def test_a_folder_that_does_not_fit_its_network_is_refused(tmp_path: Path) -> None:
    folder = wrap(build()).save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"denoiser\.weight is missing"):
        adlm.load(folder, network=TwoStages, device="cpu")
    with pytest.raises(ValueError, match="there is no module 'nowhere'"):
        adlm.load(folder, network="nowhere:Net", device="cpu")


def save_built_in(folder: Path) -> Path:
    """Save a tiny transformer."""
    sizes = {"dim": 16, "heads": 2, "denoiser_layers": 1, "length": 32}
    config = ModelConfig(vocab_size=VOCAB, mask_id=MASK, **sizes)
    loaded = LoadedModel(LanguageModel(config).eval(), tokenizer("bytes"), "mdlm", 0)
    return LM(loaded, "small", device="cpu").save(folder)


class Own(MaskedDiffusion):
    """An objective of one's own."""


GIVEN: list[tuple[dict[str, Any], str]] = [
    ({"network": "nowhere:Net"}, "network='nowhere:Net' .* built-in network 'transformer'"),
    ({"network": OneStage}, "OneStage.* was given, and this model .*: leave network= out"),
    ({"objective": "nowhere:Loss"}, "objective='nowhere:Loss' .* built-in objective 'masked'"),
    ({"objective": Own}, "Own.* was given, and this model .*: leave objective= out"),
    ({"objective": Own(ForwardProcess(MASK))}, "leave objective= out"),
    ({"objective": "causal"}, "objective='causal' was given"),
]


@pytest.mark.parametrize(("given", "message"), GIVEN)
def test_what_is_given_for_a_built_in_part_is_refused(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_built_in(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        adlm.load(folder, device="cpu", **given)
    same = {"network": "transformer", "objective": "masked"}
    assert adlm.load(folder, device="cpu", **same).model.config.dim == 16


def test_several_models_take_what_they_need(tmp_path: Path) -> None:
    built_in = str(save_built_in(tmp_path / "small"))
    own = str(wrap(build().eval()).save(tmp_path / "own"))
    given = {"network": "tests.models.networks:OneStage", "device": "cpu"}
    kinds = [type(lm.model) for lm in load_models([built_in, own, built_in], **given)]
    assert kinds == [LanguageModel, OneStage, LanguageModel]
    with pytest.raises(ValueError, match="leave network= out"):
        list(load_models([built_in, built_in], **given))
    with pytest.raises(ValueError, match="leave objective= out"):
        list(load_models([built_in, own], objective="nowhere:Loss", **given))


def test_a_transformer_of_an_own_objective_is_exported_and_converted(tmp_path: Path) -> None:
    folder = save_built_in(tmp_path / "model")
    described = json.loads((folder / "config.json").read_text("utf-8"))
    name = f"{__name__}:Own"
    (folder / "config.json").write_text(json.dumps(described | {"objective": name}), "utf-8")
    (folder / "checksums.json").unlink(missing_ok=True)
    ways = [("convert", folder, "--to", "lightning", "--out", tmp_path / "model.ckpt")]
    if find_spec("transformers") is not None:
        ways.append(("export", folder, "--out", tmp_path / "hub"))
    for words in ways:
        refused = invoke(*words)
        assert refused.exit_code == 2 and "--objective MODULE:OBJECT" in refused.stderr
        done = invoke(*words, "--objective", name)
        assert done.exit_code == 0, done.stderr
        assert Path(words[-1]).exists()
