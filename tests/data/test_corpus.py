"""Opening a corpus: what it offers, and that every kind of damage is found and named."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data.corpora import write_splits
from deqkit.data import (
    Corpus,
    DataError,
    PrepareConfig,
    VocabularyMismatchError,
    check_vocabulary,
    open_corpus,
    prepare,
)
from deqkit.data._datasets import DatasetName


def make(folder: Path, *, train="a b <unk>\nb b\n", dataset: DatasetName = "wikitext-2", **options) -> Corpus:
    folder.mkdir(exist_ok=True)
    if dataset == "text":
        source = folder / "raw.txt"
        source.write_text(train)
    else:
        source = write_splits(folder / "raw", train=train, valid="a b\n", test="b\n")
    return prepare(PrepareConfig(dataset=dataset, source=source, out=folder / "corpus", overwrite=True, **options))


def test_a_folder_opens_as_what_was_prepared(tmp_path):
    made = make(tmp_path)
    corpus = open_corpus(str(tmp_path / "corpus"))
    assert sorted(path.name for path in (tmp_path / "corpus").iterdir()) == [
        "manifest.json",
        "test.bin",
        "tokenizer.json",
        "train.bin",
        "valid.bin",
    ]
    assert corpus.manifest == made.manifest and corpus.fingerprint == made.fingerprint
    assert corpus.vocab_size == 4 == corpus.vocabulary.get_vocab_size()
    assert corpus.split("train").tolist() == [2, 1, 3, 0, 1, 1, 0]
    assert corpus.decode(corpus.split("train")) == "a b <unk>\nb b\n"
    assert corpus.encode("a a\n") == [2, 2, 0]
    corpus.verify()


def test_ids_are_mapped_read_only_in_two_bytes(tmp_path):
    ids = make(tmp_path).split("train")
    assert isinstance(ids, np.memmap) and ids.dtype == np.dtype("<u2") and ids.ndim == 1
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1
    assert (tmp_path / "corpus" / "train.bin").stat().st_size == 2 * len(ids)


def test_a_vocabulary_beyond_two_bytes_takes_four(tmp_path):
    words = " ".join(f"w{i}" for i in range(65_536))
    corpus = make(tmp_path, train=f"{words} a b\n")
    assert corpus.vocab_size == 65_539 and corpus.manifest.dtype == "<u4"
    assert corpus.split("train").tolist() == [*range(1, 65_539), 0]
    assert (tmp_path / "corpus" / "train.bin").stat().st_size == 4 * 65_539
    exact = make(tmp_path / "exact", train=f"{words.removesuffix(' w65535')}\n".replace("w0 w1 ", "a b "))
    assert exact.vocab_size == 65_536 and exact.manifest.dtype == "<u2"
    assert exact.split("train").max() == 65_535


def test_the_manifest_says_how_the_corpus_was_made(tmp_path):
    make(tmp_path)
    values = json.loads((tmp_path / "corpus" / "manifest.json").read_text())
    assert values["format"] == "deqkit-corpus" and values["dtype"] == "<u2" and values["level"] == "words"
    assert [source["name"] for source in values["sources"]] == ["train.txt", "valid.txt", "test.txt"]
    assert values["splits"]["train"]["num_text_bytes"] == 14
    assert set(values["made_with"]) == {"deqkit", "tokenizers"}
    assert str(tmp_path) not in json.dumps(values)


def damage_cut(folder: Path) -> None:
    content = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(content[:-2])


def damage_longer(folder: Path) -> None:
    with (folder / "valid.bin").open("ab") as file:
        file.write(b"\0")


def damage_missing(folder: Path) -> None:
    (folder / "test.bin").unlink()


def damage_vocabulary(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"a"', '"x"'))


def damage_no_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text((folder / "manifest.json").read_text()[:100])


def damage_field(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    del values["vocab_size"]
    (folder / "manifest.json").write_text(json.dumps(values))


def damage_unknown_field(folder: Path) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**values, "colour": "blue"}))


def damage_dtype(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"<u2"', '"two"'))


def damage_not_an_object(folder: Path) -> None:
    (folder / "manifest.json").write_text("[1, 2]")


def damage_version(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"version": 1', '"version": 99'))


def damage_no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, r"train\.bin was cut short: 12 bytes instead of 14"),
        (damage_longer, r"valid\.bin was changed: 7 bytes instead of 6"),
        (damage_missing, r"test\.bin is missing"),
        (damage_vocabulary, r"tokenizer\.json was changed since it was made"),
        (damage_no_vocabulary, r"tokenizer\.json is missing"),
        (damage_manifest, r"manifest\.json is damaged"),
        (damage_field, r"manifest\.json is damaged .*vocab_size"),
        (damage_unknown_field, r"manifest\.json is damaged .*colour"),
        (damage_dtype, r"manifest\.json is damaged .*two"),
        (damage_not_an_object, r"manifest\.json is damaged"),
        (damage_version, "is not a corpus of this version of deqkit"),
        (damage_no_manifest, r"holds no corpus \(manifest\.json is missing\)"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_damage_is_found_at_once_and_told_in_one_line(damage, message, tmp_path):
    make(tmp_path)
    damage(tmp_path / "corpus")
    with pytest.raises(DataError, match=message) as caught:
        open_corpus(tmp_path / "corpus")
    assert "\n" not in str(caught.value) and "prepare" in str(caught.value)


@pytest.mark.parametrize("name", ["train.bin", "valid.bin", "test.bin"])
def test_a_changed_id_is_found_by_verify(name, tmp_path):
    make(tmp_path)
    path = tmp_path / "corpus" / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    corpus = open_corpus(tmp_path / "corpus")
    with pytest.raises(DataError, match=re.escape(f"{name} was changed since it was made")):
        corpus.verify()


def test_a_model_is_not_fed_with_another_vocabulary(tmp_path):
    corpus = make(tmp_path)
    check_vocabulary(corpus, corpus.fingerprint)
    other = make(tmp_path / "other", train="b a <unk>\na a\n")
    assert set(other.vocabulary.get_vocab()) == set(corpus.vocabulary.get_vocab())
    with pytest.raises(VocabularyMismatchError, match="is not the one the model was trained with") as caught:
        check_vocabulary(other, corpus.fingerprint)
    assert corpus.fingerprint[:12] in str(caught.value) and isinstance(caught.value, DataError)


def test_the_fingerprint_is_of_the_vocabulary_and_the_data_hash_of_everything(tmp_path):
    corpus = make(tmp_path)
    same_words = make(tmp_path / "same", train="a b b <unk>\nb\n")
    lowercased = make(tmp_path / "lower", dataset="ptb")
    assert same_words.fingerprint == corpus.fingerprint and same_words.data_hash != corpus.data_hash
    assert list(lowercased.split("train")) == list(corpus.split("train"))
    assert lowercased.fingerprint != corpus.fingerprint  # "A" would be "a" in one and `<unk>` in the other
    assert make(tmp_path / "again").data_hash == corpus.data_hash


def test_merges_are_part_of_a_bpe_fingerprint(tmp_path):
    text = "low lower lowest newer wider " * 200
    first = make(tmp_path, dataset="text", train=text, vocab_size=262)
    second = make(tmp_path / "second", dataset="text", train=text, vocab_size=263)
    again = make(tmp_path / "again", dataset="text", train=text, vocab_size=262)
    assert first.fingerprint == again.fingerprint != second.fingerprint


def test_wrong_names_and_ids_are_refused(tmp_path):
    corpus = make(tmp_path)
    with pytest.raises(DataError, match="there is no split 'dev'; there are train, valid, test"):
        corpus.split("dev")
    for ids in ([4], [-1], [0, 99]):
        with pytest.raises(DataError, match="ids go from 0 to 3"):
            corpus.decode(ids)
