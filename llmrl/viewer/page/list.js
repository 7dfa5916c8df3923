// The rollouts that are found. Only what is in sight is in the document, so that ten thousand scroll as ten.

const ITEM_HEIGHT = 58;
const FIELDS = {
  search: "search", split: "split", status: "status", run: "run", order: "order", "step-from": "stepFrom", "step-to": "stepTo",
  "reward-from": "rewardFrom", "reward-to": "rewardTo", "length-from": "lengthFrom", "length-to": "lengthTo",
};

class RolloutList {
  constructor(head) {
    this.head = head;
    this.index = head.index;
    this.shown = [];
    this.texts = this.index.question.map((question, place) => `${question} ${this.index.answer[place]} ${this.index.rollout_id[place]} ${this.index.group_id[place]}`.toLowerCase());
    for (const name of ["split", "status"]) {
      byId(name).append(make("option", { value: "" }, `any ${name}`),
        ...[...new Set(this.index[name])].sort().map((value) => make("option", { value }, value)));
    }
    byId("run").append(make("option", { value: "" }, "all runs"), ...head.runs.map((run, at) => make("option", { value: String(at) }, run.name)));
    byId("run").hidden = head.runs.length < 2;
    byId("filters").addEventListener("input", (event) => state.set({ [FIELDS[event.target.id]]: event.target.value.trim() }));
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("clear").addEventListener("click", () => {
      state.set(Object.fromEntries([...Object.values(FIELDS), "problem"].map((name) => [name, DEFAULTS[name]])), { isVisit: true });
    });
    byId("list").addEventListener("scroll", () => this.draw());
    byId("list").addEventListener("keydown", (event) => {
      const way = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -Infinity, End: Infinity }[event.key];
      if (!way) return;
      event.preventDefault();
      this.go(way);
    });
    addEventListener("resize", () => this.draw());
    state.on([...Object.values(FIELDS), "problem"], () => this.filter());
  }

  get selected() {  // its place; null where none is, or where a link names one that is not here
    const name = state.values.rollout;
    if (name !== this.selectedName) {
      this.selectedName = name;
      this.selectedPlace = name === "" ? -1 : this.index.rollout_id.findIndex((_, place) => this.nameOf(place) === name);
    }
    return this.selectedPlace < 0 ? null : this.selectedPlace;
  }

  // Ids are unique within a run, a step and a split.
  nameOf(place) {
    const { index } = this, run = this.head.runs.length > 1 ? [index.run[place]] : [];
    return [...run, index.step[place], ...(index.split[place] === "train" ? [] : [index.split[place]]), index.rollout_id[place]].join(":");
  }

  filter() {
    for (const [id, name] of Object.entries(FIELDS)) if (byId(id) !== document.activeElement || byId(id).value.trim() !== state.values[name]) byId(id).value = state.values[name];
    const { index } = this, { values } = state;
    const bound = (name, other) => (values[name] === "" || Number.isNaN(Number(values[name])) ? other : Number(values[name]));
    const text = values.search.toLowerCase();
    const within = [["step", "step"], ["reward", "reward"], ["length", "num_completion_tokens"]]
      .map(([name, column]) => [index[column], bound(`${name}From`, -Infinity), bound(`${name}To`, Infinity)])
      .filter(([, low, high]) => low > -Infinity || high < Infinity);
    const equal = ["split", "status", "run", "problem"].filter((name) => values[name] !== "").map((name) => [index[name], values[name]]);
    this.shown = [];
    for (let place = 0; place < index.step.length; place++) {
      if (within.every(([column, low, high]) => column[place] >= low && column[place] <= high) &&
        equal.every(([column, value]) => String(column[place]) === value) && (!text || this.texts[place].includes(text))) this.shown.push(place);
    }
    const keys = table({ best: (p) => -index.reward[p], worst: (p) => index.reward[p], long: (p) => -index.num_completion_tokens[p], last: (p) => -index.step[p] });
    const key = keys[values.order];
    if (key) this.shown.sort((a, b) => key(a) - key(b) || a - b);
    byId("found").textContent = this.shown.length ? `${this.shown.length.toLocaleString("en")} found, mean reward ${number(mean(rewardsOf(index, this.shown)), 3)}`
      : index.step.length ? "None found; widen the filters." : "No rollouts were recorded.";
    byId("problem-filter").hidden = values.problem === "";
    byId("problem-filter").textContent = `one problem: ${index.question[index.problem.indexOf(Number(values.problem))] ?? "?"} ×`;
    byId("clear").hidden = ![...Object.values(FIELDS), "problem"].some((name) => name !== "order" && values[name] !== "");
    byId("list-space").style.height = `${this.shown.length * ITEM_HEIGHT}px`;
    byId("list").scrollTop = 0;
    this.onFilter?.(this.shown);
    this.draw();
  }

  draw() {
    const list = byId("list"), { index, selected } = this;
    const first = Math.max(0, Math.floor(list.scrollTop / ITEM_HEIGHT) - 4);
    const last = Math.min(this.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ITEM_HEIGHT) + 4);
    list.querySelectorAll(".item").forEach((item) => item.remove());
    for (let row = first; row < last; row++) {
      const place = this.shown[row], isDone = index.status[place] === "completed";
      list.append(make("div", {
        class: "item", role: "option", "data-place": place, "aria-selected": String(place === selected), id: `item-${place}`,
        style: `top:${row * ITEM_HEIGHT}px`, onclick: () => this.choose(place),
      },
      rewardChip(index.reward[place], index.is_scored[place]),
      make("div", { class: "lines" },
        make("div", {}, make("span", { class: "question" }, index.question[place] || index.rollout_id[place]),
          make("span", { class: "faint" }, this.whereOf(place))),
        make("div", {}, make("span", { class: "preview" }, make("bdi", {}, index.answer[place] || "(no answer)")),
          isDone ? make("span", { class: "faint" }, `${number(index.num_completion_tokens[place])} tok`)
            : make("span", { class: index.status[place] }, index.reason[place] || index.status[place])))));
    }
    if (selected !== null) list.setAttribute("aria-activedescendant", `item-${selected}`);
  }

  choose(place) {
    this.isChosen = true;
    state.set({ rollout: this.nameOf(place), row: 0 }, { isVisit: true });
  }

  // The one so many places on in the list.
  go(way) {
    if (!this.shown.length) return;
    const row = Math.max(0, Math.min(this.shown.length - 1, this.shown.indexOf(this.selected) + way));
    const list = byId("list"), top = row * ITEM_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ITEM_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ITEM_HEIGHT - list.clientHeight;
    state.set({ rollout: this.nameOf(this.shown[row]), row: 0 });
  }

  showProblem(problem) {
    state.set({ problem, ...stepState(""), split: "" }, { isVisit: true });
    byId("rollouts").scrollIntoView();
  }

  // A rollout's run and split, where they are not the usual ones, and its step.
  whereOf(place) {
    const { index } = this, split = index.split[place];
    return [this.head.runs.length > 1 && this.head.runs[index.run[place]].name, split !== "train" && split, `step ${index.step[place]}`].filter(Boolean).join(" ");
  }

  markCells() {
    document.querySelectorAll(".cell").forEach((cell) => cell.setAttribute("aria-pressed", String(Number(cell.dataset.place) === this.selected)));
  }
}
