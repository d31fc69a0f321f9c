// Definitions of terms show when a link to the glossary is hovered or has the focus. A finger can do
// neither: its first tap shows the definition, the second follows the link. Escape hides it.
let shown = null;
addEventListener("click", (event) => {
  const term = event.target.closest("a.term");
  if (term && term !== shown && event.pointerType === "touch") {
    event.preventDefault();
    term.focus();
  }
  shown = term;
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.activeElement.closest("a.term")?.blur();
});

// Paper is white: a dark page is printed with the colours of a light one.
const page = document.documentElement;
let theme = "";
addEventListener("beforeprint", () => ([theme, page.dataset.theme] = [page.dataset.theme, "light"]));
addEventListener("afterprint", () => (page.dataset.theme = theme));

// A question that asks for a guess takes it: Enter opens the answer, whose first bold text holds the
// number, and says how far off the guess was.
const digits = (text) => text.replace(/(\d)[,\u202f](?=\d{3})/g, "$1");
function distance(guess, answer, unit) {
  const off = Math.abs(guess - answer), ratio = guess / answer, side = guess > answer ? "too high" : "too low";
  if (off <= 0.01 * Math.abs(answer)) return "Right.";
  if (/^(%|percent)/.test(unit)) return `${Math.round(off) || 1} points ${side}.`;
  if (!(ratio > 0 && ratio < Infinity) || (!unit && answer < 100)) return `Off by ${Number(off.toPrecision(2))}.`;
  const times = Math.max(ratio, 1 / ratio);
  if (times >= 2) return `${Number(times.toPrecision(2))} times ${side}.`;
  return `${Math.round(100 * Math.abs(ratio - 1)) || 1} % ${side}.`;
}
function askFirst(fold) {
  const [, number, unit] = digits(fold.querySelector("strong")?.textContent ?? "").match(
    /(-?\d+(?:\.\d+)?)\s*(.{0,12}?)\s*$/) ?? [];
  if (number === undefined) return;
  const form = document.createElement("form");
  form.className = "guess";
  form.innerHTML = `<label>Your guess <input inputmode="decimal" required></label>
    <span></span><button>Check</button><output></output>`;
  form.querySelector("span").textContent = unit;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = digits(form.querySelector("input").value).replace(",", ".");
    const guess = Number(typed.replace(/\s*[^\d.]*$/, "") || NaN);
    form.querySelector("output").textContent = guess === guess ? distance(guess, Number(number), unit) : "A number, please.";
    fold.open = guess === guess;
  });
  fold.before(form);
}
addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("details.guess").forEach(askFirst);
  // What pip installs is named as this page was reached.
  document.querySelectorAll("p.install a").forEach((link) => {
    link.textContent = link.protocol === "file:" ? decodeURI(link.pathname) : link.href;
  });
});

// What is looked up is folded in the sidebar, where no page of it is open.
addEventListener("DOMContentLoaded", () => {
  const caption = [...document.querySelectorAll(".bd-links p.caption")].pop(), list = caption?.nextElementSibling;
  if (!list) return;
  const fold = Object.assign(document.createElement("details"), { open: Boolean(list.querySelector(".current")) });
  caption.before(fold);
  fold.append(document.createElement("summary"), list);
  fold.firstChild.append(caption);
});

// Code that can be edited and run in the page. What runs it is loaded when a reader first asks for it.
const beside = document.currentScript.src;
let live = null;
addEventListener("DOMContentLoaded", () => document.querySelectorAll("div.live").forEach((box) => {
  box.innerHTML = "<button>▶ Edit and run</button> <small></small>";
  const [button, said] = box.children, { hint } = JSON.parse(box.dataset.live);
  said.textContent = hint || "Here in the page: change a line, and see which bytes it moves.";
  button.addEventListener("click", () => {
    said.textContent = "Python is on its way …";
    live ??= new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = new URL("live.js", beside);
      script.addEventListener("load", done);
      script.addEventListener("error", failed);
      document.head.append(script);
    });
    live.then(() => openLive(box), () => {
      said.textContent = "It could not be loaded. Try again.";
      live = null;
    });
  });
}));

// A table that can be filtered has a field at each column of few values.
addEventListener("DOMContentLoaded", () => document.querySelectorAll("table.filtered").forEach((table) => {
  const [head, ...rows] = table.rows, fields = [];
  const filter = () => rows.forEach((row) => {
    row.hidden = fields.some(([select, i]) => select.value && row.cells[i].textContent !== select.value);
  });
  [...head.cells].forEach((cell, i) => {
    const values = new Set(rows.map((row) => row.cells[i].textContent));
    if (values.size > 12) return;
    const select = document.createElement("select");
    select.ariaLabel = cell.textContent;
    select.append(new Option("all", ""), ...[...values].map((value) => new Option(value)));
    select.addEventListener("change", filter);
    fields.push([select, i]);
    cell.append(document.createElement("br"), select);
  });
}));
