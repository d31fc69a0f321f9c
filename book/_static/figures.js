// The figures that move. Each is an SVG in the page, with its states inside.
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
  function frames(figure, svg, { names, frames: states, label, start }) {
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
      before.setAttribute("aria-disabled", number === 0), after.setAttribute("aria-disabled", number === last);
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
    show(start);
  }

  // An amount of memory, as memtraffic_book.units writes it.
  function formatBytes(n) {
    const [value, unit] = n >= 1e6 ? [n / 1e6, "MB"] : [n / 1e3, "kB"];
    const [whole, part] = value.toFixed(1).split(".");
    return `${whole.replace(/\B(?=(\d{3})+$)/g, ",")}.${part} ${unit}`;
  }

  // Where some operations are when they have moved so many bytes: each is [name, bytes read, bytes written].
  function place(ops, matrix, moved) {
    const trips = { load: 0, store: 0 };
    for (const [name, read, written] of ops) {
      for (const [kind, bytes] of [["load", read], ["store", written]]) {
        if (bytes > matrix / 2) trips[kind] += 1; // not what is hardly anything
        if (moved < bytes) return { name, kind, trips, share: moved / bytes };
        moved -= bytes;
      }
    }
    return { name: "done", kind: null, trips, share: 1 };
  }

  // Bytes that travel for several kernels and for one, at one rate.
  function trips(figure, svg, { ways, matrix }) {
    const [groups, texts] = ["group", "text"].map((key) => keyed(svg, key));
    const totals = ways.map((ops) => ops.reduce((sum, [, read, written]) => sum + read + written, 0));
    const longest = Math.max(...totals), seconds = 14, last = 1000;
    const slider = make("input", { type: "range", min: 0, max: last, label: "bytes moved so far" });
    const play = button("Play"), output = make("output", {});
    let request = 0, began = 0;

    // share: of the way of the longest, from 0 to 1.
    function show(share) {
      const words = {};
      ways.forEach((ops, i) => {
        const moved = Math.min(totals[i], Math.round(share * longest));
        const at = place(ops, matrix, moved);
        Object.assign(words, { [`${i} name`]: at.name, [`${i} moved`]: formatBytes(moved) });
        const held = at.kind === null ? 0 : Math.round(8 * (at.kind === "load" ? at.share : 1 - at.share));
        [...groups[`${i} held`].children].forEach((cell, j) => cell.setAttribute("class", j < held ? `of${i}` : "none"));
        for (const kind of ["load", "store"]) {
          words[`${i} ${kind}s`] = `${at.trips[kind]}×`;
          const [from, to] = kind === "load" ? [132, 74] : [68, 126];
          [...groups[`${i} ${kind} dots`].children].forEach((dot, j) => {
            dot.setAttribute("class", kind === at.kind ? "" : "gone");
            dot.setAttribute("cy", from + (to - from) * ((share * 40 + j / 3) % 1));
          });
        }
      });
      changeTexts(texts, words);
      slider.value = Math.round(share * last);
      slider.setAttribute("aria-valuetext", `${words["0 moved"]} and ${words["1 moved"]}`);
      return `The five lines have moved ${words["0 moved"]}, the one kernel ${words["1 moved"]}.`;
    }

    function stop(share) {
      cancelAnimationFrame(request);
      request = 0;
      play.textContent = "Play";
      output.textContent = show(share);
    }

    function run(now) {
      const share = Math.min(1, Math.max(0, now - began) / 1000 / seconds); // a frame may have begun before
      if (share === 1) return stop(1);
      show(share);
      request = requestAnimationFrame(run);
    }

    function start() {
      const share = slider.value / last;
      began = performance.now() - (share === 1 ? 0 : share) * 1000 * seconds;
      play.textContent = "Pause";
      output.textContent = "";
      request = requestAnimationFrame(run);
    }

    play.addEventListener("click", () => (request ? stop(slider.value / last) : start()));
    slider.addEventListener("input", () => stop(slider.value / last));
    output.setAttribute("aria-live", "polite"); // it changes where the bytes stand still
    figure.append(make("div", { className: "controls" }, play, slider), output);
    stop(1);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
    const once = new IntersectionObserver((entries) => {
      if (!entries.some((it) => it.isIntersecting)) return;
      once.disconnect();
      if (!request && Number(slider.value) === last) start();
    }, { threshold: 0.6 });
    once.observe(svg);
  }

  const gcd = (a, b) => (b ? gcd(b, a % b) : a);

  // What the lanes of a warp load, as warp_loads and count_sectors of the package: bytes of each, and addresses.
  function warp(itemsize, bits, stride, first) {
    const wanted = stride === 1 ? Math.max(1, bits / 8 / itemsize) : 1;
    const vector = gcd(wanted, first), requests = [];
    for (let piece = 0; piece < wanted; piece += vector) {
      requests.push(Array.from({ length: 32 }, (_, lane) => (first + lane * stride * wanted + piece) * itemsize));
    }
    const touched = requests.map((places) => new Set(places.map((place) => Math.floor(place / 32))));
    return { size: vector * itemsize, requests, touched, sectors: touched.reduce((sum, them) => sum + them.size, 0) };
  }

  // 32 lanes over sectors of 32 bytes.
  function sectors(figure, svg, { dtypes, most, begin, unit, size: [wide, high], corner: [left, top] }) {
    const [groups, texts, places] = ["group", "text", "place"].map((key) => keyed(svg, key));
    const form = make("form", {}), output = make("output", {}), inputs = {};
    output.setAttribute("aria-live", "polite");
    const add = (name, text, input) => {
      const words = make("span", { textContent: text });
      form.append(make("label", {}, words, input));
      inputs[name] = input;
      return words;
    };
    add("dtype", "type", make("select", {}, ...Object.keys(dtypes).map((it) => new Option(it))));
    add("bits", "bits a lane wants", make("select", {}, ...[16, 32, 64, 128].map((it) => new Option(it))));
    const range = (min, max, value) => make("input", { type: "range", min, max, value });
    const words = {
      stride: add("stride", "", range(1, most.stride, begin.stride)),
      first: add("first", "", range(0, most.first, begin.first)),
    };
    [inputs.dtype.value, inputs.bits.value] = [begin.dtype, begin.bits];

    function show() {
      const itemsize = dtypes[inputs.dtype.value], stride = Number(inputs.stride.value), first = Number(inputs.first.value);
      for (const option of inputs.bits.options) option.disabled = Number(option.value) < 8 * itemsize;
      if (Number(inputs.bits.value) < 8 * itemsize || stride > 1) inputs.bits.value = 8 * itemsize;
      inputs.bits.disabled = stride > 1; // only neighbours can be loaded at once
      words.stride.textContent = stride === 1 ? "stride 1: neighbours" : `stride ${stride}`;
      words.first.textContent = `first element ${first}`;
      const { size, requests, touched, sectors: count } = warp(itemsize, Number(inputs.bits.value), stride, first);
      const all = new Set(touched.flatMap((them) => [...them]));
      [...groups.sectors.children].forEach((box, i) => box.setAttribute("class", all.has(i) ? "on" : "none"));
      const draw = (place) => `M${left + Math.floor((place % 128) / 32) * wide + (place % 32) * unit} `
        + `${top + Math.floor(place / 128) * high}h${size * unit - 0.4}v${high - 4}h${0.4 - size * unit}z`;
      for (let i = 0; i < 8; i++) places[`request ${i}`].setAttribute("d", (requests[i] ?? []).map(draw).join(""));
      const said = {
        requests: `${requests.length} ${requests.length === 1 ? "request" : "requests"} of ${8 * size} bits a lane`,
        sectors: `${Number((count / requests.length).toPrecision(6))} sectors per request`,
        wanted: `wanted ${requests.length * 32 * size} bytes`,
        moved: `moved ${32 * count} bytes`,
      };
      changeTexts(texts, said);
      output.textContent = `${said.requests}, ${said.sectors}: ${said.wanted}, ${said.moved}.`;
    }

    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    figure.append(form, output);
    show();
  }

  const kinds = { frames, trips, sectors };

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
