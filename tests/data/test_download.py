"""`--download`, against a hub on localhost that speaks what `huggingface_hub` needs."""

import hashlib
import io
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pyarrow
import pytest
from pyarrow import parquet

from data.corpora import unpack
from deqkit.data import DataError, PrepareConfig, _datasets, prepare

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Files by path, as a hub serves them, and what was asked of it."""

    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    tag: str | None = None
    url: str = ""

    def add(self, hub: _datasets.HubCopy, name: str, rows: list[str], column: str | None = None) -> None:
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.table({column or hub.column: rows}), buffer)
        self.files[f"/datasets/{hub.repo}/resolve/{hub.revision}/{name}"] = buffer.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    served = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(with_body=False)

        def do_GET(self):
            self.answer(with_body=True)

        def answer(self, *, with_body: bool):
            path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
            served.requests.append(f"{self.command} {path}")
            served.authorizations.append(self.headers.get("authorization"))
            content = served.files.get(path)
            self.send_response(404 if content is None else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            body = content or b""
            self.send_header("ETag", f'"{served.tag or hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("HF_ENDPOINT", served.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


def copy_of(name) -> _datasets.HubCopy:
    found = _datasets.DATASETS[name].hub
    assert found is not None
    return found


def unpublished(monkeypatch, name) -> None:
    """Let a small text pass for the corpus."""
    dataset = _datasets.DATASETS[name]
    monkeypatch.setitem(_datasets.DATASETS, name, replace(dataset, num_tokens={}, vocab_size=None, ids_sha256={}))


def download(tmp_path: Path, name, **options):
    return prepare(PrepareConfig(dataset=name, out=tmp_path / "out", download=True), **options)


def add_wikitext(hub: Hub, name="wikitext-103") -> None:
    # As on the hub: a row is a line with its end, and a blank line is an empty row.
    rows = {"train": [[" = A = \n", "", " b c <unk> \n"], ["", " c c \n"]], "valid": [["b \n"]], "test": [["", "c\n"]]}
    for split, names in copy_of(name).files.items():
        for file, lines in zip(names, rows[split], strict=True):
            hub.add(copy_of(name), file, lines)


def test_a_corpus_is_fetched_and_prepared(hub, tmp_path, monkeypatch):
    unpublished(monkeypatch, "wikitext-103")
    add_wikitext(hub)
    told = []
    corpus = download(tmp_path, "wikitext-103", on_progress=lambda *what: told.append(what))
    assert corpus.decode(corpus.split("train")) == "= A =\n\nb c <unk>\n\nc c\n"
    assert corpus.decode(corpus.split("test")) == "\nc\n"
    served = {path.split("/resolve/main/")[1]: content for path, content in hub.files.items()}
    assert {record.name: record.sha256 for record in corpus.manifest.sources} == {
        f"Salesforce/wikitext@{COMMIT}/{name}": hashlib.sha256(content).hexdigest() for name, content in served.items()
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "out"]
    assert not (tmp_path / "out" / "raw").exists()
    assert any(what[0].startswith("fetching wikitext-103-v1/train-00001") and what[1] == what[2] > 0 for what in told)
    assert set(hub.authorizations) == {None}


def test_what_was_fetched_is_not_fetched_again(hub, tmp_path, monkeypatch):
    unpublished(monkeypatch, "wikitext-103")
    add_wikitext(hub)
    download(tmp_path, "wikitext-103")
    hub.requests.clear()
    prepare(PrepareConfig(dataset="wikitext-103", out=tmp_path / "out", download=True, overwrite=True))
    assert hub.requests and not [request for request in hub.requests if request.startswith("GET")]


def test_ptb_from_the_hub_is_ptb_as_published(hub, tmp_path):
    raw = unpack("ptb", tmp_path)
    for split, (file,) in copy_of("ptb").files.items():
        lines = (raw / f"{split}.txt").read_text(encoding="utf-8").splitlines()
        hub.add(copy_of("ptb"), file, [line.strip() for line in lines])
    corpus = download(tmp_path, "ptb")
    assert corpus.manifest.as_published
    assert [split.num_tokens for split in corpus.manifest.splits.values()] == [929_589, 73_760, 82_430]
    assert all("refs/convert/parquet" in request for request in hub.requests)


def test_enwik8_comes_as_one_row(hub, tmp_path, monkeypatch):
    unpublished(monkeypatch, "enwik8")
    text = "<mediawiki>\n\n é \r\n" * 50
    for module in ("_building", "_datasets"):
        total = len(text.encode())
        sizes = {"train": total - 20, "valid": 10, "test": 10}
        monkeypatch.setattr(f"deqkit.data.{module}.ENWIK8_SPLIT", sizes)
    hub.add(copy_of("enwik8"), "enwik8-raw/train/0000.parquet", [text])
    corpus = download(tmp_path, "enwik8")
    ids = [i for name in ("train", "valid", "test") for i in corpus.split(name).tolist()]
    assert bytes(ids).decode() == text


def failure(tmp_path: Path, name="wikitext-103") -> str:
    with pytest.raises(DataError) as caught:
        download(tmp_path, name)
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_text_is_not_taken_for_the_corpus(hub, tmp_path):
    add_wikitext(hub)
    message = failure(tmp_path)
    assert "what was downloaded is not wikitext-103 as published: vocabulary 6 instead of 267,735" in message


def test_the_right_counts_with_other_tokens_are_found_by_the_hash(hub, tmp_path, monkeypatch):
    dataset = _datasets.DATASETS["wikitext-2"]
    counts = {"train": 13, "valid": 2, "test": 3}
    hashes = {"valid": "0" * 64}
    changed = replace(dataset, num_tokens=counts, vocab_size=6, ids_sha256=hashes, hub=copy_of("wikitext-103"))
    monkeypatch.setitem(_datasets.DATASETS, "wikitext-2", changed)
    add_wikitext(hub)
    assert "as published: valid has other tokens" in failure(tmp_path, "wikitext-2")


def test_a_damaged_file_is_found_by_the_hash_of_the_hub(hub, tmp_path, monkeypatch):
    unpublished(monkeypatch, "wikitext-103")
    add_wikitext(hub)
    hub.tag = "ab" * 32
    message = failure(tmp_path)
    assert "a damaged download; delete it and try again" in message and "ab" * 32 in message


def test_a_missing_file_is_named_with_the_remedy(hub, tmp_path):
    message = failure(tmp_path)
    assert "could not fetch wikitext-103-v1/train-00000-of-00002.parquet of Salesforce/wikitext" in message
    assert hub.url in message and "give files with --from" in message


def test_without_a_connection_the_remedy_is_told(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    message = failure(tmp_path)
    assert "could not fetch" in message and "offline" in message and "give files with --from" in message
    assert hub.requests == []


def test_without_the_extra_the_way_to_install_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert failure(tmp_path) == '--download needs huggingface_hub and pyarrow: pip install "deqkit[hf]"'


def test_a_file_with_another_column_is_refused(hub, tmp_path, monkeypatch):
    unpublished(monkeypatch, "wikitext-103")
    add_wikitext(hub)
    hub.add(copy_of("wikitext-103"), copy_of("wikitext-103").files["train"][0], ["a"], column="words")
    assert "is no Parquet file with a column 'text'" in failure(tmp_path)


def test_a_file_that_is_no_parquet_is_refused(hub, tmp_path, monkeypatch):
    unpublished(monkeypatch, "wikitext-103")
    add_wikitext(hub)
    for path in hub.files:
        hub.files[path] = b"<html>not here</html>"
    assert "is no Parquet file" in failure(tmp_path)
