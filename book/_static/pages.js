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
function distance(guess, answer) {
  const ratio = guess / answer;
  if (Math.abs(guess - answer) <= 0.01 * Math.abs(answer)) return "Right.";
  if (!(ratio > 0 && ratio < Infinity)) return `Off by ${Number(Math.abs(guess - answer).toPrecision(2))}.`;
  const side = ratio > 1 ? "too high" : "too low", times = Math.max(ratio, 1 / ratio);
  if (times >= 2) return `${Number(times.toPrecision(2))} times ${side}.`;
  return `${Math.round(100 * Math.abs(ratio - 1)) || 1} % ${side}.`;
}
function askFirst(fold) {
  const [, number, unit] = digits(fold.querySelector("strong")?.textContent ?? "").match(
    /(-?\d+(?:\.\d+)?)\s*(.{0,12}?)\s*$/) ?? [];
  if (number === undefined) return;
  const form = document.createElement("form");
  form.className = "guess";
  form.innerHTML = `<label>Your guess <input type="number" step="any" required></label>
    <span></span><button>Check</button><output></output>`;
  form.querySelector("span").textContent = unit;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const guess = form.querySelector("input").valueAsNumber;
    form.querySelector("output").textContent = distance(guess, Number(number));
    fold.open = true;
  });
  fold.before(form);
}
addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("details.guess").forEach(askFirst);
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
