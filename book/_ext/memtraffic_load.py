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


def leave_few_icons(folder: Path, pages: str) -> None:
    """Leaves of the theme's icons those that the pages use: 6 kB of 1.5 MB.

    Of an icon that exists in two styles, the filled one, which stands last.
    """
    script = folder / "_static" / "scripts" / "fontawesome.js"
    everything = script.read_text("utf-8")
    if ICONS in everything:  # of a build before, which nothing has changed
        return
    used = set(re.findall(r"[\s\"]fa-([a-z-]+)", pages))
    entry = r'[{,]"?([a-z-]+)"?:\[(\d+),(\d+),\[[^\]]*\],"\w+","([^"]+)"\]'
    icons = re.findall(entry, everything)
    found = {it: (int(width), int(height), path) for it, width, height, path in icons if it in used}
    terms = script.with_name(f"{script.name}.LICENSE.txt").read_text("utf-8")
    script.write_text(f"{terms}const icons = {json.dumps(found)};\n{ICONS}", "utf-8")


# A page has it, but no redirect; in a template of the theme stands a bracket before it.
STYLE = re.compile(r'<link\b[^>]*href="([^"?{]*_static/)([^"?]+\.css)[^>]*>\s*')


def lighten(app: Sphinx, exception: Exception | None) -> None:
    """Leaves of styles, scripts and icons what the pages use, and of style sheets one."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    pages = {it: it.read_text("utf-8") for it in folder.rglob("*.html")}
    pages = {it: page for it, page in pages.items() if STYLE.search(page)}
    text = "".join(pages.values())
    leave_few_icons(folder, text)
    # Of the live kernel's script what we wrote, without the Python in it.
    paths = {*folder.glob("_static/**/*.js"), Path(app.srcdir, "book", "_live", "live.js")}
    scripts = "".join(it.read_text("utf-8") for it in paths - {folder / "_static" / "live.js"})
    scripts += "".join(re.findall(r"<script\b.*?</script>", text, re.S))
    sheets = dict.fromkeys(folder / "_static" / name for _, name in STYLE.findall(text))
    style = purge("".join(map(whole_sheet, sheets)), called(text, scripts))
    (folder / "_static" / "site.css").write_text(drop_properties(style, text + scripts), "utf-8")
    for path, page in pages.items():
        path.write_text(lighten_page(page, path), "utf-8")
    for source in (*sheets, *folder.glob("_static/**/*.map")):
        source.unlink()


def called(pages: str, scripts: str) -> set[str]:
    """What elements are called, and what scripts may call them; no part of Bootstrap that is idle.

    >>> page, script = '<p class="a" data-bs-toggle="tab">b', 'NAME(){return"toast"} toast-x show'
    >>> sorted(called(page, script))
    ['NAME', 'a', 'return', 'show']
    """
    parts = set(re.findall(r'NAME\(\)\{return"([a-z]+)"', scripts))
    idle = tuple(parts - set(re.findall(r'data-bs-toggle="(\w+)"', pages)))
    may = {it for it in re.findall(r"[\w-]+", scripts) if not it.startswith(idle)}
    return may.union(*map(str.split, re.findall(r'\b(?:class|id)="([^"]*)"', pages)))


PROPERTY = re.compile(
    r"""(?<=[{;\s])(--[\w-]+):(?:"[^"]*"|'[^']*'|\((?:[^()]|\([^()]*\))*\)|[^;{}"'()])*(?:;|(?=\}))"""
)


def drop_properties(css: str, others: str) -> str:
    """A style sheet without the properties of its own that neither it nor others read.

    >>> drop_properties("a{--b:1px;--c:var(--b,(2));--d:;x:var(--d)}", "")
    'a{--d:;x:var(--d)}'
    """
    read = set(re.findall(r"var\(\s*(--[\w-]+)", css)) | set(re.findall(r"--[\w-]+", others))
    kept = PROPERTY.sub(lambda it: it[0] if it[1] in read else "", css)
    return kept if kept == css else drop_properties(kept, others)


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
        elif head.startswith("@"):
            kept.append("" if "Font Awesome" in body else f"{head}{{{body}}}")
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
FIRST = """\
<meta name="viewport" content="width=device-width, initial-scale=1">
<script>if (location.protocol !== "file:") document.head.insertAdjacentHTML("beforeend",
  '<link rel="preload" as="font" crossorigin fetchpriority="low" href="%sliterata.woff2">')</script>
<link rel="apple-touch-icon" href="%stouch-icon.png">
"""
# What a page has in its text if it needs the scripts whose names begin so.
FOR = {
    'class="highlight"': "clipboard|copybutton",
    "occupancy-chart": "occupancy",
    'class="moving"': "figures",
    'id="search-results"': "search|language_data",
}
SCRIPT = r"(?s)<script(?: [^>]*src=[^>]*>|>DOCUMENTATION_OPTIONS\.).*?</script>\s*"
MODULE = '<script type="module">'
# What a reader prefers, before the theme's script says so.
THEME = '(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")'


def lighten_page(page: str, path: Path) -> str:
    """A page that asks for its scripts last, and whose images have the size they will have.

    What is written into a page waits for its style sheet, which else would share the line with the
    scripts: their addresses are found long before. path: where the page lies, from which its
    addresses are read.
    """
    late = "".join(re.findall(SCRIPT, page))
    head, end, body = re.sub(SCRIPT, "", page).partition("</head>")
    for text, names in FOR.items():
        if text not in body:
            late = re.sub(rf'<script [^>]*["/]({names})[^>]*></script>\s*', "", late)
    # A module waits for the scripts before it.
    late = late.replace("<script src", "<script defer src").replace("<script>", MODULE)
    late = json.dumps(late).replace("</", r"<\/")
    body = body.replace("</body>", f"<script>document.write({late})</script>\n</body>")
    head = head.replace('"theme") || "auto"', f'"theme") || {THEME}')
    head = re.sub(r'<(meta name="viewport"|link rel="preload" as="script")[^>]*>\s*', "", head)
    before, static, _, *rest = STYLE.split(head)
    head = f'{before}<link rel="stylesheet" href="{static}site.css">\n' + "".join(rest[::3])
    sized = re.sub(r"<img\b(?![^>]*\bwidth=)[^>]*>", lambda tag: sized_image(tag[0], path), body)
    return head.replace("<title>", FIRST % (static, static) + "<title>", 1) + end + sized


def sized_image(tag: str, path: Path) -> str:
    """An `img` with width and height, where it is a picture of the site that says its size."""
    source = re.search(r'src="([^":?]+)', tag)
    size = image_size(path.parent / source[1]) if source else None
    sized = size and f'<img loading="lazy" width="{size[0]}" height="{size[1]}"'
    return tag.replace("<img", sized, 1) if sized else tag


def image_size(path: Path) -> tuple[int, int] | None:
    """Width and height in pixels of a PNG, or of an SVG by its viewBox; None of other files."""
    if not path.exists():
        return None
    if path.suffix == ".png":
        return struct.unpack(">II", path.read_bytes()[16:24])
    box = re.search(r'viewBox="\S+ \S+ ([\d.]+) ([\d.]+)"', path.read_text("utf-8", "replace"))
    return (round(float(box[1])), round(float(box[2]))) if box else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", lighten, priority=900)  # after all that writes pages
    return {"parallel_read_safe": True, "parallel_write_safe": True}
