// How many programs fit: the rules of memtraffic.occupancy, for the chart on the page. No server, no libraries.
(() => {
  "use strict";
  const up = (value, unit) => Math.ceil(value / unit) * unit;
  const whole = Math.floor;

  function nvidia(data, kernel) {
    const sm = data.nvidia[kernel.target], rules = data.rules;
    const reserved = sm.shared_per_sm - sm.shared_per_block;
    const perWarp = up(kernel.registers * sm.warp_size, rules.registerUnit);
    const checked = perWarp * up(kernel.warps, rules.partitions);
    const warps = whole(sm.registers_per_sm / rules.partitions / Math.max(1, perWarp)) * rules.partitions;
    const shared = up(kernel.shared + reserved, rules.sharedUnits[kernel.target]);
    const tooMany = checked > rules.registersPerBlock || kernel.registers > rules.registersPerThread;
    return {
      registers: tooMany ? 0 : whole(warps / kernel.warps),
      shared: kernel.shared > sm.shared_per_block ? 0 : whole(sm.shared_per_sm / Math.max(1, shared)),
      warps: kernel.warps * sm.warp_size > rules.threadsPerBlock ? 0 : whole(sm.threads_per_sm / sm.warp_size / kernel.warps),
      blocks: sm.blocks_per_sm,
    };
  }

  function amd(data, kernel) {
    const cu = data.amd[kernel.target];
    const groups = (waves) => whole((waves * cu.simds) / kernel.warps);
    const found = {
      vgprs: groups(whole(cu.vgprs / Math.max(cu.vgpr_unit, up(kernel.registers, cu.vgpr_unit)))),
      waves: groups(cu.waves_per_simd),
    };
    if (kernel.shared) found.lds = kernel.shared > cu.lds_per_group ? 0 : whole(cu.lds / up(kernel.shared, cu.lds_unit));
    if (kernel.warps > 1) found.groups = cu.groups;
    return found;
  }

  function limits(kernel) {
    const data = window.occupancyData;
    return kernel.target in data.nvidia ? nvidia(data, kernel) : amd(data, kernel);
  }

  function answer(kernel) {
    const found = limits(kernel);
    const resident = Math.min(...Object.values(found));
    return { limits: found, resident, binding: Object.keys(found).find((name) => found[name] === resident) };
  }

  const ranges = { registers: [1, 512, 1], shared: [0, 262144, 16], warps: [1, 32, 1] };
  const labels = {
    registers: "registers a thread",
    shared: "shared memory, bytes a program",
    warps: "warps a program",
  };
  const names = {
    registers: "registers", shared: "shared memory", warps: "places for warps", blocks: "places for programs",
    vgprs: "vector registers", waves: "places for waves", lds: "LDS", groups: "places for workgroups",
  };

  function build(box, number) {
    const data = window.occupancyData;
    const form = document.createElement("form");
    const inputs = {};
    const row = (name, text, input) => {
      const label = document.createElement("label");
      input.id = `occupancy-${number}-${name}`;
      label.htmlFor = input.id;
      label.textContent = text;
      form.append(label, input);
      inputs[name] = input;
    };
    const select = document.createElement("select");
    for (const [target, unit] of [...Object.entries(data.nvidia), ...Object.entries(data.amd)])
      select.add(new Option(`${target} (${unit.name})`, target));
    row("target", "GPU", select);
    for (const [name, [min, max, step]] of Object.entries(ranges)) {
      const input = document.createElement("input");
      Object.assign(input, { type: "number", min, max, step: "any", inputMode: "numeric" });
      row(name, labels[name], input);
      const slider = document.createElement("input");
      Object.assign(slider, { type: "range", min, max, step });
      slider.setAttribute("aria-label", labels[name]);
      slider.addEventListener("input", () => { input.value = slider.value; show(); });
      input.addEventListener("input", () => { slider.value = input.value; });
      form.append(slider);
      input.value = slider.value = box.dataset[name];
    }
    select.value = box.dataset.target;
    const output = document.createElement("output");
    output.setAttribute("aria-live", "polite");
    const chart = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    chart.setAttribute("role", "img");
    box.replaceChildren(form, output, chart);

    const read = () => {
      const kernel = { target: select.value };
      for (const [name, [min, max]] of Object.entries(ranges)) {
        const value = Math.round(Number(inputs[name].value));
        if (inputs[name].value === "" || !(value >= min && value <= max)) return { wrong: `${labels[name]}: from ${min} to ${max}` };
        kernel[name] = value;
      }
      return kernel;
    };

    function show() {
      const kernel = read();
      if (kernel.wrong) {
        output.textContent = kernel.wrong;
        chart.replaceChildren();
        return;
      }
      const { limits: found, resident, binding } = answer(kernel);
      const all = Object.entries(found).map(([name, value]) => `${names[name]} ${value}`).join(", ");
      output.textContent = `${resident} ${resident === 1 ? "program fits" : "programs fit"}: ${names[binding]} ${resident ? "binds" : "refuses"} (${all}).`;
      draw(chart, kernel, resident);
    }
    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    show();
  }

  function draw(chart, kernel, resident) {
    const most = kernel.target in window.occupancyData.nvidia ? 255 : 512;
    const [width, height, left, bottom] = [600, 240, 40, 34];
    const steps = [];
    for (let registers = 1; registers <= most; registers++) steps.push(answer({ ...kernel, registers }).resident);
    const top = Math.max(1, ...steps, resident);
    const x = (registers) => left + ((width - left - 10) * registers) / most;
    const y = (value) => height - bottom - ((height - bottom - 14) * value) / top;
    const path = steps.map((value, i) => `${i ? "H" + x(i + 0.5) + "V" : "M" + x(0.5) + ","}${y(value)}`).join("") + `H${x(most)}`;
    const at = Math.min(kernel.registers, most);
    chart.setAttribute("viewBox", `0 0 ${width} ${height}`);
    chart.setAttribute("aria-label", `Programs that fit, by registers a thread: ${resident} at ${kernel.registers}.`);
    chart.innerHTML =
      `<path class="axis" d="M${left},10V${y(0)}H${width - 10}"/>` +
      `<path class="steps" d="${path}"/><circle cx="${x(at)}" cy="${y(resident)}" r="5"/>` +
      `<text x="${left - 6}" y="${y(top) + 4}" text-anchor="end">${top}</text><text x="${left - 6}" y="${y(0) + 4}" text-anchor="end">0</text>` +
      `<text x="${x(most)}" y="${height - 14}" text-anchor="end">${most}</text>` +
      `<text x="${(left + width) / 2}" y="${height - 6}" text-anchor="middle">registers a thread</text>`;
  }

  window.memtrafficOccupancy = { answer };
  const start = () => document.querySelectorAll(".occupancy-chart").forEach(build);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
