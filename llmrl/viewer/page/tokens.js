// Every token of a row, with what is known of it; of several rows, which one keeps how much of which.

const SHADES = table({
  "trained or context": [null, "Underlined tokens were sampled and are trained; faint ones are context."],
  "log-prob": [(row, at) => (row.trained[at] ? Math.min(1, -row.logProbs[at] / 5) : null),
    "The darker, the less likely the sampler found the token (full colour: −5 and below)."],
  "importance ratio": [(row, at) => {
    const ratio = ratioOf(row, at);
    return ratio === null ? null : Math.max(-1, Math.min(1, Math.log(ratio) / Math.log(1.5)));
  }, "Trainer's probability over the sampler's: blue above 1, red below (full colour: a factor of 1.5)."],
  "advantage": [(row, at) => (row.trained[at] && row.advantage !== null ? Math.max(-1, Math.min(1, row.advantage / 2)) : null),
    "Blue: made likelier; red: made less likely. It is the rollout's, the same on every trained token."],
  "policy version": [(row, at, versions) => (row.trained[at] ? (versions.indexOf(row.versions[at]) + 1) / versions.length : null),
    "The darker, the newer the weights that sampled the token."],
});

function ratioOf(row, at) {
  const trainer = row.trainerLogProbs[at];
  return !row.trained[at] || trainer === null ? null : Math.exp(trainer - row.logProbs[at]);
}

function shadeStyle(shade) {
  if (shade === null) return null;
  const [hue, share] = shade < 0 ? ["var(--bad)", -shade] : ["var(--accent)", shade];
  return `background: color-mix(in srgb, ${hue} ${Math.round(70 * share)}%, transparent)`;
}

// Of an evaluation the tokens were sampled, and not trained.
function tokenView(record, tokenTexts) {
  if (!record.rows.length) return make("p", { class: "hint" }, whyNoTokens(record));
  const place = Math.max(0, Math.min(Math.floor(Number(state.values.row)) || 0, record.rows.length - 1)), row = record.rows[place];
  const mode = state.values.shade in SHADES ? state.values.shade : "trained or context";
  const [shade, legend] = SHADES[mode];
  const versions = [...new Set(row.versions.filter((version, at) => row.trained[at]))].sort((a, b) => a - b);
  const box = make("div", { class: "tokens" }, row.ids.map((id, at) => make("span", {
    class: `token ${row.trained[at] ? "trained" : "context"}`, style: shade && shadeStyle(shade(row, at, versions)), "data-at": at, tabindex: at ? -1 : 0,
  }, tokenTexts[id] ?? ` ${id}`)));
  const about = (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) showTip(event.target, aboutToken(row, Number(at), tokenTexts));
  };
  for (const name of ["mouseover", "focusin", "click"]) box.addEventListener(name, about);
  for (const name of ["mouseout", "focusout"]) box.addEventListener(name, hideTip);
  box.addEventListener("keydown", (event) => {
    const next = box.children[Number(event.target.dataset.at) + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? NaN)];
    if (next) next.focus();
  });
  const sampled = row.trained.reduce((sum, value) => sum + value, 0);
  return make("div", {},
    record.rows.length > 1 ? rowTree(record, place) : null,
    make("div", { class: "tabs small", role: "group", "aria-label": "colour" }, Object.keys(SHADES).map((name) =>
      make("button", { "aria-pressed": String(name === mode), onclick: () => state.set({ shade: name }) }, name))),
    make("p", { class: "legend" }, `${count(row.ids.length, "token")}, ${sampled.toLocaleString("en")} sampled. `, record.split === "train" || mode !== "trained or context" ? legend : "Underlined tokens were sampled; faint ones are context."),
    box);
}

function whyNoTokens(record) {
  if (record.split !== "train") return "No tokens were kept of this evaluation.";
  return "Nothing of it was trained: its group's rewards were all equal, or the report counts it as dropped.";
}

function aboutToken(row, at, tokenTexts) {
  const lines = [`${JSON.stringify(tokenTexts[row.ids[at]] ?? "")}  id ${row.ids[at]}, place ${at}`];
  if (!row.trained[at]) return `${lines[0]}\ncontext: not trained`;
  const logProb = row.logProbs[at];
  lines.push(`log-prob ${number(logProb)}${isNumber(logProb) ? ` (probability ${number(Math.exp(logProb), 3)})` : ""}`);
  const ratio = ratioOf(row, at);
  if (ratio !== null) lines.push(`trainer ${number(row.trainerLogProbs[at])}, importance ratio ${number(ratio)}`);
  if (row.advantage !== null) lines.push(`advantage ${number(row.advantage)}`);
  lines.push(`policy version ${row.versions[at]}`);
  return lines.join("\n");
}

function sharedLength(a, b) {
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at++;
  return at;
}

// A row forked from the row before it that it shares most tokens with. Bars: faint what it keeps, grey new context,
// coloured what was sampled.
function rowTree({ rows, turns }, selected) {
  const longest = Math.max(...rows.map((row) => row.ids.length), 1), depths = [];
  const share = (amount) => `width:${((100 * amount) / longest).toFixed(2)}%`;
  return make("div", { class: "rows", role: "group", "aria-label": "rows" },
    make("p", { class: "faint" }, `${turns?.length ? "The agent branched, or began anew" : "The history was rewritten"}, so this rollout has ${rows.length} rows, all with the same advantage.`),
    rows.map((row, place) => {
      const kept = rows.slice(0, place).map((other) => sharedLength(row.ids, other.ids));
      const most = Math.max(0, ...kept), parent = kept.indexOf(most);
      depths.push(most ? depths[parent] + 1 : 0);
      const pieces = [];
      for (let at = most; at < row.ids.length;) {
        let end = at;
        while (end < row.ids.length && row.trained[end] === row.trained[at]) end++;
        pieces.push(make("i", { class: row.trained[at] ? "trained" : "context", style: share(end - at) }));
        at = end;
      }
      return make("button", { class: "row", "data-focus": `row ${place}`, "aria-pressed": String(place === selected), onclick: () => state.set({ row: place }) },
        make("span", { style: `padding-left:${depths[place] * 14}px` }, depths[place] ? "└ " : "", `row ${place + 1}`),
        make("span", { class: "bar" }, make("i", { class: "kept", style: share(most) }), pieces),
        make("span", { class: "faint" }, most ? `keeps ${most} of row ${parent + 1}` : `${row.ids.length} tokens`));
    }));
}
