// Keys, copy buttons and live curves. Every page works without this file.
(function () {
  "use strict";

  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const isTyping = (event) => event.target.closest("input, textarea, select") !== null;

  function showCopyButtons(scope) {
    for (const button of scope.querySelectorAll("button.copy[hidden]")) {
      if (!navigator.clipboard) return;
      button.hidden = false;
      button.addEventListener("click", async () => {
        await navigator.clipboard.writeText(button.dataset.copy);
        button.textContent = "Copied";
        setTimeout(() => { button.textContent = "Copy"; }, 1500);
      });
    }
  }

  // Lists: J and K move, Enter opens. Pages: links and buttons with data-key.
  let chosen = -1;
  const linksOf = (list) =>
    list.tagName === "TABLE" ? [...list.querySelectorAll("tbody th a")] : [...list.querySelectorAll(":scope > li > a")];

  function move(by) {
    const list = document.querySelector("[data-keys]");
    if (!list) return false;
    const links = linksOf(list);
    if (!links.length) return false;
    for (const item of list.querySelectorAll(".chosen")) item.classList.remove("chosen");
    chosen = Math.min(Math.max(chosen + by, 0), links.length - 1);
    (links[chosen].closest("tr") || links[chosen].closest("li")).classList.add("chosen");
    links[chosen].focus({ preventScroll: true });
    links[chosen].scrollIntoView({ block: "nearest" });
    return true;
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (isTyping(event)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
    if (key === "e") {
      const reply = document.querySelector("textarea#reply");
      if (reply) { reply.focus(); event.preventDefault(); return; }
    }
    if (event.repeat && key !== "j" && key !== "k") return;
    const back = key === "Escape" ? ".crumbs a:last-of-type" : "";
    const bound = document.querySelector(`[data-key="${CSS.escape(key)}"]`) || (back && document.querySelector(back));
    if (bound) { bound.click(); event.preventDefault(); return; }
    if ((key === "j" && move(1)) || (key === "k" && move(-1))) event.preventDefault();
  });

  // Curves: uPlot in place of the drawing; new steps are fetched when the project changes.
  const formats = (value) => (value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4)));

  const STEPS = [1, 2, 5].flatMap((first) => [0, 1, 2, 3, 4, 5, 6].map((power) => first * 10 ** power)).sort((a, b) => a - b);

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.series = figure.dataset.series;
      this.columns = null;
      this.loading = this.again = false;
    }

    // One request at a time: two that overlap would both bring the steps after the same last one.
    async load() {
      this.again = this.loading;
      if (this.loading) return;
      this.loading = true;
      try {
        do {
          this.again = false;
          await this.addSteps();
        } while (this.again);
      } finally {
        this.loading = false;
      }
    }

    async addSteps() {
      const last = this.columns ? this.columns.step[this.columns.step.length - 1] || 0 : 0;
      const answer = await fetch(`${this.figure.dataset.curve}?after=${last}`, { headers: { accept: "application/json" } });
      if (!answer.ok) return;
      const found = await answer.json();
      if (!this.columns) this.columns = found;
      else for (const [name, values] of Object.entries(found)) this.columns[name] = Array.isArray(values) ? (this.columns[name] || []).concat(values) : values;
      if (this.columns.step.length < 2) return;
      if (this.plot) this.plot.setData(this.data());
      else this.draw();
    }

    data() {
      const values = this.columns[this.series] || [];
      if (this.series !== "loss") return [this.columns.step, values, smooth(values)];
      const { step, validation, skipped = [] } = this.columns;
      const held = new Map((validation ? validation.step : []).map((number, at) => [number, validation.loss[at]]));
      const trend = smooth(values);
      // A skipped step has no loss that means anything: its mark stands on the trend.
      return [step, values, trend, step.map((number) => held.get(number) ?? null), step.map((_, at) => (skipped[at] ? trend[at] : null))];
    }

    draw() {
      const small = this.figure.classList.contains("small");
      const text = colour("--soft"), grid = colour("--line"), main = colour("--after");
      const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid }, font: `12px ${colour("--sans")}` };
      const box = document.createElement("div");
      box.setAttribute("aria-hidden", "true");
      const still = this.figure.querySelector(".still");
      if (still) still.classList.add("visually-hidden");
      this.figure.append(box);
      this.plot = new uPlot({
        width: this.figure.clientWidth || 320,
        height: small ? 140 : 300,
        cursor: { drag: { x: true, y: false } },
        legend: { show: !small },
        hooks: { setLegend: [(plot) => { if (plot.legend.idx == null && plot.data[0].length) plot.setLegend({ idx: plot.data[0].length - 1 }); }] },
        scales: { x: { time: false } },
        axes: [{ ...axis, incrs: STEPS }, { ...axis, size: 58, values: (_, ticks) => ticks.map(formats) }],
        series: [
          { label: "step" },
          { label: this.series, stroke: main, width: 1, alpha: 0.4, points: { show: false }, value: (_, v) => formats(v) },
          { label: "trend", stroke: main, width: 2.4, points: { show: false }, value: (_, v) => formats(v) },
          ...(this.series === "loss" ? [
            { label: "validation", stroke: colour("--info"), width: 1.6, spanGaps: true, points: { show: true, size: 6 }, value: (_, v) => formats(v) },
            { label: "skipped", stroke: colour("--warn"), paths: () => null, points: { show: true, size: 8 }, value: (_, v) => (v == null ? "–" : "yes") },
          ] : []),
        ],
      }, this.data(), box);
      this.box = box;
      this.offer();
      new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.figure.clientWidth, height: this.plot.height })).observe(this.figure);
    }

    offer() {
      const choices = document.getElementById("chart-choices");
      if (!choices || choices.childElementCount) return;
      for (const name of Object.keys(this.columns)) {
        if (["step", "validation", "skipped"].includes(name)) continue;
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = name;
        button.setAttribute("aria-pressed", String(name === this.series));
        button.addEventListener("click", () => {
          this.series = name;
          for (const other of choices.children) other.setAttribute("aria-pressed", String(other === button));
          this.redraw();
        });
        choices.append(button);
      }
      choices.hidden = false;
    }

    redraw() {
      this.plot.destroy();
      this.box.remove();
      this.plot = null;
      this.draw();
    }
  }

  function smooth(values) {
    const reach = Math.max(Math.floor(values.length / 16), 1);
    return values.map((_, at) => {
      const near = Math.min(reach, at, values.length - 1 - at);
      const window = values.slice(at - near, at + near + 1).filter((value) => value != null);
      return window.length ? window.reduce((sum, value) => sum + value, 0) / window.length : null;
    });
  }

  let charts = [];
  function startCharts() {
    if (typeof uPlot === "undefined") return;
    charts = charts.filter((chart) => chart.figure.isConnected);
    for (const figure of document.querySelectorAll("[data-curve]:not([data-started])")) {
      figure.dataset.started = "";
      const chart = new Chart(figure);
      charts.push(chart);
      chart.load();
    }
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.plot && chart.redraw()));

  // On phones, the cells of wide tables are stacked, each with the name of its column.
  function nameCells() {
    for (const table of document.querySelectorAll(".scroll > table:not(.compare):not(.keep)")) {
      const names = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
      if (names.length < 4) continue;
      table.classList.add("stack");
      for (const row of table.tBodies[0].rows) {
        [...row.cells].forEach((cell, at) => { if (cell.tagName === "TD") cell.dataset.label = names[at]; });
      }
    }
  }

  // The stream: what it says is shown in the footer, for state changes only.
  const state = document.getElementById("live-state");
  function say(text) { if (state && state.textContent !== text) state.textContent = text; }
  document.addEventListener("htmx:sse:after:connection", () => say("live"));
  document.addEventListener("htmx:sse:error", () => say("not connected, trying again"));
  document.addEventListener("graft:change", () => charts.forEach((chart) => chart.load()));
  document.addEventListener("htmx:after:swap", () => { showCopyButtons(document); startCharts(); nameCells(); });

  // Selects in filter forms send the form by themselves.
  for (const select of document.querySelectorAll(".filters-form[method=get] select")) {
    select.addEventListener("change", () => select.form.requestSubmit());
  }

  // A form that is being sent cannot be sent again. Coming back to the page ends that.
  const sent = new Set();
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.method !== "post" || event.defaultPrevented) return;
    if (sent.has(form)) { event.preventDefault(); return; }
    sent.add(form);
    // Later: a button that is disabled at once takes its own name and value out of the form.
    setTimeout(() => {
      for (const button of form.querySelectorAll("button:not([type=button])")) button.disabled = true;
      form.setAttribute("aria-busy", "true");
    }, 0);
  });
  addEventListener("pageshow", () => {
    for (const form of sent) {
      form.removeAttribute("aria-busy");
      for (const button of form.querySelectorAll("button")) button.disabled = false;
    }
    sent.clear();
  });

  // Sliders show their value while they are moved; the form asks for the week when they are let go.
  document.addEventListener("input", (event) => {
    if (event.target.type !== "range") return;
    const dial = event.target.parentElement, output = dial.querySelector("output");
    output.textContent = `${event.target.value} ${output.dataset.unit}`.trim();
    dial.classList.toggle("changed", Number(event.target.value) !== Number(event.target.dataset.now));
  });

  showCopyButtons(document);
  startCharts();
  nameCells();
})();
