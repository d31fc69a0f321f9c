// The faults of a page as it is shown now, each as a line of text. PAPER: whether it is printed.
(() => {
  const found = [], page = document.documentElement;
  const say = (text, element) => found.push(`${text}: ${element.outerHTML.slice(0, 110)}`);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const style = (element) => getComputedStyle(element);
  const shown = (element) => element.checkVisibility({ visibilityProperty: true });
  const ancestors = function* (element) {
    for (let it = element.parentElement; it; it = it.parentElement) yield it;
  };

  // A page scrolls up and down alone; tables and code may scroll in their boxes, not on paper.
  if (page.scrollWidth > innerWidth) say("wider than its window", page);
  for (const element of all("article :is(th, td, pre, img, svg)")) {
    if (!shown(element)) continue;
    const right = element.getBoundingClientRect().right;
    for (const box of ancestors(element)) {
      const how = style(box).overflowX;
      if (how === "visible") continue;
      if ((how === "auto" || how === "scroll") && !PAPER) break;
      if (right > box.getBoundingClientRect().right + 2) { say("cut off", element); break; }
    }
  }

  for (const box of all("article .output:has(> table)")) {
    if (box.scrollWidth > 2 * box.clientWidth) say("far too wide", box);
  }

  // What a reader opens is open on paper.
  for (const fold of PAPER ? all("details:is(.claim, .guess)") : []) {
    const text = document.createRange();
    text.setStartAfter(fold.querySelector("summary"));
    text.setEndAfter(fold.lastChild);
    if (!text.getBoundingClientRect().height) say("closed on paper", fold);
  }

  // Text on its ground: at least 4.5 to 1, large text 3 to 1.
  const rgba = (color) => (color.match(/[\d.]+/g) ?? [0, 0, 0, 0]).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((it) => it / 255)
    .map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4))
    .reduce((sum, it, i) => sum + it * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (const box of [element, ...ancestors(element)]) {
      const [r, g, b, alpha = 1] = rgba(style(box).backgroundColor);
      if (alpha > 0.5) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const seen = new Set();
  for (const element of all("article :is(p, li, td, th, h1, h2, h3, a, span, summary, code, small)")) {
    const words = [...element.childNodes].some((it) => it.nodeType === 3 && it.data.trim());
    const look = style(element);
    if (!words || !shown(element) || element.closest("svg, [aria-hidden=true], .headerlink")) continue;
    const [a, b] = [light(rgba(look.color)), light(ground(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const size = parseFloat(look.fontSize), bold = look.fontWeight >= 600;
    const kind = `${look.color} ${ground(element)} ${element.className}`;
    if (contrast < (size >= 24 || (bold && size >= 18.6) ? 3 : 4.5) && !seen.has(kind)) {
      seen.add(kind);
      say(`faint, ${contrast.toFixed(1)} to 1`, element);
    }
  }

  // What a screen reader says.
  const name = (element) => element.ariaLabel || element.title || element.textContent.trim() ||
    element.getAttribute("aria-labelledby") || element.querySelector("[alt]:not([alt=''])");
  for (const it of all("a[href], button, summary")) if (shown(it) && !name(it)) say("no name", it);
  for (const it of all("input:not([type=hidden], [type=checkbox]), select"))
    if (shown(it) && !it.labels.length && !it.ariaLabel && !it.placeholder) say("no label", it);
  for (const it of all("img:not([alt])")) say("no alt", it);
  if (!page.lang) say("no language", page);
  const ids = new Set();
  for (const it of all("[id]")) ids.has(it.id) ? say("the same id", it) : ids.add(it.id);
  let level = 0;
  for (const it of all("article :is(h1, h2, h3, h4, h5, h6)").filter(shown)) {
    if (level && it.tagName[1] > level + 1) say("skips a level", it);
    level = Number(it.tagName[1]);
  }
  return found;
})()
