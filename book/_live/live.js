// The editor of a live kernel, and what its runs say. live_page.py puts WORKER, the parts of the text
// that a worker runs, and STYLE before this text; `pages.js` calls `openLive`.

// ---- the engine: a worker, which runs one text at a time

const SECONDS = 10;
let worker = null, current = null; // current: what is told of the stages, and the timer of the run

function start() {
  worker = new Worker(URL.createObjectURL(new Blob(WORKER, { type: "text/javascript" })));
  worker.onmessage = ({ data }) => {
    const message = JSON.parse(data);
    if (message?.stage === "ready") {
      worker.ready = true;
      if (current) limit();
    } else if (current) {
      current.said = true;
      current.say(message);
      if (!message) finish();
    }
  };
  worker.onerror = (event) => {
    event.preventDefault();
    stop(`This browser does not run Python in a page: ${event.message}`);
  };
}
function limit() {
  const run = current;
  const why = () => `Stopped after ${SECONDS} seconds: ${run.said ? "what stands above holds, and the rest was not finished."
    : "nothing is counted yet. Does a loop run without end?"}`;
  run.timer = setTimeout(() => run === current && stop(why()), 1000 * SECONDS);
}
function finish() {
  clearTimeout(current.timer);
  current = null;
}
// Ends the worker, and with it a run, to which it says why.
function stop(why) {
  worker?.terminate();
  worker = null;
  const run = current;
  if (run) finish();
  run?.say({ stage: "stopped", message: why });
}
function run(text, options, say) {
  if (current) stop("");
  if (!worker) start();
  current = { say };
  if (worker.ready) limit();
  worker.postMessage([text, JSON.stringify(options)]);
}

// ---- the text

const TOKENS = [
  ["c1", "#.*"],
  ["s2", `"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?`],
  ["nd", "^ *@[\\w.]+"],
  ["mi", "\\b\\d[\\w.]*"],
  ["kc", "\\b(?:None|True|False)\\b"],
  ["k", `\\b(?:${"and as assert break continue def elif else for from if import in is lambda not or pass return while"
    .replaceAll(" ", "|")})\\b`],
];
const TOKEN = new RegExp(TOKENS.map(([, pattern]) => `(${pattern})`).join("|"), "gm");
const plain = (text) => text.replace(/[&<>"]/g, (it) => `&#${it.charCodeAt()};`);

// The lines of a text as HTML in colours.
function coloured(text) {
  let html = "", end = 0;
  for (const match of text.matchAll(TOKEN)) {
    const name = TOKENS[match.slice(1).findIndex((it) => it !== undefined)][0];
    html += plain(text.slice(end, match.index));
    html += match[0].split("\n").map((it) => `<span class="${name}">${plain(it)}</span>`).join("\n");
    end = match.index + match[0].length;
  }
  return (html + plain(text.slice(end))).split("\n");
}

// Puts a text in place of the selection, so that it can be undone.
function insert(area, text) {
  if (!document.execCommand("insertText", false, text)) area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
}
// Indents the selected lines, or the other way; without a selection it adds spaces.
function indent(area, back) {
  const { value, selectionStart: from, selectionEnd: to } = area;
  if (!back && !value.slice(from, to).includes("\n")) return insert(area, "    ");
  const first = value.lastIndexOf("\n", from - 1) + 1, end = value.indexOf("\n", Math.max(first, to - 1));
  const last = end < 0 ? value.length : end;
  const lines = value.slice(first, last).replace(back ? /^ {1,4}/gm : /^(?=.)/gm, back ? "" : "    ");
  area.setSelectionRange(first, last);
  if (lines) insert(area, lines); // an empty text would not be inserted
  area.setSelectionRange(first, first + lines.length);
}

// ---- what a run says

const words = (shape) => shape.join("\u00a0×\u00a0") || "one number";
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const list = (shapes) => shapes.map(words).join(", ");
// How often elements were read, or written, as "24 of 32 elements not read, the others once".
const often = (what, times) => {
  const seen = times.filter(Boolean), [least, most] = [Math.min(...seen), Math.max(...seen)];
  const said = (least === most ? "" : `${least} to `) + (most === 1 ? "once" : `${most} times`);
  return seen.length < times.length ? `${times.length - seen.length} of ${times.length} elements not ${what}, the others ${said}` : `${what} ${said}`;
};
const SIZE = 16, DRAWN = 256; // of an element's square; the most elements that are drawn

// A tensor, its elements shaded by how often they were read and written. now: what a step touches.
function drawn(tensor, reads, writes, now) {
  const { name, shape } = tensor, columns = shape.at(-1) ?? 1;
  const moved = [["read", reads], ["written", writes]].filter(([, times]) => Math.max(...times));
  const said = moved.map((it) => often(...it)).join("; ") || "not touched yet";
  let squares = "";
  for (let i = 0; i < reads.length && reads.length <= DRAWN; i++) {
    const x = 1 + SIZE * (i % columns), y = 1 + SIZE * Math.floor(i / columns);
    for (const [kind, times, top] of [["read", reads, 0], ["written", writes, SIZE / 2]])
      if (times[i]) squares += `<rect class="${kind}" x="${x}" y="${y + top}" width="${SIZE}" height="${SIZE / 2}"
        fill-opacity="${Math.min(1, 0.15 + 0.25 * times[i])}"/>`;
    squares += `<rect x="${x}" y="${y}" width="${SIZE}" height="${SIZE}"/>`;
  }
  for (const i of now) squares += `<rect class="touched" x="${1 + SIZE * (i % columns)}"
    y="${1 + SIZE * Math.floor(i / columns)}" width="${SIZE}" height="${SIZE}"/>`;
  const [width, height] = [2 + SIZE * columns, 2 + SIZE * reads.length / columns];
  const picture = squares && `<svg role="img" aria-label="${plain(`${name}: ${said}`)}"
    width="${width}" height="${height}" viewBox="0 0 ${width} ${height}">${squares}</svg>`;
  return `<figure>${picture}<figcaption><code>${plain(name)}</code> ${words(shape)}<br>${said}</figcaption></figure>`;
}

// What the steps so far have moved of each tensor.
function moved(tensors, steps) {
  const times = tensors.map(({ reads }) => ({ read: reads.map(() => 0), written: reads.map(() => 0) }));
  for (const { tensor, kind, offsets } of steps) for (const at of offsets) times[tensor][kind][at] += 1;
  return times;
}

// What each line moves, to stand after it.
function notes(steps) {
  const found = {};
  for (const { line, kind, offsets } of steps) {
    found[line] ??= { read: 0, written: 0 };
    found[line][kind] += offsets.length;
  }
  const said = ({ read, written }) => [read && `reads ${read}`, written && `writes ${written}`].filter(Boolean).join(", ");
  return Object.fromEntries(Object.entries(found).map(([line, it]) => [line, said(it)]));
}

function saidOf({ program, line, kind, argument, offsets }, { name }) {
  const who = program ? `program ${program[1] || program[2] ? `(${program.join(", ")})` : program[0]}, ` : "";
  const verb = kind === "read" ? "reads" : "writes", [first, last] = [offsets[0], offsets.at(-1)];
  const inRow = offsets.length > 1 && offsets.every((it, i) => it === first + i);
  const which = inRow ? `elements ${first} to ${last}` : offsets.length === 1 ? `element ${first}` : `${offsets.length} elements`;
  return `${who}line ${line} ${verb} ${which} of ${argument}${argument === name ? "" : `, which is ${name}`}`;
}

// ---- the editor

const LAYOUT = `
<div class="live-code highlight">
  <pre class="live-numbers" aria-hidden="true"></pre>
  <div class="live-text"><pre aria-hidden="true"></pre>
    <textarea aria-label="Code" spellcheck="false" autocapitalize="off" autocorrect="off" autocomplete="off" wrap="off"></textarea></div>
</div>
<p class="live-buttons"><button>Run</button><button disabled>Stop</button><button>Reset</button><button>Copy</button>
  <small>Ctrl+Enter or ⌘+Enter runs. Esc, then Tab, leaves the text.</small></p>
<div class="live-result">
  <div role="status"></div>
  <div class="live-tensors"></div>
  <div class="live-steps" hidden><label>Step <input type="range" min="0"></label><p><output></output></p>
    <small>Upper half of a square: read. Lower half: written. Darker: more often.</small></div>
</div>`;

function openLive(box) {
  const { code, options, hint } = JSON.parse(box.dataset.live);
  box.innerHTML = LAYOUT;
  const find = (selector) => box.querySelector(selector);
  const [runs, stops, resets, copies] = box.querySelectorAll("button");
  const [area, result, status, slider] = ["textarea", ".live-result", "[role=status]", "input"].map(find);
  if (hint) box.insertAdjacentHTML("afterbegin", `<p class="live-hint">${plain(hint)}</p>`);
  let counts = null, marks = {}, after = {}; // of lines: their class, what stands after them

  function paint() {
    const lines = coloured(area.value);
    find(".live-numbers").textContent = lines.map((_, i) => i + 1).join("\n");
    find(".live-text pre").innerHTML = lines.map((line, i) => `<span class="live-line ${marks[i + 1] ?? ""}">${line}${
      after[i + 1] ? `<span class="live-note">  ← ${after[i + 1]}</span>` : ""}\n</span>`).join("");
  }
  function draw(number) { // the first steps, or all of them
    const { steps, tensors } = counts, step = number === null ? null : steps[number - 1];
    const seen = moved(tensors, number === null ? steps : steps.slice(0, number));
    const all = moved(tensors, steps).map(({ read, written }) => Math.max(...read, ...written) > 0);
    find(".live-tensors").innerHTML = tensors.map((it, i) => all[i]
      ? drawn(it, seen[i].read, seen[i].written, step?.tensor === i ? step.offsets : []) : "").join("");
    marks = step ? { [step.line]: "now" } : {};
    find("output").textContent = number === null ? "Move it to see who touches what, step by step."
      : step ? `Step ${number} of ${steps.length}: ${saidOf(step, tensors[step.tensor])}.` : "Nothing has moved yet.";
    paint();
  }
  const say = (name, text, small) => {
    status.insertAdjacentHTML(name === "live-formula" ? "afterbegin" : "beforeend", `<p class="${name}">${plain(text)}${small ? ` <small>${plain(small)}</small>` : ""}</p>`);
    status.scrollIntoView({ block: "nearest" });
  };
  const hear = {
    counts(message) {
      counts = message;
      after = notes(message.steps);
      const lines = Object.entries(after).map(([line, moves]) => `line ${line} ${moves}`).join("; ");
      say("live-counts", `At ${words(message.shape)} it ${message.text}.`, lines && `${capital(lines)}.`);
      find(".live-steps").hidden = !message.steps.length;
      slider.max = slider.value = message.steps.length;
      draw(null);
    },
    formula({ text, solved, checked, note, reads }) {
      const how = reads && `Solved at ${list(solved)}; checked at ${list(checked)}.`;
      say("live-formula", capital(text), how + (note && ` Not at any width: ${note}.`));
    },
    verdict({ right, text }) {
      say(right ? "good" : "bad", `${right ? "✓" : "✗"} ${text}`);
    },
    error({ line, message }) {
      marks = { [line]: "bad" };
      say("bad", line ? `Line ${line}: ${message}` : capital(message));
      paint();
    },
    stopped({ message }) {
      if (message) say("bad", message);
    },
  };
  function begin() {
    status.textContent = "";
    find(".live-tensors").textContent = "";
    find(".live-steps").hidden = true;
    result.classList.remove("old");
    [counts, marks, after] = [null, {}, {}];
    paint();
    stops.disabled = false;
    run(area.value, options, (message) => {
      stops.disabled = !message || message.stage === "stopped";
      if (message) hear[message.stage](message);
    });
  }
  function change(text) {
    area.focus({ preventScroll: true });
    area.select();
    insert(area, text);
    area.setSelectionRange(0, 0);
  }
  let leaves = false; // the next Tab
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) begin();
    else if (event.key === "Tab" && !leaves) indent(area, event.shiftKey);
    else if (event.key === "Enter" && !event.isComposing) {
      const [line] = area.value.slice(0, area.selectionStart).split("\n").slice(-1);
      insert(area, `\n${line.match(/^ */)[0]}${/:\s*$/.test(line) ? "    " : ""}`);
    } else {
      leaves = event.key === "Escape" || (leaves && event.key === "Shift");
      return;
    }
    event.preventDefault();
  });
  area.addEventListener("blur", () => (leaves = false));
  area.addEventListener("input", () => {
    [marks, after] = [{}, {}];
    result.classList.add("old");
    paint();
  });
  runs.addEventListener("click", begin);
  stops.addEventListener("click", () => { runs.focus(); stop("Stopped."); });
  resets.addEventListener("click", () => { change(code); resets.focus(); begin(); });
  copies.addEventListener("click", () => {
    area.select();
    document.execCommand("copy");
    copies.focus();
    copies.textContent = "Copied";
  });
  slider.addEventListener("input", () => draw(Number(slider.value)));
  area.value = code;
  begin();
  (matchMedia("(pointer: coarse)").matches ? runs : area).focus({ preventScroll: true });
  area.setSelectionRange(0, 0);
}

document.head.insertAdjacentHTML("beforeend", `<style>${STYLE}</style>`);
globalThis.openLive = openLive;
