"""The pages in headless Chromium: on a phone and on a desk, in light and dark.

A page has no script, so a second page holds it in frames of both widths, measures them and writes down what it finds.
"""

import html
import json
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")

WIDTHS = (390, 1200)
MEASURE = """
const found = [];
for (const frame of document.querySelectorAll('iframe')) {
  const page = frame.contentDocument, root = page.documentElement, wide = frame.clientWidth;
  page.querySelectorAll('details').forEach(part => part.open = true);
  const boxes = selector => [...page.querySelectorAll(selector)].map(part => part.getBoundingClientRect());
  const outside = box => box.width > 0 && (box.left < -1 || box.right > wide + 1);
  const drawn = boxes('figure > svg'), letters = boxes('figure > svg text');
  found.push({
    wide, scroll: root.scrollWidth, height: root.scrollHeight, behind: getComputedStyle(page.body).backgroundColor,
    figures: drawn.length, flat: drawn.filter(box => box.width < 200 || box.height < 50).length,
    letters: letters.length, outside: letters.filter(outside).length,
    smallest: Math.min(...letters.map(box => box.height)),
    columns: new Set(drawn.map(box => Math.round(box.left))).size,
    boxes: [...page.querySelectorAll('.wide')].map(box => box.getBoundingClientRect().right <= wide),
  });
}
document.querySelector('pre').textContent = JSON.stringify(found);
"""


def look_at(page: str, folder, *, dark: bool) -> list[dict]:
    """What the browser makes of a page at both widths."""
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{html.escape(page)}"></iframe>'
        for width in WIDTHS
    )
    (folder / "look.html").write_text(
        f"<!doctype html><meta charset=utf-8>{frames}<pre></pre><script>onload = () => {{{MEASURE}}}</script>",
        encoding="utf-8",
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    options += ["--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options += [f"--user-data-dir={folder / 'profile'}", f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    options += ["--virtual-time-budget=10000", "--dump-dom", (folder / "look.html").as_uri()]
    done = subprocess.run([str(BROWSER), *options], capture_output=True, text=True, timeout=120, check=True)
    written = re.search(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    assert written and written[1], done.stderr
    return json.loads(html.unescape(written[1]))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["equilibrium", "several"])
def test_pages_fit_phones_and_desks(kind, dark, pages, tmp_path):
    phone, desk = look_at(pages[kind], tmp_path, dark=dark)
    for found, width in ((phone, 390), (desk, 1200)):
        assert found["wide"] == found["scroll"] == width, "the page itself must not scroll sideways"
        assert found["figures"] == pages[kind].count("<figure>") and found["flat"] == 0
        assert found["letters"] > 50 and found["outside"] == 0
        assert found["smallest"] >= 11, "letters in figures would be too small to read"
        assert found["boxes"] and all(found["boxes"])
        red, green, blue = map(int, re.findall(r"\d+", found["behind"])[:3])
        assert (red + green + blue < 150) == dark
    assert phone["height"] > desk["height"] and (phone["columns"], desk["columns"]) == (1, 2)
