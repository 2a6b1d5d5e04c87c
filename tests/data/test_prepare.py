"""Bad input gives one clear line; whatever goes wrong, the folder is complete or not there."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.corpora import write_splits
from deqkit.data import DataError, PrepareConfig, _files, open_corpus, prepare

TEXT = "some words of text\n" * 200


def text_file(folder: Path, content: bytes | str = TEXT) -> Path:
    path = folder / "raw.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def config(folder: Path, source: Path, **options) -> PrepareConfig:
    return PrepareConfig(**{"dataset": "text", "source": source, "out": folder / "out", "tokens": "bytes", **options})


def left_behind(folder: Path) -> list[str]:
    """All that is in a folder, hidden files too."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


UTF16 = "some text".encode("utf-16")


@pytest.mark.parametrize("tokens", ["bpe", "bytes"])
@pytest.mark.parametrize(
    "text",
    ["word " * 20_000 + "\n", ("wörd " * 2_000 + "\n") * 10, "ö" * 5_000],
    ids=["one line", "ten long lines", "no space"],
)
def test_lines_so_long_that_two_limits_fall_into_one(tmp_path, tokens, text):
    (tmp_path / "raw.txt").write_text(text, encoding="utf-8")
    corpus = prepare(PrepareConfig(dataset="text", source=tmp_path / "raw.txt", out=tmp_path / "out", tokens=tokens))
    splits = [corpus.split(name) for name in ("train", "valid", "test")]
    assert all(len(ids) for ids in splits)
    assert "".join(corpus.decode(ids) for ids in splits) == text


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    (tmp_path / "raw.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    corpus = prepare(PrepareConfig(dataset="text", source=tmp_path / "raw.txt", out=tmp_path / "out", tokens="bpe"))
    assert corpus.decode(corpus.split("train")[:50]).startswith(TEXT[:20])


@pytest.mark.parametrize("tokens", ["bpe", "bytes"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"raw\.txt is empty"),
        (TEXT.encode() * 1000 + b"\0\1", r"raw\.txt is binary or UTF-16, not UTF-8 text: byte 3800000 is zero"),
        (TEXT.encode() * 100 + b"caf\xe9 noir" + TEXT.encode(), r"raw\.txt is not UTF-8 at byte 380003 \(invalid"),
        (TEXT.encode() + "é".encode()[:1], r"raw\.txt is not UTF-8 at byte 3800 \(unexpected end of data\)"),
        (UTF16, r"raw\.txt is binary or UTF-16"),
        (b"ab", "2 bytes of text are too short to split"),
    ],
)
def test_text_that_is_none_is_named(content, message, tokens, tmp_path):
    source = text_file(tmp_path, content)
    with pytest.raises(DataError, match=message) as caught:
        prepare(config(tmp_path, source, tokens=tokens))
    assert "\n" not in str(caught.value)
    assert left_behind(tmp_path) == ["raw.txt"]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"a \0 b", "byte 2 is zero"), (b"a\n\xff\n", "not UTF-8 at byte 2"), (None, "has no")],
)
def test_split_files_that_are_none_are_named(split, content, message, tmp_path):
    raw = write_splits(tmp_path / "raw", train="a b\n", valid="a\n", test="b\n")
    bad = raw / f"{split}.txt"
    bad.unlink() if content is None else bad.write_bytes(content)
    with pytest.raises(DataError, match=rf"{split}.*{message}|{message} {split}"):
        prepare(config(tmp_path, raw, dataset="ptb", tokens=None))
    assert not (tmp_path / "out").exists() and len(left_behind(tmp_path)) == len(left_behind(raw)) + 1


def test_text_of_white_space_has_no_words(tmp_path):
    raw = write_splits(tmp_path / "raw", train=" \n\n", valid="\n", test="\n")
    with pytest.raises(DataError, match=r"train\.txt has no words"):
        prepare(config(tmp_path, raw, dataset="wikitext-2", tokens=None))


@pytest.mark.parametrize("dataset", ["ptb", "wikitext-103", "enwik8", "text"])
def test_a_path_that_does_not_exist_is_named(dataset, tmp_path):
    with pytest.raises(DataError, match="nowhere.* does not exist"):
        prepare(config(tmp_path, tmp_path / "nowhere", dataset=dataset, tokens=None))
    assert left_behind(tmp_path) == []


def test_a_line_without_an_end_is_split_between_characters(tmp_path):
    text = "éàü" * 40
    corpus = prepare(config(tmp_path, text_file(tmp_path, text)))
    parts = [bytes(corpus.split(name).tolist()).decode() for name in ("train", "valid", "test")]
    assert "".join(parts) == text and all(parts)


def test_an_empty_folder_has_no_text(tmp_path):
    (tmp_path / "raw").mkdir()
    with pytest.raises(DataError, match="has no text in it"):
        prepare(config(tmp_path, tmp_path / "raw"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "imagenet"}, "dataset must be one of ptb, wikitext-2"),
        ({"source": None}, "either the raw files with --from or --download"),
        ({"download": True}, "either the raw files with --from or --download"),
        ({"source": None, "download": True}, "text has no public source"),
        ({"dataset": "ptb"}, "--tokens is for text only, not for ptb"),
        ({"dataset": "enwik8", "tokens": None, "vocab_size": 300, "test_share": 0.1}, "--vocab-size, --test-share is"),
        ({"dataset": "ptb", "tokens": None, "word_counts": Path("x")}, "--word-counts is for wikitext only"),
        ({"vocab_size": 300}, "bytes have a vocabulary of 256"),
        ({"tokens": "bpe", "vocab_size": 255}, "vocab_size must be at least 256.*got 255"),
        ({"valid_share": 0.0}, "shares of valid and test"),
        ({"valid_share": 0.5, "test_share": 0.5}, "shares of valid and test"),
        ({"test_share": float("nan")}, "shares of valid and test"),
    ],
)
def test_contradictory_options_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{"source": tmp_path, **options})


def test_a_folder_with_something_in_it_is_refused_and_left_as_it_is(tmp_path):
    source = text_file(tmp_path)
    first = prepare(config(tmp_path, source))
    before = left_behind(tmp_path)
    with pytest.raises(DataError, match="is not empty; choose another folder, or replace .* with --overwrite"):
        prepare(config(tmp_path, source))
    assert left_behind(tmp_path) == before
    replaced = prepare(config(tmp_path, text_file(tmp_path, "other words\n" * 300), overwrite=True))
    assert replaced.data_hash != first.data_hash and left_behind(tmp_path) == before
    assert open_corpus(tmp_path / "out").data_hash == replaced.data_hash


def test_overwrite_replaces_nothing_but_a_corpus(tmp_path):
    source = text_file(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="holds files but no corpus"):
        prepare(config(tmp_path, source, overwrite=True))
    assert left_behind(tmp_path) == ["out", "out/thesis.tex", "raw.txt"]
    with pytest.raises(DataError, match=r"thesis\.tex is a file; name a folder"):
        prepare(config(tmp_path, source, out=tmp_path / "out" / "thesis.tex"))


def test_an_empty_folder_is_filled_and_missing_parents_are_made(tmp_path):
    source = text_file(tmp_path)
    (tmp_path / "out").mkdir()
    prepare(config(tmp_path, source))
    prepare(config(tmp_path, source, out=tmp_path / "a" / "b" / "c"))
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["c"]
    open_corpus(tmp_path / "a" / "b" / "c").verify()


def test_a_corpus_inside_the_folder_of_texts_is_no_text(tmp_path):
    text_file(tmp_path)
    first = prepare(config(tmp_path, tmp_path))
    again = prepare(config(tmp_path, tmp_path, overwrite=True))
    assert again.data_hash == first.data_hash
    assert [record.name for record in again.manifest.sources] == ["raw.txt"]


def test_the_raw_text_is_never_inside_what_is_replaced(tmp_path):
    prepare(config(tmp_path, text_file(tmp_path)))
    source = text_file(tmp_path / "out")
    with pytest.raises(DataError, match="is inside .*, which is to be written"):
        prepare(config(tmp_path, source, overwrite=True))
    assert source.exists()


class Failing:
    """Stands in for a step of the work: raises when it is called for the n-th time."""

    def __init__(self, original, error: BaseException, *, at: int):
        self.original, self.error, self.calls_left = original, error, at

    def __call__(self, *args, **kwargs):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise self.error
        return self.original(*args, **kwargs)


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


STEPS = [
    (_files.IdsWriter, "write", 0),
    (_files.IdsWriter, "write", 2),
    (Path, "write_text", 0),
    (Path, "write_text", 1),
    (os, "rename", 0),
]


@pytest.mark.parametrize(
    ("target", "name", "at", "overwrite"),
    [(*step, overwrite) for step in STEPS for overwrite in (False, True)] + [(os, "rename", 1, True)],
)
@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt(), RuntimeError("a bug")], ids=repr)
def test_a_failure_at_any_step_leaves_what_was_there(error, target, name, at, overwrite, tmp_path, monkeypatch):
    source = text_file(tmp_path)
    old = prepare(config(tmp_path, source)) if overwrite else None
    if old:
        text_file(tmp_path, "other words\n" * 300)
    before = left_behind(tmp_path)
    original = getattr(target, name)
    step = Failing(original, error, at=at)
    with monkeypatch.context() as patch:
        # os.rename is also what puts the old corpus back: it must work again after the one failure.
        if target is os:
            patch.setattr(os, name, lambda *args: original(*args) if step.calls_left < 0 else step(*args))
        else:
            patch.setattr(target, name, lambda *args, **kwargs: step(*args, **kwargs))
        with pytest.raises(type(error)) as caught:
            prepare(config(tmp_path, source, overwrite=overwrite))
    assert left_behind(tmp_path) == before
    if error is FULL:
        assert "no space left for" in str(caught.value) and "nothing was written" in str(caught.value)
    if old:
        kept = open_corpus(tmp_path / "out")
        kept.verify()
        assert kept.data_hash == old.data_hash


def test_a_disk_that_refuses_to_write_more_leaves_no_debris(tmp_path):
    """The operating system's own refusal: files may not grow beyond 64 KiB."""
    source = text_file(tmp_path, TEXT * 50)
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "from deqkit.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["data", "prepare", "text", "--from", str(source), "--out", str(tmp_path / "out"), "--tokens", "bytes"]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "encoding" not in line]
    assert len(lines) == 1 and "File too large" in lines[0]
    assert left_behind(tmp_path) == ["raw.txt"]


def test_a_read_only_place_is_an_error_of_one_line(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    source = text_file(tmp_path)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        prepare(config(tmp_path, source))
    assert left_behind(tmp_path) == ["raw.txt"]


def test_progress_is_told_in_bytes_and_ends_at_the_whole(tmp_path):
    source = text_file(tmp_path, TEXT * 100)
    told: list[tuple[str, int, int]] = []
    prepare(config(tmp_path, source, tokens="bpe", vocab_size=300), on_progress=lambda *what: told.append(what))
    tasks = list(dict.fromkeys(description for description, _, _ in told))
    assert tasks == ["learning the vocabulary", "encoding train", "encoding valid", "encoding test"]
    for task in tasks:
        steps = [(done, total) for description, done, total in told if description == task]
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[0][0] == 0 and steps[-1][0] == steps[-1][1] > 0
