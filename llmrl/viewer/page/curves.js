// Which charts there are, in the order in which somebody looks whose run does not learn.

// Each chart: its title, and the metrics drawn in it, by name or by pattern, with what they are called there.
const SECTIONS = [
  ["Does it learn?", [
    ["reward", [["reward_mean", "train"], [/^eval\/(.+)\/reward$/, "held out $1"]]],
    ["held-out pass@k", [[/^eval\/(.+)\/(pass@\d+)$/, "$1 $2"]]],
    ["reward by part", [[/^reward\/(.+)_mean$/, "$1"]]],
    ["reward spread", [["reward_std", "all"], ["reward_group_std", "within a group"]]],
    ["share of groups", [["groups_all_right", "all right"], ["groups_all_wrong", "all wrong"], ["groups_all_equal", "all equal"]]],
    ["answer length, tokens", [["completion_tokens_mean", "mean"], ["completion_tokens_p95", "p95"],
      ["completion_tokens_max", "max"], [/^eval\/(.+)\/completion_tokens$/, "held out $1"]]],
    ["length of right and wrong", [["completion_tokens_right", "right"], ["completion_tokens_wrong", "wrong"]]],
  ]],
  ["Is the update sound?", [
    ["log_prob_difference", [["log_prob_difference_mean", "mean"], ["log_prob_difference_max", "max"]]],
    ["ESS", [["ESS", ""]]],
    ["entropy", [["entropy", ""]]],
    ["grad_norm", [["grad_norm", ""]]],
    ["kl_approx", [["kl_approx", ""]]],
    ["clip_fraction", [["clip_fraction", "ratio"], ["importance_clip_fraction", "importance weight"]]],
    ["ratio", [["ratio", ""]]],
    ["staleness", [["staleness_mean", "mean"], ["staleness_max", "max"]]],
    ["learning_rate", [["learning_rate", ""]]],
    ["loss", [["loss", ""]]],
  ]],
  ["What went wrong?", [
    ["rollouts by end", [["num_completed", "completed"], ["num_truncated", "truncated"], ["num_error", "error"]]],
    ["rollouts not trained on", [["num_dropped", "dropped"], ["num_unscored", "unscored"]]],
    ["share cut by a limit", [["cut_share", ""]]],
    ["tool calls", [[/^tool_calls\/(.+)$/, "$1"], ["num_tool_calls", "all"]]],
    ["share of tool calls that failed", [["tool_failure_share", ""]]],
    ["share of the same answer", [["common_answer_share", ""]]],
  ]],
  ["Where does the time go?", [
    ["seconds of a step", [["generate_seconds", "generate"], ["train_seconds", "train"], ["sync_seconds", "sync"], ["seconds", "all"]]],
    ["tokens per second", [["tokens_per_second", "sampled"], ["trained_tokens_per_second", "trained"]]],
    ["peak_memory_gib", [["peak_memory_gib", ""]]],
  ]],
];
const PALETTE = [0, 1, 2, 3, 4, 5].map((at) => `var(--series-${at})`);

function pointsOf(run, name) {
  return run.metrics.filter((row) => isNumber(row[name])).map((row) => [row.step, row[name]]);
}

// Of several runs each has its colour, and the metrics of a chart their dashes; of one run the metrics have colours.
function linesOf(runs, wanted) {
  const lines = [];
  wanted.forEach(([name, label], place) => {
    runs.forEach((run, number) => {
      const odd = run.metrics.filter((row) => typeof row[name] === "string").map((row) => [row.step, row[name]]);
      const points = pointsOf(run, name);
      if (!points.length && !odd.length) return;
      const [lows, highs] = [new Map(pointsOf(run, `${name}_low`)), pointsOf(run, `${name}_high`)];
      lines.push({
        label: runs.length > 1 ? `${run.name} ${label}` : label, points, odd,
        band: highs.filter(([step]) => lows.has(step)).map(([step, high]) => [step, lows.get(step), high]),
        colour: PALETTE[(runs.length > 1 ? number : place) % PALETTE.length], dash: runs.length > 1 && place > 0,
        isDotted: name.startsWith("eval/"),
      });
    });
  });
  return lines;
}

// Of several runs a chart has two metrics at most, or its lines could not be told apart.
function apart([title, found]) {
  return found.length <= 2 ? [[title, found]] : found.map(([name, label]) => [`${title}: ${label}`, [[name, ""]]]);
}

function showCurves(runs) {
  const names = [...new Set(runs.flatMap((run) => run.metrics.flatMap(Object.keys)))].filter((name) => name !== "step");
  allSteps = [...new Set(runs.flatMap((run) => run.metrics.map((row) => row.step)))].sort((a, b) => a - b);
  [horizontal.first, horizontal.last] = allSteps.length ? [allSteps[0], allSteps.at(-1)] : [0, 1];
  const taken = new Set(names.filter((name) => /_(low|high)$/.test(name) && names.includes(name.replace(/_(low|high)$/, ""))));
  const sections = SECTIONS.map(([title, specs]) => [title, specs.map(([name, wanted]) => {
    const found = wanted.flatMap(([pattern, label]) => names
      .filter((one) => (typeof pattern === "string" ? one === pattern : pattern.test(one)))
      .map((one) => [one, typeof pattern === "string" ? label : one.replace(pattern, label)]));
    found.forEach(([one]) => taken.add(one));
    return [name, found];
  }).filter(([, found]) => found.length).flatMap((spec) => (runs.length > 1 ? apart(spec) : [spec]))]);
  sections.push(["All other metrics", names.filter((name) => !taken.has(name)).sort().map((name) => [name, [[name, ""]]])]);
  sections.forEach(([title, specs], place) => {
    if (!specs.length) return;
    const grid = make("div", { class: "charts" });
    const box = make("details", { class: "section", open: place < (isNarrow() ? 1 : 2) }, make("summary", {}, make("h2", {}, title), make("span", { class: "faint" }, count(specs.length, "chart"))), grid);
    box.addEventListener("toggle", () => {  // charts that nobody sees are not made
      if (!box.open || grid.childElementCount) return;
      for (const [name, found] of specs) {
        const lines = linesOf(runs, found);
        if (lines.length) grid.append(new Chart(name, lines, { about: found.map(([one]) => one).join(", ") }).figure);
      }
    });
    byId("curves").append(box);
  });
  byId("curves").hidden = byId("tools").hidden = !names.length;
  showTools();
}

function showTools() {
  const smooth = byId("smooth"), log = byId("log");
  const show = () => {
    smooth.value = state.values.smooth;
    log.checked = state.values.scale === "log";
    byId("smooth-shown").textContent = Number(smooth.value) ? Number(smooth.value).toFixed(2) : "off";
  };
  smooth.addEventListener("input", () => state.set({ smooth: Number(smooth.value) }));
  log.addEventListener("change", () => state.set({ scale: log.checked ? "log" : "linear" }));
  state.on(["smooth", "scale"], () => { show(); redrawCharts(); });
  state.on(["stepFrom", "stepTo"], () => {
    cursor.step = null;
    charts.forEach((chart) => { if (chart.isSeen) chart.mark(); });
  });
  show();
  byId("curves").addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = cursor.step ?? state.step ?? allSteps.at(-1);
    if (way) cursor.move(allSteps[Math.max(0, Math.min(allSteps.length - 1, allSteps.indexOf(at) + way))]);
    else if (event.key === "Enter" && event.target === event.currentTarget) selectStep(at);
    else if (event.key === "Escape") cursor.move(null);
    else return;
    event.preventDefault();
  });
}
