// One chart: axes, lines of steps, a cursor. All charts have the same horizontal axis.

const CHART = { height: isNarrow() ? 116 : 146, left: isNarrow() ? 38 : 46, right: 10, top: 8, bottom: 20 };
const charts = new Set();  // those that stand in the page
const horizontal = { first: 0, last: 1 };
const sideways = (step, width) =>
  CHART.left + (width - CHART.left - CHART.right) * (horizontal.last === horizontal.first ? 0.5 : (step - horizontal.first) / (horizontal.last - horizontal.first));

// A frame with axes; `draw(frame)` adds what it is for. Charts that are out of sight are drawn when they come into it.
class Chart {
  // lines: [{label, points, band, colour, dash, isDotted}] with points [[step, value]], band [[step, low, high]].
  constructor(title, lines, { about = "" } = {}) {
    this.title = title;
    this.lines = lines;
    this.figure = make("figure", { "data-metric": title, title: about },
      make("figcaption", {}, make("b", {}, ...breakable(title)), this.note = make("span", { class: "note" })),
      this.legend = make("div", { class: "legend" }),
      this.svg = drawing("svg", { role: "img", "aria-label": `${title} by step`, height: CHART.height }));
    this.readings = lines.map((line) => {
      const reading = make("span", { class: "reading" });
      this.legend.append(make("span", { class: "key" },
        make("i", { class: line.dash ? "dashed" : line.isDotted ? "dotted" : "", style: `--colour:${line.colour}` }), line.label ? `${line.label} ` : "", reading));
      return reading;
    });
    this.svg.addEventListener("pointermove", (event) => cursor.move(this.stepAt(event)));
    this.svg.addEventListener("pointerleave", () => cursor.move(null));
    this.svg.addEventListener("click", (event) => selectStep(this.stepAt(event)));
    charts.add(this);
    seen.observe(this.figure);
    this.figure.chart = this;
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect();
    const share = (event.clientX - box.left - CHART.left) / (box.width - CHART.left - CHART.right);
    return nearestStep(horizontal.first + share * (horizontal.last - horizontal.first));
  }

  draw() {
    this.width = this.figure.clientWidth - 2;
    if (this.width < 60) return;
    const { width } = this, height = CHART.height;
    const smooth = Number(state.values.smooth), isLog = state.values.scale === "log";
    const drawn = this.lines.map((line) => (smooth && line.points.length > 2 && !line.isDotted ? smoothed(line.points, smooth) : line.points));
    const inBand = this.lines.flatMap((line) => (line.band ?? []).flatMap(([, low, high]) => [low, high]));
    const scale = verticalScale([...this.lines.flatMap((line) => line.points.map((point) => point[1])), ...inBand], isLog);
    this.note.textContent = scale.note;
    const bottom = height - CHART.bottom, y = (value) => bottom - scale.place(value) * (bottom - CHART.top);
    const x = (step) => sideways(step, width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const parts = [];
    for (const tick of scale.ticks) {
      parts.push(drawing("line", { class: tick === 0 ? "zero" : "grid", x1: CHART.left, x2: width - CHART.right, y1: y(tick), y2: y(tick) }),
        drawing("text", { x: CHART.left - 6, y: y(tick) + 4, class: "left" }, tickText(tick, scale.ticks)));
    }
    for (const tick of ticksOf(horizontal.first, horizontal.last, Math.max(2, Math.floor(width / 80)), true)) {
      parts.push(drawing("text", { x: x(tick), y: height - 5, class: "below" }, tick.toLocaleString("en")));
    }
    const path = (points) => points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    this.lines.forEach((line, at) => {
      const style = `stroke:${line.colour}`;
      if (line.band?.length) {
        const around = [...line.band.map(([step, , high]) => [step, high]), ...[...line.band].reverse().map(([step, low]) => [step, low])];
        parts.push(drawing("polygon", { class: "band", points: path(around), style: `fill:${line.colour}` }));
      }
      if (drawn[at] !== line.points) parts.push(drawing("polyline", { class: "raw", points: path(line.points), style }));
      parts.push(drawing("polyline", { class: line.dash ? "dash" : "", points: path(drawn[at]), style }));
      if (line.isDotted || line.points.length === 1) {
        parts.push(...line.points.map(([step, value]) => drawing("circle", { cx: x(step), cy: y(value), r: 3, style: `fill:${line.colour}` })));
      }
      parts.push(...(line.odd ?? []).map(([step, value]) =>
        drawing("text", { x: x(step), y: CHART.top + 8, class: "odd" }, "×", drawing("title", {}, `${value} at step ${step}`))));
    });
    this.selection = drawing("line", { class: "selection", y1: CHART.top, y2: bottom });
    this.cursor = drawing("line", { class: "cursor", y1: CHART.top, y2: bottom });
    this.svg.replaceChildren(...parts, this.selection, this.cursor);
    this.drawn = drawn;
    this.isDrawn = true;
    this.mark();
  }

  // Lines at the cursor and at the selected step, and the numbers there.
  mark() {
    if (!this.isDrawn) return;
    const step = cursor.step ?? state.step;
    for (const [line, at] of [[this.cursor, cursor.step], [this.selection, state.step]]) {
      line.setAttribute("visibility", at === null ? "hidden" : "visible");
      if (at !== null) {
        const x = sideways(at, this.width);
        line.setAttribute("x1", x);
        line.setAttribute("x2", x);
      }
    }
    this.readings.forEach((reading, at) => { reading.textContent = this.reading(at, step); });
  }

  reading(at, step) {
    const { points, odd, isDotted } = this.lines[at];
    const bad = step !== null && odd?.find((point) => point[0] === step);
    if (bad) return bad[1];
    // Of what is not measured at every step, the last measurement.
    const index = step === null ? points.length - 1 : points.findLastIndex((point) => (isDotted ? point[0] <= step : point[0] === step));
    if (index < 0) return "–";
    const [raw, shown] = [points[index][1], this.drawn[at][index][1]];
    return raw === shown ? number(raw, 3) : `${number(shown, 3)} (${number(raw, 3)})`;
  }
}

const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    target.chart.isSeen = isIntersecting;
    if (isIntersecting && !target.chart.isDrawn) target.chart.draw();
    else if (isIntersecting) target.chart.mark();
  }
}, { rootMargin: "200px" });

function redrawCharts() {
  for (const chart of charts) {
    chart.isDrawn = false;
    if (chart.isSeen) chart.draw();
  }
}

// The step that the pointer or the arrow keys are at, the same in all charts.
const cursor = {
  step: null,
  move(step) {
    if (step === cursor.step) return;
    cursor.step = step;
    byId("at-step").textContent = step !== null ? `step ${step}` : state.step !== null ? `step ${state.step} selected` : "";
    cancelAnimationFrame(cursor.frame);
    cursor.frame = requestAnimationFrame(() => charts.forEach((chart) => { if (chart.isSeen) chart.mark(); }));
  },
};

let allSteps = [];  // that have metrics, in order

function nearestStep(at) {
  let low = 0, high = allSteps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (allSteps[middle] <= at) low = middle;
    else high = middle;
  }
  return allSteps.length ? (Math.abs(allSteps[low] - at) <= Math.abs(allSteps[high] - at) ? allSteps[low] : allSteps[high]) : null;
}

function selectStep(step) {
  if (step === null) return;
  const isSame = state.step === step;
  state.set({ ...stepState(isSame ? "" : step), problem: "" }, { isVisit: true });
  if (!isSame) byId("step").scrollIntoView();
}

let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(redrawCharts, 100);
});
