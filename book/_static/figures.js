// The figures that move. Each is an SVG in the page, with its data inside: memtraffic_book.figures.moving makes them.
(() => {
  "use strict";
  const PAUSE = 1100; // milliseconds between two states

  // A new element with these properties and children.
  function make(name, properties, ...children) {
    const { label, ...others } = properties;
    const element = Object.assign(document.createElement(name), others);
    if (label) element.setAttribute("aria-label", label);
    element.append(...children);
    return element;
  }

  const button = (text, label) => make("button", { type: "button", textContent: text, label });

  // The elements that have this key, such as data-text, by its value.
  function keyed(svg, key) {
    return Object.fromEntries([...svg.querySelectorAll(`[data-${key}]`)].map((it) => [it.dataset[key], it]));
  }

  function changeTexts(texts, words) {
    for (const [key, word] of Object.entries(words)) texts[key].textContent = word;
  }

  // States to step through: a slider, a button for the state before and after, and one that plays them.
  function frames(figure, svg, { names, frames: states, label }) {
    const [groups, texts, places] = ["group", "text", "place"].map((key) => keyed(svg, key));
    const last = states.length - 1;
    const slider = make("input", { type: "range", min: 0, max: last, label });
    const [play, before, after] = [button("Play"), button("‹", "one back"), button("›", "one on")];
    const output = make("output", {});
    let timer = 0;

    function show(number) {
      const state = states[number];
      for (const [key, classes] of Object.entries(state.classes)) {
        classes.forEach((of, i) => groups[key].children[i].setAttribute("class", names[of]));
      }
      changeTexts(texts, state.texts);
      for (const [key, attributes] of Object.entries(state.places)) {
        for (const [name, value] of Object.entries(attributes)) places[key].setAttribute(name, value);
      }
      slider.value = number;
      slider.setAttribute("aria-valuetext", state.say);
      output.textContent = state.say;
      [before.disabled, after.disabled] = [number === 0, number === last];
    }

    function stop() {
      clearInterval(timer);
      timer = 0;
      play.textContent = "Play";
      output.setAttribute("aria-live", "polite");
    }

    function step(by) {
      show(Math.min(last, Math.max(0, Number(slider.value) + by)));
      if (Number(slider.value) === last) stop();
    }

    play.addEventListener("click", () => {
      if (timer) return stop();
      if (Number(slider.value) === last) show(0);
      timer = setInterval(step, PAUSE, 1);
      play.textContent = "Pause";
      output.setAttribute("aria-live", "off"); // nobody wants to hear them all
    });
    for (const [input, by] of [[before, -1], [after, 1]]) {
      input.addEventListener("click", () => { stop(); step(by); });
    }
    slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
    figure.append(make("div", { className: "controls" }, play, before, slider, after), output);
    stop();
    show(last);
  }

  const kinds = { frames };

  function start() {
    for (const figure of document.querySelectorAll("figure.moving")) {
      const svg = figure.querySelector("svg");
      const data = JSON.parse(svg.querySelector("script").textContent);
      kinds[data.kind](figure, svg, data);
    }
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
