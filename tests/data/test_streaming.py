"""A stream gives every row of its documents once an epoch, resumes exactly, and is shared by documents."""

from itertools import islice
from pathlib import Path

import pytest
import torch

from adlm.data.batches import STREAM_START, StreamedBatches
from adlm.data.sources import Source, load_excerpt
from adlm.data.tokenizers import Tokenizer, train_bpe
from tests.training.runs import assert_same, run

DOCUMENTS = [part for part in load_excerpt()[:40_000].split("\n\n") if part.strip()]
TOKENIZER = train_bpe(DOCUMENTS, 300, end_token="<|endoftext|>")
ROWS, LENGTH = 4, 32


def stream(
    state=STREAM_START, *, workers=0, size=1, documents=DOCUMENTS, tokenizer=TOKENIZER, **options
):
    source = Source(
        "texts",
        {"documents": len(documents)},
        None,
        lambda: ((text, 0, True) for text in documents),
    )
    options |= {"block": 50, "seed": 3, "size": size, "workers": workers}
    batches = StreamedBatches(source, tokenizer, LENGTH, ROWS * size, **options)
    batches.load_state_dict(state)
    return batches


def expected_rows(documents) -> set[tuple[int, ...]]:
    """Packed by hand: each document and EOS, cut every LENGTH - 2 tokens."""
    tokens = [token for text in documents for token in [*TOKENIZER.encode(text), TOKENIZER.eos_id]]
    inner = LENGTH - 2
    whole = [tokens[i * inner : (i + 1) * inner] for i in range(len(tokens) // inner)]
    return {(TOKENIZER.bos_id, *row, TOKENIZER.eos_id) for row in whole}


def same(a, b) -> bool:
    return (
        torch.equal(a.tokens, b.tokens) and torch.equal(a.number, b.number) and a.state == b.state
    )


def test_an_epoch_is_every_row_once_and_shuffled() -> None:
    seen, numbers = [], []
    for batch in stream():
        if batch.state["epoch"] > 0:
            break
        seen += [tuple(row) for row in batch.tokens.tolist()]
        numbers += batch.number.tolist()
    expected = expected_rows(DOCUMENTS)
    assert len(expected) - ROWS < len(seen) == len(set(seen)) and set(seen) <= expected
    assert numbers == list(range(len(numbers)))
    again = [
        tuple(row) for batch in islice(stream(), len(seen) // ROWS) for row in batch.tokens.tolist()
    ]
    assert again == seen


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_resumes_after_any_batch(is_wrapped, workers) -> None:
    batches = list(islice(stream(is_wrapped=is_wrapped), 260))
    assert batches[-1].state["epoch"] >= 1  # past the end of the source
    for place in (0, 11, 12, 13, 130, 250):
        behind = islice(stream(batches[place].state, workers=workers, is_wrapped=is_wrapped), 8)
        assert all(same(a, b) for a, b in zip(batches[place + 1 : place + 9], behind, strict=False))


def test_rows_of_one_document_have_lengths() -> None:
    batch = next(iter(stream(is_wrapped=False)))
    assert batch.lengths is not None
    for row, length in zip(batch.tokens.tolist(), batch.lengths.tolist(), strict=True):
        assert row[0] == TOKENIZER.bos_id and row[length - 1] == TOKENIZER.eos_id
        assert TOKENIZER.eos_id not in row[1 : length - 1]


def test_processes_share_the_documents() -> None:
    shares = [
        {tuple(row) for b in islice(stream(rank=r, size=2), 60) for row in b.tokens.tolist()}
        for r in (0, 1)
    ]
    assert shares[0] <= expected_rows(DOCUMENTS[0::2]) and shares[1] <= expected_rows(
        DOCUMENTS[1::2]
    )
    places = [next(iter(stream(rank=r, size=2))) for r in (0, 1)]
    assert sorted(torch.cat([b.place for b in places]).tolist()) == list(range(2 * ROWS))
    assert not set(places[0].number.tolist()) & set(places[1].number.tolist())


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fill one row"):
        next(iter(stream(documents=["short"])))
    with pytest.raises(ValueError, match="no BOS or no EOS"):
        stream(tokenizer=Tokenizer(TOKENIZER.bpe))


def test_a_run_on_a_stream_resumes_bit_for_bit(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(DOCUMENTS), "utf-8")
    changes = [
        f"data.stream={text}",
        "data.shuffle=40",
        "checkpoint.every=3",
        "checkpoint.keep=9",
        "steps=8",
    ]
    run(tmp_path / "whole", *changes)
    run(tmp_path / "parts", *changes)
    run(
        tmp_path / "parts",
        *changes,
        f"resume={tmp_path / 'parts' / 'checkpoints' / 'step-00000003'}",
    )
    assert_same(tmp_path / "whole", tmp_path / "parts")
    text.write_text("\n<|endoftext|>\n".join(DOCUMENTS[:-1]), "utf-8")
    with pytest.raises(ValueError, match="other data"):
        run(tmp_path / "parts", *changes)
