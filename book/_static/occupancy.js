// How many programs fit: the rules of memtraffic.residency, for the chart on the page. No server, no libraries.
(() => {
  "use strict";
  const up = (value, unit) => Math.ceil(value / unit) * unit;
  const whole = Math.floor;

  function nvidia(gpu, kernel) {
    const threads = kernel.warps * gpu.warp_size;
    const perWarp = up(kernel.registers * gpu.warp_size, gpu.register_granularity);
    const warps = whole(gpu.registers_per_sm / gpu.subpartitions / Math.max(1, perWarp)) * gpu.subpartitions;
    const reserved = gpu.shared_per_sm - gpu.shared_per_program;
    const shared = up(kernel.shared + reserved, gpu.shared_granularity);
    return {
      registers: kernel.registers > gpu.max_registers_per_thread ? 0 : whole(warps / kernel.warps),
      shared: kernel.shared > gpu.shared_per_program ? 0 : whole(gpu.shared_per_sm / Math.max(1, shared)),
      warps: threads > gpu.max_threads_per_program ? 0 : whole(gpu.max_threads_per_sm / threads),
      blocks: gpu.max_blocks_per_sm,
    };
  }

  function amd(gpu, kernel) {
    const programs = (waves) => whole((waves * gpu.simds) / kernel.warps);
    const registers = Math.max(gpu.vgpr_granule, up(kernel.registers, gpu.vgpr_granule));
    const found = {
      vgprs: kernel.registers > gpu.max_addressable_vgprs ? 0 : programs(whole(gpu.vgprs / registers)),
      waves: kernel.warps * gpu.warp_size > gpu.max_threads_per_program ? 0 : programs(gpu.max_waves_per_simd),
    };
    const shared = up(kernel.shared, gpu.shared_granularity);
    if (kernel.shared) found.lds = kernel.shared > gpu.shared_per_program ? 0 : whole(gpu.shared_per_sm / shared);
    if (kernel.warps > 1) found.groups = gpu.max_workgroups;
    return found;
  }

  const gpus = window.occupancyData, rules = { nvidia, amd };
  const limits = (kernel) => rules[gpus[kernel.target].vendor](gpus[kernel.target], kernel);

  function answer(kernel) {
    const found = limits(kernel);
    const resident = Math.min(...Object.values(found));
    const binding = Object.keys(found).filter((name) => found[name] === resident);
    return { limits: found, resident, binding };
  }

  // The inputs of each kind of GPU: least, most, step of the slider.
  function ranges(target) {
    const gpu = gpus[target], most = gpu.max_registers_per_thread ?? gpu.max_addressable_vgprs;
    return { registers: [1, most, 1], shared: [0, 262144, 16], warps: [1, gpu.max_threads_per_program / gpu.warp_size, 1] };
  }

  const labels = {
    nvidia: { registers: "registers per thread", shared: "shared memory per program, bytes", warps: "warps per program" },
    amd: { registers: "vector registers per lane", shared: "LDS per program, bytes", warps: "waves per program" },
  };
  const names = {
    registers: "registers", shared: "shared memory", warps: "warp slots", blocks: "places for programs",
    vgprs: "vector registers", waves: "wave slots", lds: "LDS", groups: "places for workgroups",
  };

  function build(box, number) {
    const form = document.createElement("form");
    const inputs = {}, sliders = {}, texts = {};
    const add = (name, input) => {
      const label = document.createElement("label");
      input.id = `occupancy-${number}-${name}`;
      label.htmlFor = input.id;
      form.append(label, input);
      inputs[name] = input;
      texts[name] = label;
    };
    const select = document.createElement("select");
    for (const gpu of Object.values(gpus)) select.add(new Option(`${gpu.target} (${gpu.product})`, gpu.target));
    add("target", select);
    texts.target.textContent = "GPU";
    select.value = box.dataset.target;
    for (const name of ["registers", "shared", "warps"]) {
      const input = document.createElement("input"), slider = document.createElement("input");
      Object.assign(input, { type: "number", step: "any", inputMode: "numeric" });
      slider.type = "range";
      add(name, input);
      form.append(slider);
      sliders[name] = slider;
      slider.addEventListener("input", () => { input.value = slider.value; show(); });
    }
    const output = document.createElement("output"), detail = document.createElement("p");
    output.setAttribute("aria-live", "polite");
    output.id = `occupancy-${number}-answer`;
    const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    chart.setAttribute("role", "img");
    box.replaceChildren(form, output, detail, chart);

    // The words and ends of the inputs are those of the GPU.
    function fit() {
      const own = ranges(select.value), words = labels[gpus[select.value].vendor];
      for (const [name, [min, max, step]] of Object.entries(own)) {
        Object.assign(inputs[name], { min, max });
        Object.assign(sliders[name], { min, max, step });
        texts[name].textContent = words[name];
        sliders[name].setAttribute("aria-label", words[name]);
        if (inputs[name].value !== "") sliders[name].value = inputs[name].value; // "" where it is no number
      }
      return [own, words];
    }

    function show() {
      const [own, words] = fit();
      const kernel = { target: select.value };
      let wrong = "";
      for (const [name, [min, max]] of Object.entries(own)) {
        const { value } = inputs[name], number = Number(value);
        const right = value !== "" && Number.isInteger(number) && number >= min && number <= max;
        kernel[name] = number;
        inputs[name].setAttribute("aria-invalid", !right);
        if (!right) wrong ||= `${words[name]}: from ${min} to ${max}`;
      }
      output.classList.toggle("wrong", Boolean(wrong));
      chart.classList.toggle("past", Boolean(wrong)); // of the last answer: nothing jumps
      if (wrong) {
        output.textContent = wrong;
        detail.textContent = "\u00a0";
        return;
      }
      const { limits: found, resident, binding } = answer(kernel);
      const count = resident === 0 ? "None fits" : resident === 1 ? "1 program fits" : `${resident} programs fit`;
      output.textContent = `${count}. Limit: ${binding.map((name) => names[name]).join(", ")}.`;
      detail.textContent = Object.entries(found).map(([name, value]) => `${names[name]} ${value}`).join(", ");
      draw(chart, kernel, resident, own.registers[1], words.registers);
    }
    for (const name of ["registers", "shared", "warps"]) {
      inputs[name].value = box.dataset[name];
      inputs[name].setAttribute("aria-describedby", output.id);
    }
    // What the last GPU allowed may be more than this one does.
    select.addEventListener("input", () => {
      for (const [name, [min, max]] of Object.entries(ranges(select.value))) {
        const { value } = inputs[name];
        if (value !== "") inputs[name].value = Math.min(max, Math.max(min, Number(value)));
      }
    });
    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    window.addEventListener("resize", show);
    show();
  }

  function draw(chart, kernel, resident, most, word) {
    const [width, height, left, bottom, top] = [Math.max(260, chart.clientWidth || 600), 230, 34, 40, 20];
    const steps = [];
    for (let registers = 1; registers <= most; registers++) steps.push(answer({ ...kernel, registers }).resident);
    const highest = Math.max(1, ...steps);
    const x = (registers) => left + ((width - left - 10) * registers) / most;
    const y = (value) => height - bottom - ((height - bottom - top) * value) / highest;
    const path = steps.map((value, i) => `${i ? "H" + x(i + 0.5) + "V" : "M" + x(0.5) + ","}${y(value)}`).join("") + `H${x(most)}`;
    const text = (at, from, anchor, words) => `<text x="${at}" y="${from}" text-anchor="${anchor}">${words}</text>`;
    const ticks = [0, whole(highest / 2), highest].filter((value, i, all) => all.indexOf(value) === i);
    const marks = [64, 128, 192, 256, 384, 512].filter((value) => value <= most + 1);
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.setAttribute("aria-label", `Programs that fit, by ${word}: ${resident} at ${kernel.registers}.`);
    chart.innerHTML =
      `<path class="axis" d="M${left},${top}V${y(0)}H${width - 10}"/><path class="steps" d="${path}"/>` +
      `<circle cx="${x(kernel.registers)}" cy="${y(resident)}" r="5"/>` +
      ticks.map((value) => text(left - 6, y(value) + 4, "end", value)).join("") +
      marks.map((value) => text(Math.min(x(value), width - 12), y(0) + 16, "middle", value)).join("") +
      text(left + 5, 11, "start", "programs") + text((left + width) / 2, height - 5, "middle", word);
  }

  window.memtrafficOccupancy = { answer };
  const start = () => document.querySelectorAll(".occupancy-chart").forEach(build);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
