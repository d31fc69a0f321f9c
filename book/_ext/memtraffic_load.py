"""What makes the built pages load fast: each asks for what it uses, and scripts wait for its text.

All of it happens to the files of the site, after Sphinx has written them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

# In place of the theme's script, which has all of Font Awesome: an icon becomes an SVG with
# its attributes.
ICONS = """\
const draw = () => document.querySelectorAll(":is(i, span)[class*=fa-]").forEach((i) => {
  const name = [...i.classList].find((it) => it.slice(3) in icons)?.slice(3);
  if (!name) return;
  const [width, height, path] = icons[name];
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const { name, value } of i.attributes) svg.setAttribute(name, value);
  svg.classList.add("svg-inline--fa");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-hidden", "true");
  svg.innerHTML = `<path fill="currentColor" d="${path}"/>`;
  i.replaceWith(svg);
});
draw();
document.documentElement.classList.add("fontawesome-i2svg-active", "fontawesome-i2svg-complete");
"""


def leave_few_icons(folder: Path) -> None:
    """Leaves of the theme's icons those that a page uses: 6 kB of 1.5 MB.

    Of an icon that exists in two styles, the filled one, which stands last.
    """
    script = folder / "_static" / "scripts" / "fontawesome.js"
    everything = script.read_text("utf-8")
    if ICONS in everything:  # of a build before, which nothing has changed
        return
    pages = (it.read_text("utf-8") for it in folder.rglob("*.html"))
    used = {name for page in pages for name in re.findall(r"[\s\"]fa-([a-z-]+)", page)}
    entry = r'[{,]"?(%s)"?:\[(\d+),(\d+),\[[^\]]*\],"\w+","([^"]+)"\]'
    named = "|".join(sorted(map(re.escape, used), key=len, reverse=True))
    found = {
        name: (int(width), int(height), path)
        for name, width, height, path in re.findall(entry % named, everything)
    }
    terms = script.with_name(f"{script.name}.LICENSE.txt").read_text("utf-8")
    script.write_text(f"{terms}const icons = {json.dumps(found)};\n{ICONS}", "utf-8")


STYLE = re.compile(r'<link\b[^>]*href="([^"?]*_static/)([^"?]+\.css)[^>]*>\s*')


def lighten(app: Sphinx, exception: Exception | None) -> None:
    """Leaves of styles, scripts and icons what the pages use, and of style sheets one."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    leave_few_icons(folder)
    paths = [path for path in folder.rglob("*.html") if "_static" not in path.parts]
    pages = {path: path.read_text("utf-8") for path in paths}
    pages = {path: page for path, page in pages.items() if STYLE.search(page)}  # no redirects
    scripts = [path.read_text("utf-8") for path in folder.glob("_static/**/*.js")]
    used = set(re.findall(r"[\w-]+", " ".join([*pages.values(), *scripts])))
    names = dict.fromkeys(name for page in pages.values() for _, name in STYLE.findall(page))
    sheets = [whole_sheet(folder / "_static" / name) for name in names]
    style = purge("".join(sheets), used)
    (folder / "_static" / "site.css").write_text(style, "utf-8")
    for path, page in pages.items():
        path.write_text(lighten_page(page, path), "utf-8")
    for name in names:
        (folder / "_static" / name).unlink()
    for source in folder.glob("_static/**/*.map"):
        source.unlink()


def whole_sheet(path: Path) -> str:
    """A style sheet with those that it imports."""
    imported = re.compile(r"""@import\s+(?:url\()?["']([^"']+)["']\)?;""")
    text = path.read_text("utf-8")
    return imported.sub(lambda found: whole_sheet(path.parent / found[1]), text)


TOKEN = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|url\([^)"']*\)|[{};])""")


def rules(css: str) -> Iterator[tuple[str, str]]:
    """The rules of a style sheet: what stands before the braces and in them; "" of a statement."""
    depth = start = inside = 0
    for token in TOKEN.finditer(css):
        if token[0] == "{":
            depth += 1
            inside = token.end() if depth == 1 else inside
        elif token[0] == "}" and depth:
            depth -= 1
            if not depth:
                yield css[start : inside - 1].strip(), css[inside : token.start()].strip()
                start = token.end()
        elif token[0] == ";" and not depth:
            yield css[start : token.end()].strip(), ""
            start = token.end()


def purge(css: str, used: set[str]) -> str:
    """A style sheet without the rules whose classes and ids no page and no script names.

    >>> purge(".a, .b:not(.c) { x: 1 } @media print { .d { y: 2 } }", {"b"})
    '.b:not(.c){x: 1}'
    """
    kept = []
    for head, body in rules(re.sub(r"/\*.*?\*/", "", css, flags=re.S)):
        if not body:
            kept.append(head if head.endswith(";") else "")
        elif head.startswith(("@media", "@supports")):
            inner = purge(body, used)
            kept.append(f"{head}{{{inner}}}" if inner else "")
        elif head.startswith("@font-face"):
            kept.append("" if "Font Awesome" in body else f"{head}{{{body}}}")
        elif head.startswith("@"):
            kept.append(f"{head}{{{body}}}")
        else:
            selectors = [it for it in parts(head) if names(it) <= used]
            kept.append(f"{','.join(selectors)}{{{body}}}" if selectors else "")
    return "\n".join(filter(None, kept))


def parts(selectors: str) -> list[str]:
    """The selectors of a rule; a comma in brackets parts nothing."""
    return [
        it.strip()
        for it in re.findall(r"(?:[^,()\[\]]|\((?:[^()]|\([^()]*\))*\)|\[[^\]]*\])+", selectors)
    ]


def names(selector: str) -> set[str]:
    """The classes and ids that an element must have; those in brackets are alternatives."""
    plain = re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", selector)
    return {it.replace("\\", "") for it in re.findall(r"[.#]((?:\\.|[\w-])+)", plain)}


# The font of the text is asked for before the style sheet that names it; from a file, a browser
# refuses to.
PRELOAD = """\
<script>if (location.protocol !== "file:") document.head.insertAdjacentHTML("beforeend",
  '<link rel="preload" as="font" crossorigin fetchpriority="low" href="%sliterata.woff2">')</script>
<link rel="apple-touch-icon" href="%stouch-icon.png">
"""
# Scripts of which a page needs one only if it has this in its text.
FOR = {
    "clipboard.min.js": 'class="highlight"',
    "copybutton.js": 'class="highlight"',
    "occupancy-data.js": "occupancy-chart",
    "occupancy.js": "occupancy-chart",
    "figures.js": 'class="moving"',
    "searchtools.js": 'id="search-results"',
    "language_data.js": 'id="search-results"',
    "searchindex.js": 'id="search-results"',
}


def lighten_page(page: str, path: Path) -> str:
    """A page whose scripts wait for its text, and whose images have the size they will have.

    path: where it lies, from which its addresses are read.
    """
    head, end, body = page.partition("</head>")
    for script in re.findall(r"<script\b[^>]*>.*?</script>\n?", head, re.S):
        address = re.match(r'<script[^>]* src="(?:[^"]*/)?([^"/?]+)', script)
        kept = script
        if address and FOR.get(address[1], "") not in body:
            kept = ""
        elif address and " defer" not in script:
            kept = script.replace("<script", "<script defer", 1)
        elif "DOCUMENTATION_OPTIONS." in script:  # a module waits for the scripts before it
            kept = script.replace("<script", '<script type="module"', 1)
        head = head.replace(script, kept, 1)
    start, first, rest = re.split(r'(<meta name="viewport"[^>]*>\s*)', head, maxsplit=1)
    head = start + first + re.sub(r'<meta name="viewport"[^>]*>\s*', "", rest)
    head = re.sub(r'<link rel="preload" as="script"[^>]*>\s*', "", head)
    before, static, _, *rest = STYLE.split(head)
    head = f'{before}<link rel="stylesheet" href="{static}site.css">\n' + "".join(rest[::3])
    sized = re.sub(r"<img\b(?![^>]*\bwidth=)[^>]*>", lambda tag: sized_image(tag[0], path), body)
    return head.replace(first, first + PRELOAD % (static, static), 1) + end + sized


def sized_image(tag: str, path: Path) -> str:
    """An `img` with width and height, where it is a picture of the site that says its size."""
    source = re.search(r'src="([^":?]+)', tag)
    size = image_size(path.parent / source[1]) if source else None
    return (
        tag.replace("<img", f'<img loading="lazy" width="{size[0]}" height="{size[1]}"', 1)
        if size
        else tag
    )


def image_size(path: Path) -> tuple[int, int] | None:
    """Width and height in pixels of a PNG, or of an SVG by its viewBox; None of other files."""
    if not path.exists():
        return None
    if path.suffix == ".png":
        return struct.unpack(">II", path.read_bytes()[16:24])
    viewed = r'viewBox="[\d.-]+ [\d.-]+ ([\d.]+) ([\d.]+)"'
    box = re.search(viewed, path.read_text("utf-8", "replace"))
    return (round(float(box[1])), round(float(box[2]))) if box else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", lighten, priority=900)  # after all that writes pages
    return {"parallel_read_safe": True, "parallel_write_safe": True}
