"""Tiny runs to write with: of bytes, of words, and of no text at all."""

import pytest

from data.corpora import write_splits
from deqkit.data import PrepareConfig, open_corpus, prepare
from deqkit.layers import VocabularyConfig
from train.runs import WIDTH, contractive, make_corpus, make_text, run, tiny


@pytest.fixture(scope="session")
def run_of_bytes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    with contractive():
        run(tiny(make_corpus(folder)), folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def run_of_words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    text = "".join(f" {make_text(12)} \n" for _ in range(8))
    corpus = folder / "corpus"
    prepare(PrepareConfig(dataset="ptb", source=write_splits(folder, train=text, valid=text, test=text), out=corpus))
    vocabulary = VocabularyConfig(size=open_corpus(corpus).vocab_size, embedding_width=WIDTH)
    run(tiny(str(corpus), model={"vocabulary": vocabulary}), folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def run_of_copies(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    run(tiny("copy-memory", steps=1, eval_every=1, checkpoint_every=1), folder / "run")
    return folder / "run"
