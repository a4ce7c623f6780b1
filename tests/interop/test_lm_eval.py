"""The harness's questions: answers that are exact or on the safe side, and depend on nothing but the question."""

import json
import math
import os
import subprocess
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from adlm import LM
from adlm.interop import lm_eval as ours
from adlm.interop.lm_eval import build_rows, truncate_at, split_windows
from tests.cli.terminal import env_of, trained
from tests.text.models import lm, rigged
from tests.text.test_scoring import exact_nelbo
from tests.training.runs import ROOT

# A missing extra is a skip, and a failure where all must be there.
harness: Any = import_module("lm_eval") if os.environ.get("ADLM_ALL") == "1" else pytest.importorskip("lm_eval")

PAIRS = [
    ("the cat", " sat on the mat"),
    ("", "the dog"),
    ("on the mat and", " the dog sat"),
    ("on the mat and ", "the log"),
    ("the cat", " x"),
    ("it rained " * 9, "all day"),  # longer than a row of 64
]
TEXTS = ["the cat sat", "on the mat " * 20, "x"]
TASKS = {
    "choices": """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "rolling": """
task: rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
""",
    "writing": """
task: writing
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
DOCUMENTS = [
    {"question": "The cat sat on the", "choices": ["mat", "of and the"], "answer": 0},
    {"question": "It rained all", "choices": ["night long", "xq"], "answer": 0},
    {"question": "A man of the", "choices": ["zzz", "world"], "answer": 1},
]


class Request:
    """What the harness hands over, as far as a model reads it."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def answers(model: LM | str, **how: Any) -> Any:
    """The harness's class around a model of the tests."""
    if isinstance(model, str):
        return ours.load_harness_class()(pretrained=model, device="cpu", **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "load", lambda name, device: model)
        return ours.load_harness_class()(**how)


def asked(pairs: Any = PAIRS) -> list[Request]:
    return [Request(*pair) for pair in pairs]


def values(found: list[tuple[float, bool]]) -> list[float]:
    return [value for value, _ in found]


@pytest.mark.parametrize("total", [1, 5, 8, 9, 30])
@pytest.mark.parametrize("room", [2, 3, 8])
def test_every_token_is_asked_for_once_with_what_went_before(total: int, room: int) -> None:
    for start in range(total):
        seen: list[int] = []
        for begin, end, first in split_windows(total, start, room):
            assert 0 <= begin <= first < end <= total and end - begin <= room
            assert begin < first or first == 0
            seen += range(first, end)
        assert seen == list(range(start, total))
        assert end == total and (end - begin == min(total, room) or begin == 0)


def test_rows_without_room_are_refused() -> None:
    with pytest.raises(ValueError, match="rows are too short"):
        list(split_windows(3, 0, 1))


@pytest.mark.parametrize("method", ["ar", "a2r"])
@pytest.mark.parametrize("words", ["bytes", "bare"])
def test_a_causal_models_answer_is_the_sum_of_its_log_probabilities(method: str, words: str) -> None:
    model = lm(method, words)
    found = answers(model).loglikelihood(asked(PAIRS[:5]), disable_tqdm=True)
    first = [] if model.tokenizer.bos_id is None else [model.tokenizer.bos_id]
    for (context, continuation), (value, _) in zip(PAIRS, found):
        both, given = model.tokenizer.encode(context + continuation), len(model.tokenizer.encode(context.rstrip()))
        row = torch.tensor([first + both])
        with torch.no_grad():
            log_probs = model.model.log_probs(row[:, :-1])[1][0].double()
        each = log_probs.gather(-1, row[0, 1:, None])[:, 0]
        assert value == pytest.approx(float(each[-(len(both) - given) :].sum()), rel=1e-5)


@pytest.mark.parametrize("method", ["ar", "a2r"])
def test_a_text_piece_by_piece_is_the_whole_text(method: str) -> None:
    """The chain rule, with rolling split_windows as the whole; the text is cut where tokens end."""
    model = answers(lm(method))
    pieces = ["the", " cat", " sat", " on the", " mat"]
    chain = [("".join(pieces[:i]), piece) for i, piece in enumerate(pieces)]
    parts = values(model.loglikelihood(asked(chain), disable_tqdm=True))
    (whole,) = model.loglikelihood_rolling([Request("".join(pieces))], disable_tqdm=True)
    assert math.fsum(parts) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("rows", ["wrapped", "documents"])
def test_a_masked_models_answer_is_minus_its_bound(rows: str) -> None:
    """Of a whole text it is the text's score; the mean over many noises is the sum over all sets of hidden tokens."""
    model = lm("adlm", rows=rows)
    text = "cat"
    (whole,) = answers(model).loglikelihood_rolling([Request(text)], disable_tqdm=True)
    (score,) = model.score(text)
    assert whole == pytest.approx(-score.nll * score.tokens, rel=1e-5)
    many = answers(model, draws=16384)
    (value,) = many.loglikelihood_rolling([Request(text)], disable_tqdm=True)
    error = model.score(text, draws=16384)[0].stderr * score.tokens
    assert abs(value + exact_nelbo(model, text)) < 3 * error < 0.1 * -value


def test_a_bound_is_below_the_likelihood_it_bounds() -> None:
    """The model writes hidden tokens in a random order: the likelihood is a mean over orders of products, the bound
    the mean of their logarithms. Of one token both are the same, of two the bound is below."""
    model = lm("adlm", rows="wrapped")
    for context, continuation in [("the ca", "t"), ("the c", "at")]:
        ((value, _),) = answers(model, draws=8192).loglikelihood([Request(context, continuation)], disable_tqdm=True)
        (row,) = build_rows(model, context, continuation)
        places = [i for i, each in enumerate(row.is_scored) if each]
        assert len(places) == len(continuation)
        each = [log_probability(model, row.ids, order) for order in (places, places[::-1])]
        truth = math.log(sum(math.exp(value) for value in each) / 2)
        assert value == pytest.approx(sum(each) / 2, rel=0.02)
        assert sum(each) / 2 <= truth + 1e-9
        assert len(places) == 1 or sum(each) / 2 < truth - 1e-4  # and strictly, where orders differ


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
def test_neither_batch_nor_order_nor_neighbours_change_an_answer(method: str) -> None:
    model = lm(method)
    how = {"draws": 4} if method != "ar" else {}
    whole = answers(model, batch_size=3, **how).loglikelihood(asked(), disable_tqdm=True)
    back = answers(model, batch_size=1, **how).loglikelihood(asked(PAIRS[::-1]), disable_tqdm=True)[::-1]
    auto = answers(model, batch_size="auto", **how).loglikelihood(asked(), disable_tqdm=True)
    for found in (back, auto):
        assert values(found) == pytest.approx(values(whole), rel=1e-5)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in whole]
    texts = [Request(text) for text in TEXTS]
    rolled = answers(model, batch_size=2, **how).loglikelihood_rolling(texts, disable_tqdm=True)
    alone = [answers(model, **how).loglikelihood_rolling([text], disable_tqdm=True)[0] for text in texts]
    assert rolled == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_greedy_is_what_greedy_decoding_writes(method: str) -> None:
    model = answers(lm(method), draws=2) if method == "adlm" else answers(lm(method))
    context, how = "the cat", {"until": [], "max_gen_toks": 4, "do_sample": False}
    (written,) = model.generate_until([Request(context, how)], disable_tqdm=True)
    # Written bytes may be no text; as text they are cut into tokens again, perhaps into others.
    rig = rigged(method, {lm(method).tokenizer.encode("a")[0]: 50.0})
    sure = answers(rig, draws=2) if method == "adlm" else answers(rig)
    assert sure.generate_until([Request(context, how)], disable_tqdm=True) == ["aaaa"]
    found = sure.loglikelihood(asked([(context, "aaaa"), (context, "aaba"), (context, "aaab")]), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False, False]
    assert isinstance(written, str)


@pytest.mark.parametrize("method", ["adlm", "ar"])
def test_texts_end_before_the_first_stop_and_depend_on_their_request_alone(method: str) -> None:
    model = lm(method)
    how = {"until": ["e", "\n"], "max_gen_toks": 24, "do_sample": True, "temperature": 1.0, "top_p": 0.9}
    requests = [Request("the cat", how), Request("it", how), Request("it", how), Request("the cat", {"until": "q"})]
    settings = {} if method == "ar" else {"steps": 8}
    found = answers(model, batch_size=4, **settings).generate_until(requests, disable_tqdm=True)
    back = answers(model, batch_size=1, **settings).generate_until(requests[::-1], disable_tqdm=True)[::-1]
    assert found[0] == back[0] and found[3] == back[3]
    assert sorted(found[1:3]) == sorted(back[1:3]) and found[1] != found[2]  # repeats are new texts
    assert all("e" not in text and "\n" not in text for text in found[:3]) and "q" not in found[3]
    other = answers(model, seed=1, **settings).generate_until(requests, disable_tqdm=True)
    assert other[:2] != found[:2]


def test_a_text_stops_where_a_stop_begins() -> None:
    assert truncate_at("one. two; three", [";", ". "]) == "one" and truncate_at("one", [".", ""]) == "one"


def test_a_context_that_does_not_fit_keeps_its_end(caplog: pytest.LogCaptureFixture) -> None:
    model = answers(lm("mdlm"), draws=2, steps=2)
    how = {"until": [], "max_gen_toks": 500}
    (text,) = model.generate_until([Request("word " * 40, how)], disable_tqdm=True)
    assert text and "do not fit into a row of" in caplog.text
    assert model.generate_until([Request("word " * 40, how)], disable_tqdm=True) == [text]


def test_nothing_asked_for_is_certain() -> None:
    assert answers(lm("mdlm"), draws=2).loglikelihood([Request("the cat", "")], disable_tqdm=True) == [(0.0, True)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"draws": 0}, "draws must be a whole number from 1"),
        ({"sampler": "oracle"}, "oracle"),
        ({"eta": 0.1, "sampler": "ancestral"}, "there is no setting eta"),
        ({"batch_size": 0}, "batch_size"),
        ({"pretrained": "novel"}, "there is no model 'novel'"),
    ],
)
def test_mistakes_in_model_args_are_told(how: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        answers(how.pop("pretrained", lm("adlm")), **how)


def test_what_model_args_say_goes_before_the_command_lines_default() -> None:
    made = ours.load_harness_class()
    from_text = made.create_from_arg_string(f"pretrained={trained()},draws=2,device=cpu", {"device": "cuda:0"})
    assert from_text.draws == 2 and str(from_text.lm.device) == "cpu"
    if not torch.cuda.is_available():  # cuda:0 is what lm-eval says where nobody said anything
        assert str(made.create_from_arg_obj({"pretrained": trained()}, {"device": "cuda:0"}).lm.device) == "cpu"
        with pytest.raises(ValueError, match="sees no CUDA device"):
            made.create_from_arg_obj({"pretrained": trained(), "device": "cuda:0"}, {})


def test_generation_settings_that_mean_nothing_here_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_beams: an adlm model takes until, max_gen_toks"):
        answers(lm("mdlm"), draws=2).generate_until([Request("a", {"num_beams": 4})], disable_tqdm=True)


def written_tasks(folder: Path) -> Path:
    """Tasks of local files, as a user writes them."""
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in DOCUMENTS), "utf-8")
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.replace("FILE", json.dumps(str(data))), "utf-8")
    return folder


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return written_tasks(tmp_path)


def test_the_entry_point_is_this_class() -> None:
    (found,) = (entry for entry in entry_points(group=ours.GROUP) if entry.name == ours.NAME)
    assert found.load() is ours.load_harness_class()
    with pytest.raises(AttributeError, match="no attribute 'Adlm'"):
        _ = ours.Adlm


@pytest.mark.slow
def test_simple_evaluate_runs_tasks_of_local_files(offline: Path) -> None:
    from lm_eval.tasks import TaskManager

    ours.register()
    manager = TaskManager(include_path=str(offline), include_defaults=False)
    how = {"pretrained": trained(), "draws": 4, "device": "cpu", "steps": 4}
    found = harness.simple_evaluate(
        model="adlm", model_args=how, tasks=list(TASKS), task_manager=manager, batch_size=2, bootstrap_iters=10
    )
    model = answers(trained(), draws=4, steps=4)
    scores = [
        values(model.loglikelihood(asked([(each["question"], " " + choice) for choice in each["choices"]]), True))
        for each in DOCUMENTS
    ]
    right = [score.index(max(score)) == each["answer"] for score, each in zip(scores, DOCUMENTS)]
    assert found["results"]["choices"]["acc,none"] == pytest.approx(sum(right) / len(right))
    rolled = model.loglikelihood_rolling([Request(each["question"]) for each in DOCUMENTS], True)
    size = sum(len(each["question"].encode()) for each in DOCUMENTS)
    bits = found["results"]["rolling"]["bits_per_byte,none"]
    assert bits == pytest.approx(-sum(rolled) / size / math.log(2), rel=1e-5)
    assert len(found["samples"]["writing"]) == len(DOCUMENTS)
    assert found["config"]["adlm"]["draws"] == 4 and "bound" in found["config"]["adlm"]["likelihood"]


@pytest.mark.slow
def test_the_command_line_runs_a_task_of_local_files(offline: Path) -> None:
    command = [sys.executable, "-m", "adlm.interop.lm_eval", "run", "--model", "adlm", "--tasks", "choices"]
    command += ["--model_args", f"pretrained={trained('ar')},seed=3,device=cpu", "--include_path", str(offline)]
    command += ["--batch_size", "2", "--output_path", str(offline / "out")]
    done = subprocess.run(command, cwd=ROOT, env=env_of(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "|choices|" in done.stdout.replace(" ", "")
    (written,) = (offline / "out").rglob("results_*.json")
    found = json.loads(written.read_text("utf-8"))
    assert found["config"]["adlm"]["likelihood"] == "exact" and found["config"]["adlm"]["seed"] == 3
