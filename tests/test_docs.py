"""The python blocks of every document run, in order, as one program per file.

A block opened with "```python no-run" is shown and not run.
"""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
RESULTS = sorted(ROOT.glob("results/**/*.json"))
FOLDER_OF_ONE_MACHINE = re.compile(r"(?<![\w.~-])/(?:home|opt|root|tmp|Users|var|work)/")
FENCE = re.compile(r"^```(py[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[str]:
    """Return the blocks to run, each padded with blank lines so that a traceback shows the line of the document."""
    blocks = []
    for fence in FENCE.finditer(text):
        info, code = fence.groups()
        if info not in ("python", "python no-run"):
            raise ValueError(f"```{info}: write ```python or ```python no-run, anything else would go unchecked")
        if info == "python":
            blocks.append("\n" * text.count("\n", 0, fence.start(2)) + code)
    return blocks


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": path.stem}
    with torch.random.fork_rng():
        for block in python_blocks(path.read_text(encoding="utf-8")):
            exec(compile(block, str(path), "exec"), namespace)


def test_blocks_keep_their_line_and_no_run_is_skipped():
    text = "intro\n```python\na = 1\n```\n```python no-run\nb\n```\n```sh\nls\n```\n```python\nc = 2\n```\n"
    assert python_blocks(text) == ["\n\na = 1\n", "\n" * 11 + "c = 2\n"]


def test_a_mistyped_fence_is_an_error():
    with pytest.raises(ValueError, match="norun"):
        python_blocks("```python norun\na = 1\n```\n")


@pytest.mark.parametrize("path", [*DOCUMENTS, *RESULTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_folder_of_one_machine_is_named(path):
    assert not FOLDER_OF_ONE_MACHINE.findall(path.read_text(encoding="utf-8"))


def test_folders_of_one_machine_are_found():
    assert FOLDER_OF_ONE_MACHINE.findall("not in /var/tmp/data or (/home/ann/x)") == ["/var/", "/home/"]
    address = "/".join(("https://host.org", "var", "z"))
    assert not FOLDER_OF_ONE_MACHINE.search(f"runs/tmp/x, ../work/y, {address}")
