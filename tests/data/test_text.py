"""Bytes and BPE: exact round trips, splits by position, enwik8, and memory that does not grow with the file."""

import lzma
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.corpora import shared_file, unpack
from deqkit.data import Corpus, DataError, PrepareConfig, _reading, prepare

SPLITS = ("train", "valid", "test")
# With runs of white space, so that BPE has tokens for them and it matters where text is cut.
STORY = "".join(
    f"Line {i}: it's {i * 7919 % 1000} grey cats,\t\tand  naïve ünïcode — 日本{i}\n\n\n    then   \r\n"
    for i in range(400)
)


def prepared(source: Path, **options) -> Corpus:
    return prepare(PrepareConfig(dataset="text", source=source, out=source.with_name("out"), **options))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> dict[str, Corpus]:
    source = tmp_path_factory.mktemp("story") / "story.txt"
    source.write_bytes(STORY.encode())
    bpe = PrepareConfig(dataset="text", source=source, out=source.with_name("bpe"), vocab_size=500)
    raw = PrepareConfig(dataset="text", source=source, out=source.with_name("bytes"), tokens="bytes")
    return {"bpe": prepare(bpe), "bytes": prepare(raw)}


@pytest.mark.parametrize("level", ["bpe", "bytes"])
def test_the_splits_joined_are_the_text_in_the_documented_shares(level, corpora):
    corpus = corpora[level]
    parts = [corpus.decode(corpus.split(name)) for name in SPLITS]
    assert "".join(parts) == STORY
    assert all(part.endswith("\n") for part in parts)
    sizes = [len(part.encode()) for part in parts]
    assert [corpus.manifest.splits[name].num_text_bytes for name in SPLITS] == sizes
    longest = max(len(line.encode()) for line in STORY.splitlines(keepends=True))
    total = sum(sizes)
    assert 0 <= sizes[0] - 0.9 * total <= longest and 0 <= sizes[0] + sizes[1] - 0.95 * total <= longest


@pytest.mark.parametrize("level", ["bpe", "bytes"])
@settings(deadline=None)
@given(text=st.text(max_size=80))
def test_every_text_comes_back(level, text, corpora):
    ids = corpora[level].encode(text)
    assert corpora[level].decode(ids) == text
    assert all(0 <= index < corpora[level].vocab_size for index in ids)


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_a_byte_is_its_own_id_in_the_tokenizer_file_too(text, corpora):
    assert corpora["bytes"].vocabulary.encode(text).ids == list(text.encode())
    assert corpora["bytes"].encode(text) == list(text.encode())
    assert corpora["bytes"].vocabulary.decode(list(text.encode()), skip_special_tokens=False) == text


SCRAPS = [
    "a",
    "then",
    "'s",
    "é日",
    "1",
    ".,",
    "😀",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n\n    ",
    "\t\t",
    "   \r\n",
    "\xa0",
    "\x1c",
    "\x85",
]
TANGLED = st.lists(st.sampled_from(SCRAPS), min_size=1, max_size=40).map("".join)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TANGLED, block=st.integers(1, 12))
def test_reading_in_blocks_gives_the_ids_of_the_whole(text, block, corpora, tmp_path_factory, monkeypatch):
    tokenizer = corpora["bpe"].vocabulary
    chunks = [text[i : i + block] for i in range(0, len(text), block)]
    pieces = list(_reading.cut_at_pretokens(chunks))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in tokenizer.encode(piece).ids] == tokenizer.encode(text).ids


def test_text_without_a_space_is_cut_and_still_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(_reading, "BLOCK", 100)
    monkeypatch.setattr(_reading, "LONGEST_RUN", 300)
    source = tmp_path / "long.txt"
    source.write_text("日本語" * 3000, encoding="utf-8")
    corpus = prepared(source, vocab_size=300)
    assert "".join(corpus.decode(corpus.split(name)) for name in SPLITS) == "日本語" * 3000
    pieces = list(_reading.cut_at_pretokens("日本語" * 30 for _ in range(100)))
    assert max(map(len, pieces)) <= 390 and "".join(pieces) == "日本語" * 3000


def test_a_folder_is_its_files_in_order_without_hidden_ones(tmp_path):
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".git").mkdir()
    contents = {"a.txt": "first\r\nfile\n" * 30, "b/z.md": "second file\n" * 30, "c.txt": "third é\n" * 30}
    for name, text in contents.items():
        (folder / name).write_bytes(text.encode())
    (folder / ".git" / "index").write_bytes(b"\0\1\2")
    (folder / ".hidden").write_text("not this")
    (folder / "empty.txt").write_text("")
    corpus = prepared(folder, tokens="bytes")
    joined = "".join(contents.values())
    assert "".join(corpus.decode(corpus.split(name)) for name in SPLITS) == joined
    assert corpus.manifest.options["num_byte_values"] == len(set(joined.encode()))
    assert [record.name for record in corpus.manifest.sources] == ["a.txt", "z.md", "c.txt"]


def test_shares_and_vocabulary_size_are_as_asked(tmp_path):
    source = tmp_path / "story.txt"
    source.write_text(STORY, encoding="utf-8")
    corpus = prepared(source, vocab_size=300, valid_share=0.25, test_share=0.25)
    sizes = [corpus.manifest.splits[name].num_text_bytes for name in SPLITS]
    assert np.allclose(np.array(sizes) / sum(sizes), [0.5, 0.25, 0.25], atol=0.01)
    assert corpus.vocab_size == 300 and corpus.manifest.dtype == "<u2"
    assert corpus.manifest.options["valid_share"] == 0.25


def test_real_books_with_both_line_ends_come_back(tmp_path):
    books = unpack("public-domain", tmp_path)
    corpus = prepared(books, vocab_size=1000)
    raw = b"".join(path.read_bytes() for path in sorted(books.iterdir()))
    assert b"\r\n" in raw
    assert "".join(corpus.decode(corpus.split(name)) for name in SPLITS).encode() == raw
    assert corpus.manifest.splits["train"].num_tokens < 0.5 * corpus.manifest.splits["train"].num_text_bytes


def test_the_same_text_gives_the_same_files_in_another_process(tmp_path, corpora):
    source = tmp_path / "story.txt"
    source.write_bytes(STORY.encode())
    words = [str(source), "--out", str(tmp_path / "again"), "--vocab-size", "500"]
    done = subprocess.run(
        [sys.executable, "-m", "deqkit", "data", "prepare", "text", "--from", *words], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    folder = corpora["bpe"].folder
    assert folder is not None
    for name in ("manifest.json", "tokenizer.json", "train.bin", "valid.bin", "test.bin"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name


@pytest.mark.slow
def test_enwik8_is_its_bytes_split_90_5_5(tmp_path):
    raw = lzma.decompress(shared_file("enwik8.xz").read_bytes())
    source = tmp_path / "enwik8"
    source.write_bytes(raw)
    corpus = prepare(PrepareConfig(dataset="enwik8", source=tmp_path, out=tmp_path / "out"))
    values = np.frombuffer(raw, dtype=np.uint8)
    for name, start, stop in (("train", 0, 90), ("valid", 90, 95), ("test", 95, 100)):
        assert np.array_equal(corpus.split(name), values[start * 10**6 : stop * 10**6])
    assert corpus.manifest.as_published and corpus.manifest.options["num_byte_values"] == 205
    known = "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8"  # from the README of the data
    assert corpus.manifest.sources[0].sha256 == known


def test_a_file_that_is_not_enwik8_is_refused_with_the_way_to_do_it(tmp_path):
    source = tmp_path / "enwik8"
    source.write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match=r"enwik8 has 100,000,000 bytes, .* has 1,000; .* text --tokens bytes"):
        prepare(PrepareConfig(dataset="enwik8", source=source, out=tmp_path / "out"))


def test_peak_memory_does_not_grow_with_the_file(tmp_path):
    """Peak of the process after a file, and after one 12 times as long: the difference would be tens of MB."""
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from deqkit.data import PrepareConfig, prepare
        folder = Path(sys.argv[1])
        line = " ".join(f"word{i % 977}" for i in range(4000))  # some 30 KB, and no line end in between
        for size in (60, 720):
            for name in ("train", "valid", "test"):
                (folder / f"{name}.txt").write_text(line * (size if name == "train" else 1))
            prepare(PrepareConfig(dataset="wikitext-2", source=folder, out=folder / "out" / f"words{size}"))
            text = folder / "train.txt"
            prepare(PrepareConfig(dataset="text", source=text, out=folder / "out" / f"bytes{size}", tokens="bytes"))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
    """)
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    small, large = map(int, done.stdout.split())
    assert (tmp_path / "train.txt").stat().st_size > 20e6
    assert large - small < 16
