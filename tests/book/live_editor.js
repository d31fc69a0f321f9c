// What tests do in a page, with one editor or with a `worker` alone.
const box = document.querySelector(".live"), find = (it) => box.querySelector(it);
const text = (it) => it.textContent.replaceAll("\u00a0", " ");
const all = (selector) => [...box.querySelectorAll(selector)].map(text);
const said = () => all("[role=status] > *");
const until = async (holds) => {
  for (const start = performance.now(); performance.now() - start < 20000;) {
    if (holds()) return;
    await new Promise((done) => setTimeout(done, 20));
  }
  throw Error(`nothing came: ${box.textContent}`);
};
const button = (name) => [...box.querySelectorAll("button")].find((it) => text(it).includes(name));
const idle = () => button("Stop")?.disabled && said().length;
const open = async () => { button("Edit").click(); await until(idle); };
const run = async (code) => {
  find("textarea").value = code;
  find("textarea").dispatchEvent(new Event("input"));
  button("Run").click();
  await until(idle);
  return said();
};

// Whether the run goes on, what is said after Stop, and where the focus is then; then Run,
// Reset while it goes on, and Copy.
const stopResetCopy = async () => {
  find("textarea").value = "def f(x):\n    while True: pass";
  button("Run").click();
  await new Promise((done) => setTimeout(done, 100));
  const found = [!button("Stop").disabled];
  button("Stop").click();
  found.push(said(), document.activeElement.textContent, button("Stop").disabled);
  button("Run").click();
  button("Reset").click();
  await until(idle);
  button("Copy").click();
  return [...found, said().at(-1), find("textarea").value, text(button("Cop"))];
};

// For each place of the slider: what is said, which line is marked, how many elements are, and what
// was moved of the first tensor.
const steps = () => {
  const slider = find("input"), found = [];
  for (slider.value = 0; ; slider.stepUp()) {
    slider.dispatchEvent(new Event("input"));
    const lines = [...box.querySelectorAll(".live-line")].map((it) => it.matches(".now"));
    found.push([text(find("output")), lines.indexOf(true) + 1, all(".touched").length, text(find("figcaption"))]);
    if (slider.value === slider.max) return found;
  }
};

// The size of the letters; whether the result is in view, and the page no wider than its window.
const onPhone = () => {
  const { top, bottom } = find("[role=status]").getBoundingClientRect();
  return [parseFloat(getComputedStyle(find("textarea")).fontSize), top >= 0 && bottom <= innerHeight,
    document.documentElement.scrollWidth <= innerWidth];
};

// The answers of the worker, one to each pair of a text and its options.
const answers = (asked) => new Promise((done) => {
  const found = [];
  worker.onmessage = ({ data }) => {
    const message = JSON.parse(data);
    if (message && message.stage !== "ready" && found.push(message) === asked.length) done(found);
  };
  for (const [text, options] of asked) worker.postMessage([text, JSON.stringify(options)]);
});
