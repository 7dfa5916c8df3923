// One rollout: what was asked and expected, what it got, what it said, its tokens, and its problem over time.

const TABS = ["conversation", "tokens", "same problem", "record"];
const EXPECTED = ["answer", "target", "solution", "ground_truth", "label", "expected", "reference"];

class RolloutView {
  constructor(head, list, panel) {
    Object.assign(this, { head, list, panel });
    this.blocks = new Map();
    state.on(["rollout"], () => this.open());
    state.on(["tab", "shade", "row", "turn", "text"], (changed) => { if (this.record && !changed.has("rollout")) this.show(); });
  }

  async open() {
    const place = this.list.selected;
    this.list.draw();
    this.list.markCells();
    if (place === null) {
      this.record = null;
      byId("rollout").replaceChildren(make("p", { class: "hint" }, state.values.rollout === ""
        ? "Choose a rollout: in the list, or in a step's groups. The arrow keys go through the list; j and k do everywhere."
        : "The rollout of this link is not in this page."));
      return;
    }
    const block = Math.floor(place / this.head.blockSize);
    if (!this.blocks.has(block)) this.blocks.set(block, unpack(`block-${block}`));
    const records = await this.blocks.get(block);
    if (this.list.selected !== place) return;  // another was chosen meanwhile
    [this.place, this.record] = [place, records[place % this.head.blockSize]];
    this.show();
    if (this.list.isChosen) this.reveal();
    this.list.isChosen = false;
  }

  // Scroll to it, unless its beginning is in sight.
  reveal() {
    const { top } = byId("rollout").getBoundingClientRect();  // where it stands now that it is there
    if (isNarrow() || top < 0 || top > innerHeight * 0.6) byId("rollout").scrollIntoView();
  }

  show() {
    hideTip();
    const { record, place } = this, { index } = this.head, tab = TABS.includes(state.values.tab) ? state.values.tab : TABS[0];
    const hadFocus = document.activeElement?.dataset.focus;
    const facts = [["step", record.step], ["split", record.split], this.head.runs.length > 1 && ["run", this.head.runs[index.run[place]].name],
      ["turns", record.num_turns], ["sampled tokens", record.num_completion_tokens], ["seconds", number(record.seconds, 3)],
      ...Object.entries(record.tool_calls ?? {}).map(([name, amount]) => [`tool calls ${name}`, amount]),
      ["rows", record.rows.length > 1 ? record.rows.length : null]].filter((fact) => fact && fact[1] !== null && fact[1] !== undefined);
    byId("rollout").replaceChildren(...[
      make("div", { class: "title" }, rewardChip(record.reward, record.is_scored), make("h2", {}, record.rollout_id),
        record.status === "completed" ? null : make("span", { class: record.status }, record.reason ? `${record.status}: ${record.reason}` : record.status),
        make("span", { class: "paging" }, make("button", { title: "previous (k)", onclick: () => this.list.go(-1) }, "‹"),
          make("button", { title: "next (j)", onclick: () => this.list.go(1) }, "›"),
          make("button", { class: "narrow", onclick: () => byId("found").scrollIntoView() }, "list"))),
      make("div", { class: "facts" }, facts.map(([name, value]) => make("span", {}, make("span", { class: "faint" }, `${name} `), String(value)))),
      this.parts(), this.columns(),
      record.split === "train" && !record.rows.length && tab !== "tokens" && this.head.runs[index.run[place]].hasRows
        ? make("p", { class: "faint" }, whyNoTokens(record)) : null,
      record.error ? make("details", { class: "failure", open: "" }, make("summary", { class: "error" }, record.error),
        record.traceback ? make("pre", {}, record.traceback) : null) : null,
      this.siblings(),
      make("div", { class: "tabs", role: "tablist", "aria-label": "view" }, TABS.map((name) => make("button", {
        role: "tab", "data-focus": name, "aria-selected": String(name === tab), onclick: () => state.set({ tab: name }),
      }, name)), tab === TABS[0] ? textChoice() : null),
      { conversation: () => (record.turns?.length ? turnTree(record) : conversation(record)), tokens: () => tokenView(record, this.head.runs[index.run[place]].tokenTexts),
        "same problem": () => this.history(), record: () => make("pre", {}, JSON.stringify({ ...record, rows: undefined }, null, 2)) }[tab](),
    ].filter(Boolean));
    this.list.markCells();
    if (hadFocus) byId("rollout").querySelector(`[data-focus="${CSS.escape(hadFocus)}"]`)?.focus();
  }

  // The reward's parts, where there are several.
  parts() {
    const parts = Object.entries(this.record.reward_breakdown ?? {});
    return parts.length ? make("div", { class: "facts" }, make("span", { class: "faint" }, "reward:"), parts.map(([name, value]) =>
      make("span", {}, `${name} `, make("b", {}, number(value, 3))))) : null;
  }

  // The dataset's columns: what was expected first; what the prompt says anyway, and what is long, folded.
  columns() {
    const said = this.record.messages.map((message) => textOf(message.content)).slice(0, 3).join("\n");
    const rows = Object.entries(this.record.columns ?? {}).filter(([, value]) => value !== null)
      .map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)])
      .filter(([name, value]) => EXPECTED.includes(name) || !value || !said.includes(value));
    if (!rows.length) return null;
    const rank = ([name]) => (EXPECTED.includes(name) ? EXPECTED.indexOf(name) : EXPECTED.length);
    rows.sort((a, b) => rank(a) - rank(b));
    return make("dl", { class: "columns" }, rows.map(([name, value]) => make("div", { class: EXPECTED.includes(name) ? "expected" : "" },
      make("dt", {}, EXPECTED.includes(name) ? `expected ${name}` : name),
      make("dd", {}, value.length > 300 ? make("details", {}, make("summary", {}, `${value.slice(0, 120)}…`), value) : value))));
  }

  siblings() {
    const { record, place } = this, { index } = this.head;
    const places = index.group_id.flatMap((group, at) =>
      (group === record.group_id && index.step[at] === record.step && index.split[at] === record.split && index.run[at] === index.run[place] ? [at] : []));
    if (places.length < 2) return null;
    return make("div", { class: "siblings", role: "group", "aria-label": "group" }, make("span", { class: "faint" }, "group"), places.map((at) => make("button", {
      class: "chip", "aria-pressed": String(at === place), style: `background:${rewardColour(index.reward[at], index.is_scored[at])}`,
      title: `${index.rollout_id[at]} ${index.status[at]}`, onclick: () => this.list.choose(at),
    }, number(index.reward[at], 3))));
  }

  // The same problem in other steps: each rollout a dot at its reward.
  history() {
    const { index } = this.head, places = [];
    index.problem.forEach((problem, at) => { if (problem === index.problem[this.place]) places.push(at); });
    const byStep = new Map();
    for (const at of places) {
      const key = `${index.run[at]} ${index.split[at]} ${index.step[at]}`;
      if (!byStep.has(key)) byStep.set(key, []);
      byStep.get(key).push(at);
    }
    const steps = [...byStep.values()].sort((a, b) => index.step[a[0]] - index.step[b[0]] || a[0] - b[0]);
    return make("div", {},
      make("p", { class: "legend" }, `${count(places.length, "rollout")} of this problem, in ${count(steps.length, "step")}. Each square is one, coloured by its reward.`),
      make("div", { class: "history" }, steps.map((group) => make("div", { class: "group" },
        make("span", { class: "mean" }, number(mean(rewardsOf(index, group)), 3)),
        make("span", { class: "faint" }, this.list.whereOf(group[0])),
        this.panel.cells(group)))),
      make("button", { onclick: () => this.list.showProblem(index.problem[this.place]) }, "list them"));
  }
}
