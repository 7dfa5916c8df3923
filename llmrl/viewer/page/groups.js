// Rewards and lengths of the rollouts that are found, how they spread over the steps, and the groups of a step as a grid.

const MOST_GROUPS = 40;

// A bar for each bin, with what lies in it; a click on one narrows the list to it.
function bars(title, values, narrow, colourOf) {
  const { low, high, size } = binsOf(values), counts = histogram(values, low, high, size);
  const [width, height, top] = [300, 70, Math.max(...counts, 1)], each = width / size, wide = Math.max(1, Math.min(each - 1, 40));
  const svg = drawing("svg", { class: "histogram", viewBox: `0 0 ${width} ${height + 16}`, role: "img", "aria-label": `${title}: histogram` });
  counts.forEach((amount, at) => {
    const [from, to] = [low + (at * (high - low)) / size, low + ((at + 1) * (high - low)) / size];
    const tall = amount ? Math.max(2, (amount / top) * (height - 14)) : 0;
    svg.append(drawing("g", { class: "bar", onclick: () => amount && narrow(from, to, at === size - 1) },
      drawing("title", {}, `${count(amount, "rollout")} from ${number(from, 3)} to ${number(to, 3)}`),
      drawing("rect", { class: "reach", x: at * each, y: 0, width: each, height }),
      drawing("rect", { x: (at + 0.5) * each - wide / 2, y: height - tall, width: wide, height: tall, style: `fill:${colourOf((from + to) / 2)}` }),
      ...(size <= 12 && amount ? [drawing("text", { x: (at + 0.5) * each, y: height - tall - 3, class: "amount" }, String(amount))] : [])));
  });
  const [least, most] = values.length ? extent(values) : [0, 0];
  const isFew = size <= 6;  // then the numbers stand under the bars that they are of
  svg.append(drawing("line", { class: "zero", x1: 0, x2: width, y1: height, y2: height }),
    drawing("text", { x: isFew ? each / 2 : 0, y: height + 13, class: isFew ? "" : "start" }, number(least, 3)),
    most > least && drawing("text", { x: isFew ? width - each / 2 : width, y: height + 13, class: isFew ? "" : "left" }, number(most, 3)));
  return make("figure", { class: "distribution" },
    make("figcaption", {}, make("b", {}, title), make("span", { class: "note" }, values.length ? `mean ${number(mean(values), 3)}` : "none")), svg);
}

class StepPanel {
  constructor(head, list) {
    this.head = head;
    this.list = list;
  }

  // What the histograms are of follows the list; the grid is of the selected step, or of the last.
  show(places) {
    const { index } = this.head, step = state.step;
    const cut = (value) => Number(value.toPrecision(6));
    const narrow = (low, high) => (from, to) => state.set({ [low]: cut(from), [high]: cut(to) });
    byId("distributions").replaceChildren(
      bars("reward", rewardsOf(index, places), narrow("rewardFrom", "rewardTo"), rewardColour),
      bars("sampled tokens", places.map((place) => index.num_completion_tokens[place] ?? 0), narrow("lengthFrom", "lengthTo"), () => "var(--accent)"));
    const at = step ?? this.lastStep(), split = state.values.split;
    byId("step-title").textContent = step === null ? "All steps" : `Step ${step}`;
    byId("step-clear").hidden = step === null;
    byId("step-back").disabled = byId("step-on").disabled = allSteps.length < 2;
    this.grid(at, split);
  }

  lastStep() {
    const { index } = this.head;
    return index.step.reduce((last, step, place) => (index.split[place] === "train" || last === null ? Math.max(last ?? 0, step) : last), null);
  }

  grid(step, split) {
    const { index } = this.head, groups = new Map(), run = state.values.run;
    index.step.forEach((at, place) => {
      if (at !== step || (split && index.split[place] !== split) || (run && String(index.run[place]) !== run)) return;
      const key = JSON.stringify([index.run[place], index.split[place], index.group_id[place], index.role[place]]);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(place);
    });
    const rows = [...groups.values()].map((places) => ({ places, scored: rewardsOf(index, places) }));
    rows.forEach((row) => { row.mean = mean(row.scored); });
    rows.sort((a, b) => (a.mean ?? -Infinity) - (b.mean ?? -Infinity) || 0);
    const isEqual = ({ scored }) => scored.length > 1 && scored.every((reward) => reward === scored[0]);
    byId("groups-title").textContent = rows.length
      ? `${count(rows.length, "group")} of step ${step}, ${rows.filter(isEqual).length} without signal (all rewards equal)` : "No groups at this step.";
    const shown = this.isWhole ? rows : rows.slice(0, MOST_GROUPS);
    byId("groups").replaceChildren(...shown.map((row) => make("div", { class: "group" },
      make("span", { class: "mean" }, number(row.mean, 3)), this.cells(row.places),
      make("button", {
        class: "question", title: "the same problem in all steps", onclick: () => this.list.showProblem(index.problem[row.places[0]]),
      }, make("em", {}, this.list.whereOf(row.places[0]).replace(/step \d+$/, "")), index.question[row.places[0]] || "(no question)"))),
    ...(rows.length > shown.length ? [make("button", { onclick: () => { this.isWhole = true; this.grid(step, split); } }, `all ${rows.length} groups`)] : []),
    ...this.commands(step, shown));
    this.list.markCells();
  }

  // What computes a step of training again, for each run that has it.
  commands(step, rows) {
    const { index, runs } = this.head, places = rows.map((row) => row.places[0]).filter((place) => index.split[place] === "train");
    return [...new Set(places.map((place) => runs[index.run[place]].replay))].filter(Boolean).map((command) =>
      make("p", { class: "faint" }, "replay this step: ", make("code", {}, `${command} --step ${step}`)));
  }

  // Squares that open a rollout each, in its reward's colour.
  cells(places) {
    const { index } = this.head;
    return make("span", { class: "cells" }, places.map((place) => make("button", {
      class: "cell", "data-place": place, style: `background:${rewardColour(index.reward[place], index.is_scored[place])}`,
      title: `${index.rollout_id[place]}: reward ${number(index.reward[place])}, ${index.status[place]} ${index.reason[place] ?? ""}`,
      "aria-label": `reward ${number(index.reward[place], 3)}`, onclick: () => this.list.choose(place),
    }, STATUS_MARKS[index.status[place]] ?? "")));
  }
}

// What a status adds to a colour.
const STATUS_MARKS = table({ truncated: "…", error: "!", aborted: "×", ongoing: "·" });
