// How healthy a run is: its findings at a step, with their likely causes and the rollouts that show them, over all steps.

const VERDICTS = table({ fine: "fine", look: "look", broken: "broken" });

class HealthStrip {
  constructor(head, list) {
    this.head = head;
    this.list = list;
    this.runs = head.runs.map((run, number) => ({ number, name: run.name, steps: Object.values(run.health ?? {}).sort((a, b) => a.step - b.step) }))
      .filter((run) => run.steps.length);
    byId("health").hidden = !this.runs.length;
    state.on(["stepFrom", "stepTo"], () => this.show());
    this.show();
  }

  show() {
    byId("health").replaceChildren(...this.runs.map((run) => this.box(run)));
  }

  // Of the selected step, else of the last.
  box(run) {
    const last = run.steps.findLastIndex((entry) => state.step === null || entry.step <= state.step);
    const at = last < 0 ? 0 : last, { step, verdict, findings } = run.steps[at];
    const found = Array.isArray(findings) ? findings : [];
    return make("div", { class: "health" },
      make("div", { class: "health-head" },
        this.runs.length > 1 ? make("b", {}, run.name) : null, this.badge(verdict),
        make("span", {}, found.length ? `${count(found.length, "finding")} at step ${step}` : `nothing found at step ${step}`),
        this.timeline(run.steps, at)),
      found.map((finding) => this.finding(run, at, finding)));
  }

  badge(verdict) {
    return make("span", { class: `verdict ${VERDICTS[verdict] ?? "look"}` }, VERDICTS[verdict] ?? String(verdict));
  }

  // Steps in a row with the same verdict are one piece; a click selects the step.
  timeline(steps, selected) {
    const pieces = [];
    steps.forEach((entry, at) => {
      const verdict = VERDICTS[entry.verdict] ?? "look";
      if (pieces.at(-1)?.verdict === verdict) pieces.at(-1).end = at + 1;
      else pieces.push({ verdict, start: at, end: at + 1 });
    });
    const bar = drawing("svg", { class: "timeline", viewBox: `0 0 ${steps.length} 1`, preserveAspectRatio: "none", role: "img",
      "aria-label": `health of ${steps.length} steps: ${pieces.map((piece) => `${piece.verdict} from step ${steps[piece.start].step}`).join(", ")}` },
    pieces.map(({ verdict, start, end }) => drawing("rect", { class: verdict, x: start, y: 0, width: end - start, height: 1 },
      drawing("title", {}, `${verdict}: steps ${steps[start].step} to ${steps[end - 1].step}`))),
    state.step === null ? null : drawing("rect", { class: "at", x: selected + 0.35, y: 0, width: 0.3, height: 1 }));
    bar.addEventListener("click", (event) => {
      const box = bar.getBoundingClientRect();
      state.set(stepState(steps[Math.min(steps.length - 1, Math.floor(((event.clientX - box.left) / box.width) * steps.length))].step), { isVisit: true });
    });
    return bar;
  }

  finding(run, at, finding) {
    const isThere = (entry) => Array.isArray(entry.findings) && entry.findings.some((other) => other.name === finding.name);
    let since = at;
    while (since > 0 && isThere(run.steps[since - 1])) since--;
    const { index } = this.head, step = run.steps[at].step;
    const places = (Array.isArray(finding.rollouts) ? finding.rollouts : []).map((id) => index.rollout_id.findIndex((other, place) =>
      other === id && index.step[place] === step && index.run[place] === run.number)).filter((place) => place >= 0);
    const causes = Array.isArray(finding.causes) ? finding.causes : [];
    const [first, last] = Array.isArray(finding.steps) ? finding.steps : [];
    const over = last === undefined ? "" : first === last ? `, step ${last}` : `, steps ${first} to ${last}`;
    return make("div", { class: "finding" }, this.badge(finding.verdict),
      make("div", {},
        make("p", {}, make("b", {}, String(finding.says)), make("span", { class: "faint" },
          ` ${String(finding.name).replaceAll("_", " ")}${over}${since < at ? `, since step ${run.steps[since].step}` : ""}`)),
        causes.length ? make("details", { open: finding.verdict === "broken" }, make("summary", {}, "likely causes, the first first"), make("ol", {}, causes.map((cause) => make("li", {}, String(cause))))) : null,
        places.length ? make("div", { class: "siblings" }, make("span", { class: "faint" }, "rollouts that show it"), places.map((place) => make("button", {
          class: "chip", style: `background:${rewardColour(index.reward[place], index.is_scored[place])}`, title: index.rollout_id[place],
          onclick: () => { state.set(stepState(step)); this.list.choose(place); },
        }, number(index.reward[place], 3)))) : null));
  }
}
