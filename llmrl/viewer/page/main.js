// The page is put together.

function showHead(head) {
  const rollouts = head.index.step.length;
  byId("name").textContent = head.runs.map((run) => run.name).join(", ");
  const steps = Math.max(...head.runs.map((run) => run.metrics.filter((row) => row.step > 0).length));
  byId("counts").textContent = `${count(steps, "step")}, ${count(rollouts, "rollout")}`;
  const isRunning = head.runs.some((run) => run.isRunning);
  byId("live").hidden = !isRunning;
  if (isRunning && !isEmbedded) keepUp();
  for (const run of head.runs) {
    for (const [name, value] of run.facts) byId("summary").append(make("div", {}, make("dt", {}, head.runs.length > 1 ? `${run.name} ${name}` : name), make("dd", {}, value)));
  }
  byId("config").textContent = head.runs.map((run) => (head.runs.length > 1 ? `# ${run.name}\n${run.config}` : run.config)).join("\n");
  byId("config-box").hidden = !head.runs.some((run) => run.config);
}

// While the run goes on, the file is written again and again: load it anew when nobody is at it, and stay where one was.
function keepUp() {
  let touched = Date.now();
  for (const name of ["pointermove", "keydown", "wheel", "touchmove"]) addEventListener(name, () => { touched = Date.now(); }, { passive: true });
  setInterval(() => {
    if (document.hidden || Date.now() - touched < 4000 || byId("live-pause").checked) return;
    sessionStorage.setItem("place", JSON.stringify([scrollX, scrollY, byId("list").scrollTop]));
    location.reload();
  }, 5000);
}

function returnToPlace() {
  const place = sessionStorage.getItem("place");
  sessionStorage.removeItem("place");
  if (!place) return;
  const [x, y, inList] = JSON.parse(place);
  byId("list").scrollTop = inList;
  scrollTo(x, y);
}

function listenToKeys(list, view) {
  const reveal = (select) => {
    select();
    view.reveal();
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const act = {
      j: () => reveal(() => list.go(1)), k: () => reveal(() => list.go(-1)),
      t: () => reveal(() => state.set({ tab: state.values.tab === "tokens" ? "conversation" : "tokens" })),
      "[": () => goToStep(-1), "]": () => goToStep(1),
      "/": () => { byId("search").focus(); },
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
}

function goToStep(way) {
  const at = state.step === null ? (way > 0 ? -1 : allSteps.length) : allSteps.indexOf(state.step);
  const step = allSteps[Math.max(0, Math.min(allSteps.length - 1, at + way))];
  if (step !== undefined) state.set(stepState(step));
}

async function main() {
  const head = await unpack("head"), { index } = head;
  const found = index.reward.filter((reward, place) => isNumber(reward) && index.is_scored[place] !== false);
  if (found.length) [rewards.low, rewards.high] = extent(found);
  document.body.classList.toggle("several", head.runs.length > 1);
  showHead(head);
  showCurves(head.runs);
  const list = new RolloutList(head);
  new HealthStrip(head, list);
  const panel = new StepPanel(head, list), view = new RolloutView(head, list, panel);
  list.onFilter = (places) => panel.show(places);
  byId("to-step").addEventListener("click", () => byId("step").scrollIntoView());
  byId("to-rollouts").addEventListener("click", () => byId("rollouts").scrollIntoView());
  byId("step-clear").addEventListener("click", () => state.set(stepState(""), { isVisit: true }));
  byId("step-back").addEventListener("click", () => goToStep(-1));
  byId("step-on").addEventListener("click", () => goToStep(1));
  byId("problem-filter").addEventListener("click", () => state.set({ problem: "" }, { isVisit: true }));
  listenToKeys(list, view);
  byId("rollouts").hidden = byId("step").hidden = !index.step.length;
  list.filter();
  const row = list.shown.indexOf(list.selected);  // of a link
  if (row > 0) byId("list").scrollTop = row * ITEM_HEIGHT;
  await view.open();
  if (!isEmbedded) returnToPlace();
  document.body.dataset.ready = "true";
}

main();
