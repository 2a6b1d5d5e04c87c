"""The corpus that needs no file."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from deqkit.data import DataError, embedded, embedded_corpus, embedded_text


@pytest.fixture(scope="module")
def text() -> str:
    return embedded_text()


def test_it_is_about_a_million_characters_of_english_about_python(text):
    assert 900_000 <= len(text) <= 1_000_000
    assert text.isprintable() is False and "\t" not in text and "\0" not in text
    words = text.split()
    assert words.count("the") / len(words) > 0.03  # English: about one word in twenty
    ascii_share = sum(character.isascii() for character in text) / len(text)
    assert ascii_share > 0.99
    assert text.count("statement") > 100 and text.count("Return ") > 100


def test_no_long_paragraph_comes_twice(text):
    paragraphs = [paragraph for paragraph in text.split("\n\n") if len(paragraph) >= 80]
    assert len(paragraphs) > 2_000 and len(set(paragraphs)) == len(paragraphs)


def test_it_is_the_same_in_another_process_that_imports_no_module_for_it(text):
    script = (
        "import hashlib, sys\n"
        "from deqkit.data import embedded_text\n"
        "before = set(sys.modules)\n"
        "text = embedded_text()\n"
        "print(hashlib.sha256(text.encode()).hexdigest(), *sorted(set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    digest, *imported = done.stdout.split()
    assert digest == hashlib.sha256(text.encode()).hexdigest()
    # where Python is installed, which sysconfig looks up in a module of its own
    imported = [name for name in imported if not name.startswith("_sysconfigdata_")]
    assert imported == ["pydoc_data", "pydoc_data.topics"]


@pytest.mark.parametrize(("level", "vocab_size"), [("bpe", 1024), ("bytes", 256)])
def test_as_a_corpus_it_has_three_parts_that_are_the_text(level, vocab_size, text):
    corpus = embedded_corpus(level=level, vocab_size=1024)
    parts = [corpus.decode(corpus.split(name)) for name in ("train", "valid", "test")]
    assert "".join(parts) == text
    assert corpus.vocab_size == vocab_size and corpus.folder is None
    assert [record.num_text_bytes for record in corpus.manifest.splits.values()] == [len(p.encode()) for p in parts]
    assert abs(len(parts[1]) / len(text) - 0.05) < 0.001 and abs(len(parts[2]) / len(text) - 0.05) < 0.001
    with pytest.raises(ValueError, match="read-only"):
        corpus.split("train")[0] = 1
    corpus.verify()
    if level == "bpe":
        assert len(corpus.split("train")) < len(parts[0]) / 2


def test_docstrings_are_read_without_running_the_file(tmp_path):
    module = tmp_path / "sample.py"
    module.write_text(
        '"""About the module."""\n'
        "raise RuntimeError('this file was run')\n"
        "class Outer:\n"
        '    """About the class.\n\n    Flush.\n        Indented.\n    """\n'
        "    def method(self):\n"
        "        'About the method.'\n"
        "        def inner(): 'About the inner function.'\n"
        "async def later(): 'About later; \\d is no escape.'\n"
        "def silent(): pass\n"
    )
    assert list(embedded._docstrings_of(module, "sample")) == [
        "sample\n\nAbout the module.",
        "sample.Outer\n\nAbout the class.\n\nFlush.\n    Indented.",
        "sample.Outer.method\n\nAbout the method.",
        "sample.Outer.method.inner\n\nAbout the inner function.",
        "sample.later\n\nAbout later; \\d is no escape.",
    ]


def test_a_python_without_documentation_is_told_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(DataError, match="this Python came without documentation .*`deqkit data prepare text`"):
        embedded_text()
    assert list(Path(tmp_path).iterdir()) == []


def test_wrong_choices_are_refused():
    with pytest.raises(ValueError, match='level must be "bpe" or "bytes", got \'words\''):
        embedded_corpus(level="words")
    with pytest.raises(ValueError, match="shares must be above 0"):
        embedded_corpus(valid_share=0.6, test_share=0.4)
