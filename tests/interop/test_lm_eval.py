"""Requests of lm-eval: log-likelihoods that are exact or lower bounds and depend on the request alone."""

import json
import math
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adlm import LM
from tests.cli.terminal import make_env, trained
from tests.text.models import lm, rigged
from tests.text.test_scoring import exact_nelbo
from tests.training.runs import ROOT

# A missing extra is a skip, and a failure where all must be there.
if os.environ.get("ADLM_ALL") == "1":
    import lm_eval as harness
else:
    harness = pytest.importorskip("lm_eval", reason="lm_eval comes with the extra eval")

from adlm.interop import lm_eval as ours
from adlm.interop.lm_eval import build_rows, iterate_windows, truncate_at

PAIRS = [
    ("the cat", " sat on the mat"),
    ("", "the dog"),
    ("on the mat and", " the dog sat"),
    ("on the mat and ", "the log"),
    ("the cat", " x"),
    ("it rained " * 9, "all day"),  # longer than a row of 64
]
TEXTS = ["the cat sat", "on the mat " * 20, "x"]
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "writing": {
        "output_type": "generate_until", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["."], "max_gen_toks": 6, "do_sample": False},
    },
}  # fmt: skip
DOCUMENTS: list[dict[str, Any]] = [
    {"question": "The cat sat on the", "choices": ["mat", "of and the"], "answer": 0},
    {"question": "It rained all", "choices": ["night long", "xq"], "answer": 0},
    {"question": "A man of the", "choices": ["zzz", "world"], "answer": 1},
]


def build_request(*args: Any) -> Any:
    """What the harness hands over, as far as a model reads it."""
    return SimpleNamespace(args=args)


def wrap(model: LM | str, **options: Any) -> Any:
    """The harness's class with a model of the tests."""
    if isinstance(model, str):
        return ours.AdlmLM(pretrained=model, device="cpu", **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "load", lambda name, **_: model)
        return ours.AdlmLM(**options)


def score(model: Any, pairs: Any = PAIRS) -> tuple[list[float], list[bool]]:
    results = model.loglikelihood([build_request(*pair) for pair in pairs], disable_tqdm=True)
    return [value for value, _ in results], [is_greedy for _, is_greedy in results]


def roll(model: Any, *texts: str) -> list[float]:
    found: list[float] = model.loglikelihood_rolling(
        [build_request(text) for text in texts], disable_tqdm=True
    )
    return found


def write(model: Any, *requests: tuple[str, dict[str, Any]]) -> list[str]:
    found: list[str] = model.generate_until(
        [build_request(*each) for each in requests], disable_tqdm=True
    )
    return found


@pytest.mark.parametrize("total", [1, 5, 8, 9, 30])
@pytest.mark.parametrize("room", [2, 3, 8])
def test_every_token_is_asked_for_once_with_what_went_before(total: int, room: int) -> None:
    for start in range(total):
        seen: list[int] = []
        for begin, end, first in iterate_windows(total, start, room):
            assert 0 <= begin <= first < end <= total and end - begin <= room
            assert begin < first or first == 0
            seen += range(first, end)
        assert seen == list(range(start, total))
        assert end == total and (end - begin == min(total, room) or begin == 0)
    with pytest.raises(ValueError, match="give a model with longer rows"):
        list(iterate_windows(3, 0, 1))


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_a_causal_log_likelihood_is_the_sum_of_log_probabilities(method: str) -> None:
    model = lm(method, "bytes")
    for (context, continuation), value in zip(PAIRS, score(wrap(model), PAIRS[:5])[0]):
        both, given = (
            model.tokenizer.encode(context + continuation),
            len(model.tokenizer.encode(context.rstrip())),
        )
        row = torch.tensor([[model.tokenizer.bos_id, *both]])
        with torch.no_grad():
            log_probs = model.model.log_probs(row[:, :-1])[1][0].double()
        each = log_probs.gather(-1, row[0, 1:, None])[:, 0]
        assert value == pytest.approx(float(each[-(len(both) - given) :].sum()), rel=1e-5)
    # The chain rule.
    pieces = ["the", " cat", " sat", " on the", " mat"]
    chain = [("".join(pieces[:i]), piece) for i, piece in enumerate(pieces)]
    (whole,) = roll(wrap(model), "".join(pieces))
    assert math.fsum(score(wrap(model), chain)[0]) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_a_masked_log_likelihood_is_minus_the_bound(rows: str) -> None:
    """Of a whole text it is the text's score; of a short one the sum over all sets of hidden tokens."""
    model, text = lm("adlm", rows=rows), "cat"
    (result,) = model.score(text)
    assert roll(wrap(model), text) == pytest.approx([-result.nll * result.tokens], rel=1e-5)
    assert roll(wrap(model, draws=2, seed=7), text) == pytest.approx(
        [-exact_nelbo(model, text)], rel=1e-5
    )


def test_short_continuations_take_one_evaluation_for_each_set_of_hidden_tokens() -> None:
    """Their log-likelihoods have no noise; longer ones take as many evaluations as there are draws."""
    model, rows = lm("adlm"), list[int]()
    handle = model.model.register_forward_hook(lambda _, inputs, __: rows.append(len(inputs[0])))
    for continuation, evaluations in [
        ("a", 1),
        ("at", 3),
        ("the ma", 63),
        ("the mat", 20),
        ("the mat and", 20),
    ]:
        values = []
        for seed in (0, 1):
            rows.clear()
            pairs = [("on", continuation)]
            values.append(score(wrap(model, draws=20, seed=seed), pairs)[0])
            assert sum(rows) == evaluations
        assert (values[0] == values[1]) == (evaluations != 20)
    handle.remove()


def test_a_bound_is_below_the_likelihood_it_bounds() -> None:
    """Over random orders the likelihood is a mean of products, the bound the mean of their logarithms."""
    model = lm("adlm", rows="wrapped")
    for context, continuation in [("the ca", "t"), ("the c", "at")]:
        ((value,), _) = score(wrap(model), [(context, continuation)])
        (row,) = build_rows(model, context, continuation)
        places = [i for i, each in enumerate(row.is_scored) if each]
        assert len(places) == len(continuation)
        each = [log_probability(model, row.ids, order) for order in (places, places[::-1])]
        truth, bound = math.log(sum(map(math.exp, each)) / 2), sum(each) / 2
        assert value == pytest.approx(bound, rel=1e-5) and bound <= truth + 1e-9
        assert len(places) == 1 or bound < truth - 1e-4  # and strictly, where orders differ


def log_probability(model: LM, ids: tuple[int, ...], order: list[int]) -> float:
    """Of hidden tokens revealed in an order."""
    xt, total = torch.tensor([ids]), 0.0
    xt[0, order] = model.tokenizer.mask_id
    for place in order:
        with torch.no_grad():
            total += float(model.model.log_probs(xt)[1][0, place, ids[place]])
        xt[0, place] = ids[place]
    return total


@pytest.mark.parametrize("method", ["adlm", "mdlm", "ar", "sedd"])
def test_batch_order_and_neighbors_change_nothing(method: str) -> None:
    model, options = lm(method), {} if method == "ar" else {"draws": 4}
    whole = score(wrap(model, batch_size=3, **options))
    back = score(wrap(model, batch_size=1, **options), PAIRS[::-1])
    auto = score(wrap(model, batch_size="auto", **options))
    for values, is_greedy in ((back[0][::-1], back[1][::-1]), auto):
        assert values == pytest.approx(whole[0], rel=1e-5) and is_greedy == whole[1]
    alone = [roll(wrap(model, **options), text)[0] for text in TEXTS]
    assert roll(wrap(model, batch_size=2, **options), *TEXTS) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_greedy_is_what_greedy_decoding_writes(method: str) -> None:
    model, context = (
        wrap(rigged(method, {lm(method).tokenizer.encode("a")[0]: 50.0}), draws=2),
        "the cat",
    )
    assert write(model, (context, {"until": [], "max_gen_toks": 4, "do_sample": False})) == ["aaaa"]
    assert score(model, [(context, "aaaa"), (context, "aaba"), (context, "aaab")])[1] == [
        True,
        False,
        False,
    ]
    assert score(model, [(context, "")]) == ([0.0], [True])  # nothing is certain


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_texts_end_before_the_first_stop_and_depend_on_their_request_alone(method: str) -> None:
    options: dict[str, Any] = {"until": ["e", "\n"], "max_gen_toks": 24}
    options |= {"do_sample": True, "temperature": 1.0, "top_p": 0.9}
    requests = [("the cat", options), ("it", options), ("it", options), ("the cat", {"until": "q"})]
    model, settings = lm(method), {} if method == "ar" else {"steps": 8}
    found = write(wrap(model, batch_size=4, **settings), *requests)
    back = write(wrap(model, batch_size=1, **settings), *requests[::-1])[::-1]
    assert found[0] == back[0] and found[3] == back[3]
    assert sorted(found[1:3]) == sorted(back[1:3]) and found[1] != found[2]  # repeats are new texts
    assert all("e" not in text and "\n" not in text for text in found[:3]) and "q" not in found[3]
    assert write(wrap(model, seed=1, **settings), *requests)[:2] != found[:2]
    assert (
        truncate_at("one. two; three", [";", ". "]) == "one"
        and truncate_at("one", [".", ""]) == "one"
    )


def test_a_context_that_does_not_fit_keeps_its_end(caplog: pytest.LogCaptureFixture) -> None:
    (text,) = write(
        wrap(lm("mdlm"), draws=2, steps=2), ("word " * 40, {"until": [], "max_gen_toks": 500})
    )
    assert text and "do not fit into a row of" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draws": 0}, "draws must be a whole number from 1"),
        ({"sampler": "oracle"}, "oracle"),
        ({"options.eta": 0.1, "sampler": "ancestral"}, "of ancestral, eta=0.1: unknown name"),
        ({"options": {"eta": "x"}}, "eta='x': expected a number"),
        ({"eta": 0.1}, "^eta=0.1: unknown name; .* is given as options.eta=0.1$"),
        ({"option.eta": 0.1}, "^option.eta=0.1: unknown name .* is given as options.eta=0.1$"),
        ({"drwas": 4}, "^drwas=4: unknown name .did you mean draws.*expected one of pretrained,"),
        ({"batch_size": 0}, "batch_size"),
        ({"pretrained": "novel"}, "there is no model 'novel'"),
    ],
)
def test_errors_in_model_args(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        wrap(options.pop("pretrained", lm("adlm")), **options)
    with pytest.raises(
        ValueError,
        match="unknown generation_kwargs num_beams: expected some of until, max_gen_toks",
    ):
        write(wrap(lm("mdlm"), draws=2), ("a", {"num_beams": 4}))


def test_options_of_a_sampler_in_model_args() -> None:
    line = (
        f"pretrained={trained()},device=cpu,sampler=remask_cap,options.eta=0.5,options.compat=true"
    )
    from_line = ours.AdlmLM.create_from_arg_string(line)
    whole = {"eta": 0.5, "compat": True}
    from_python = wrap(trained(), sampler="remask_cap", options=whole)
    for model in (from_line, from_python):
        assert model.get_model_info()["adlm"]["options"] == whole
    random = {"until": [], "max_gen_toks": 8, "temperature": 1.0, "do_sample": True}
    assert write(from_line, ("it", random)) == write(from_python, ("it", random))
    plain = wrap(trained(), sampler="remask_cap")
    assert write(plain, ("it", random)) != write(from_python, ("it", random))


def test_model_args_override_the_command_line() -> None:
    made = ours.AdlmLM
    from_text = made.create_from_arg_string(
        f"pretrained={trained()},draws=2,device=cpu", {"device": "cuda:0"}
    )
    assert from_text.draws == 2 and str(from_text.lm.device) == "cpu"
    if not torch.cuda.is_available():  # cuda:0 is the default of lm-eval
        assert (
            str(made.create_from_arg_obj({"pretrained": trained()}, {"device": "cuda:0"}).lm.device)
            == "cpu"
        )
        with pytest.raises(ValueError, match="sees no CUDA device"):
            made.create_from_arg_obj({"pretrained": trained(), "device": "cuda:0"}, {})


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with tasks of local files, as a user writes them."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS), "utf-8")
    for name, task in TASKS.items():
        whole = (
            COMMON | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}} | task
        )
        (tmp_path / f"{name}.yaml").write_text(json.dumps(whole), "utf-8")
    return tmp_path


def test_the_entry_point_is_this_class() -> None:
    (found,) = (entry for entry in entry_points(group="lm_eval.models") if entry.name == ours.NAME)
    assert found.load() is ours.AdlmLM


@pytest.mark.slow
def test_simple_evaluate_runs_tasks_of_local_files(offline: Path) -> None:
    from lm_eval.tasks import TaskManager

    ours.register()
    manager = TaskManager(include_path=str(offline), include_defaults=False)
    options = {"pretrained": trained(), "draws": 4, "device": "cpu", "steps": 4}
    found = harness.simple_evaluate(
        model="adlm",
        model_args=options,
        tasks=list(TASKS),
        task_manager=manager,
        batch_size=2,
        bootstrap_iters=10,
    )
    model = wrap(trained(), draws=4, steps=4)
    right = []
    for each in DOCUMENTS:
        values, _ = score(model, [(each["question"], f" {choice}") for choice in each["choices"]])
        right.append(values.index(max(values)) == each["answer"])
    assert found["results"]["choices"]["acc,none"] == pytest.approx(sum(right) / len(right))
    rolled = roll(model, *(each["question"] for each in DOCUMENTS))
    size = sum(len(each["question"].encode()) for each in DOCUMENTS)
    bits = found["results"]["rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(-sum(rolled) / size / math.log(2), rel=1e-5)
    assert len(found["samples"]["writing"]) == len(DOCUMENTS)
    assert (
        found["config"]["adlm"]["draws"] == 4 and "bound" in found["config"]["adlm"]["likelihood"]
    )


@pytest.mark.slow
def test_the_command_line_runs_a_task_of_local_files(offline: Path) -> None:
    command = [
        str(Path(sys.executable).with_name("adlm-lm-eval")),
        "run",
        "--model",
        "adlm",
        "--tasks",
        "choices",
    ]
    command += [
        "--model_args",
        f"pretrained={trained('ar')},seed=3,device=cpu",
        "--include_path",
        str(offline),
    ]
    command += ["--batch_size", "2", "--output_path", str(offline / "out")]
    done = subprocess.run(
        command, cwd=ROOT, env=make_env(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "|choices|" in done.stdout.replace(" ", "")
    (written,) = (offline / "out").rglob("results_*.json")
    found = json.loads(written.read_text("utf-8"))
    assert found["config"]["adlm"]["likelihood"] == "exact" and found["config"]["adlm"]["seed"] == 3
