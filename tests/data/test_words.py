"""Word level: the vocabulary rule, against a naive re-implementation and against the published counts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.corpora import naive_ids, naive_vocabulary, unpack, write_splits
from deqkit.data import Corpus, DataError, PrepareConfig, _reading, prepare
from deqkit.data._datasets import DatasetName

SPLITS = ("train", "valid", "test")


def prepared(folder: Path, dataset: DatasetName = "wikitext-2", **options) -> Corpus:
    return prepare(PrepareConfig(dataset=dataset, source=folder, out=folder.with_name("out"), **options))


def vocabulary_of(corpus: Corpus) -> list[str]:
    by_word = corpus.vocabulary.get_vocab()
    return sorted(by_word, key=by_word.__getitem__)


@pytest.mark.parametrize(
    ("dataset", "counted", "vocab_size", "num_tokens"),
    [
        ("ptb", SPLITS, 10_000, (929_589, 73_760, 82_430)),
        ("wikitext-2", ("train",), 33_278, (2_088_628, 217_646, 245_569)),
    ],
)
def test_published_corpora_come_out_exactly(dataset, counted, vocab_size, num_tokens, tmp_path):
    raw = unpack(dataset, tmp_path)
    corpus = prepared(raw, dataset)
    lowercase = dataset == "ptb"
    expected = naive_vocabulary([raw / f"{name}.txt" for name in counted], lowercase=lowercase)
    assert vocabulary_of(corpus) == expected
    assert corpus.vocab_size == vocab_size and corpus.manifest.dtype == "<u2"
    assert corpus.manifest.as_published and corpus.manifest.notes == ()
    for name, count in zip(SPLITS, num_tokens, strict=True):
        assert corpus.manifest.splits[name].num_tokens == count
        assert corpus.manifest.splits[name].num_unknown == 0
        assert corpus.manifest.splits[name].num_text_bytes == (raw / f"{name}.txt").stat().st_size
        assert corpus.split(name).tolist() == naive_ids(raw / f"{name}.txt", expected, lowercase=lowercase)


def test_wikitext_103_has_its_full_vocabulary_from_the_word_counts(tmp_path):
    raw = unpack("wikitext-103", tmp_path)
    corpus = prepared(raw, "wikitext-103", word_counts=raw / "dict.txt")
    words = vocabulary_of(corpus)
    listed = [line.rsplit(" ", 1) for line in (raw / "dict.txt").read_text(encoding="utf-8").splitlines()]
    counts = {word: int(count) for word, count in listed}
    assert corpus.vocab_size == 267_735 == len(words) and corpus.manifest.dtype == "<u4"
    assert not any(word.startswith("madeupword") for word in words)
    assert words[0] == "<eos>"
    assert [word for word in words[1:] if word != "<unk>"] == [word for word, count in listed if count != "0"]
    # 101,425,671 published words minus those counted are `<unk>`: fewer than "is", more than "his".
    assert words[23:26] == ["is", "<unk>", "his"]
    assert counts["is"] > 101_425_671 - sum(counts.values()) > counts["his"]
    splits = corpus.manifest.splits
    assert [splits[name].num_tokens for name in SPLITS] == [548_410, 217_646, 245_569]
    assert [splits[name].num_unknown for name in SPLITS] == [0, 0, 0]
    assert corpus.split("valid").tolist() == naive_ids(raw / "valid.txt", words)
    assert corpus.manifest.as_published is False and "548,410 tokens instead of 103,227,021" in corpus.manifest.notes[0]


def test_the_prefix_alone_says_how_many_words_are_unknown(tmp_path):
    raw = unpack("wikitext-103", tmp_path)
    corpus = prepared(raw, "wikitext-103")
    known = set(naive_vocabulary([raw / "train-prefix.txt"]))
    unknown = sum(word not in known for word in (raw / "valid.txt").read_text(encoding="utf-8").split())
    assert corpus.manifest.splits["valid"].num_unknown == unknown == 12_210
    assert "valid: 12,210 of 217,646 tokens are words outside the vocabulary and became <unk>" in corpus.manifest.notes


# Every kind of white space that Python's split() knows, both foreign line ends, and letters of 1 to 4 bytes.
ODD_TEXT = st.text(alphabet="aAbÉ日😀  \t\n\n\r\x0b\x0c\x1c\x85\xa0\u2028\u3000", max_size=60)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=ODD_TEXT, block=st.integers(1, 9), lowercase=st.booleans())
def test_any_text_is_cut_as_python_reads_lines(text, block, lowercase, tmp_path_factory, monkeypatch):
    raw = write_splits(tmp_path_factory.mktemp("words") / "raw", train=f"a {text}", valid="a", test="a")
    monkeypatch.setattr(_reading, "BLOCK", block)
    corpus = prepared(raw, "ptb" if lowercase else "wikitext-2")
    counted = SPLITS if lowercase else ("train",)
    expected = naive_vocabulary([raw / f"{name}.txt" for name in counted], lowercase=lowercase)
    assert vocabulary_of(corpus) == expected
    assert corpus.split("train").tolist() == naive_ids(raw / "train.txt", expected, lowercase=lowercase)


def test_a_text_without_line_ends_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(_reading, "BLOCK", 64)
    monkeypatch.setattr(_reading, "LONGEST_WORD", 40)
    raw = write_splits(tmp_path / "raw", train="one two three " * 500 + "x" * 39, valid="one", test="two")
    corpus = prepared(raw)
    assert corpus.split("train").tolist() == naive_ids(raw / "train.txt", vocabulary_of(corpus))
    write_splits(raw, train="x" * 400, valid="one", test="two")
    with pytest.raises(DataError, match="a word of more than 40 characters"):
        prepare(PrepareConfig(dataset="wikitext-2", source=raw, out=tmp_path / "other"))


def test_unknown_words_become_unk_or_are_named_with_their_line(tmp_path):
    raw = write_splits(tmp_path / "raw", train="a b <unk>\n", valid="a c b\n\nd\n", test="b\n")
    corpus = prepared(raw)
    assert corpus.decode(corpus.split("valid")) == "a <unk> b\n\n<unk>\n"
    assert corpus.manifest.splits["valid"].num_unknown == 2
    assert "valid: 2 of 7 tokens are words outside the vocabulary and became <unk>" in corpus.manifest.notes
    assert corpus.decode(corpus.encode("b zebra")) == "b <unk>"

    raw = write_splits(tmp_path / "strict" / "raw", train="a b\n", valid="a b\n\na b b zebra\n", test="b\n")
    with pytest.raises(DataError, match=r"valid\.txt, line 3: 'zebra' is not in the vocabulary"):
        prepared(raw)
    write_splits(raw, train="a b\n", valid="a\n", test="b\n")
    corpus = prepared(raw)
    with pytest.raises(DataError, match="the text, line 2: 'zebra' is not in the vocabulary"):
        corpus.encode("a\nb zebra\n")


def test_the_line_of_an_unknown_word_is_counted_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(_reading, "BLOCK", 5)
    raw = write_splits(tmp_path / "raw", train="a b\n", valid="a b\r\n" * 20 + "a zebra\n", test="b\n")
    with pytest.raises(DataError, match="line 21: 'zebra'"):
        prepared(raw)


def test_the_tokenizer_file_gives_the_same_ids_as_the_corpus(tmp_path):
    raw = write_splits(tmp_path / "raw", train="The cat\nsat <unk> .\n", valid="cat\n", test="sat\n")
    for dataset in ("ptb", "wikitext-2"):
        corpus = prepared(raw, dataset, overwrite=True)
        for text in ("The cat\r\nsat", "cat\n\n dog the\n", "", "\n", "  sat  "):
            assert corpus.vocabulary.encode(text).ids == corpus.encode(text), (dataset, text)


def test_words_come_back_with_single_spaces_and_line_ends(tmp_path):
    raw = write_splits(tmp_path / "raw", train=" a  b \n\n c <eos> a", valid="a\n", test="b\n")
    corpus = prepared(raw)
    assert corpus.decode(corpus.split("train")) == "a b\n\nc\na\n"
    for text in ("a b\nc", "\n\na\n", ""):
        assert corpus.decode(corpus.encode(text)) == text
    assert np.all(corpus.split("train") < corpus.vocab_size)
    assert corpus.encode("\n") == [0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a 3\nb\n", r"line 2: expected a new word and its count, got 'b'"),
        ("a three\n", "line 1"),
        ("a 3\na 2\n", "line 2"),
        ("", "is empty"),
        ("a 101425672\n", "but the corpus has 101,425,671"),
    ],
)
def test_word_counts_that_make_no_sense_are_refused(content, message, tmp_path):
    raw = write_splits(tmp_path / "raw", train="a\n", valid="a\n", test="a\n")
    counts = tmp_path / "counts.txt"
    counts.write_text(content)
    with pytest.raises(DataError, match=message):
        prepared(raw, "wikitext-103", word_counts=counts)
    assert not (tmp_path / "out").exists()


def test_word_counts_order_the_vocabulary_and_drop_padding(tmp_path):
    raw = write_splits(tmp_path / "raw", train="a b zebra\n", valid="a\n", test="b\n")
    counts = tmp_path / "counts.txt"
    counts.write_text("b 9\n<unk> 5\na 5\nc 1\npadding 0\n")
    corpus = prepared(raw, word_counts=counts)
    assert vocabulary_of(corpus) == ["<eos>", "b", "<unk>", "a", "c"]
    assert corpus.split("train").tolist() == [3, 1, 2, 0]
    assert corpus.manifest.splits["train"].num_unknown == 1
    assert corpus.manifest.options["word_counts"]["name"] == "counts.txt"


@pytest.mark.parametrize(
    "names",
    [
        ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("train.txt", "validation.txt", "test.txt"),
        ("train", "dev", "test"),
        ("train-prefix.txt", "val.txt", "test.txt"),
    ],
)
def test_the_usual_file_names_are_found(names, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for name in names:
        (raw / name).write_text("a\n")
    (raw / "ptb.char.train.txt").write_text("_ a _\n")
    (raw / "README").write_text("see elsewhere\n")
    assert [record.name for record in prepared(raw).manifest.sources] == list(names)


def test_missing_and_doubtful_split_files_are_named(tmp_path):
    raw = write_splits(tmp_path / "raw", train="a\n", valid="a\n", test="a\n")
    (raw / "wiki.train.tokens").write_text("a\n")
    with pytest.raises(DataError, match=r"several train files: train\.txt, wiki\.train\.tokens"):
        prepared(raw)
    (raw / "wiki.train.tokens").unlink()
    (raw / "test.txt").unlink()
    with pytest.raises(DataError, match="has no test file"):
        prepared(raw)
    with pytest.raises(DataError, match="is a file; --from takes the folder"):
        prepare(PrepareConfig(dataset="ptb", source=raw / "train.txt", out=tmp_path / "out"))
