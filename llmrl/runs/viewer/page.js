"use strict";
const byId = (id) => document.getElementById(id);
const ITEM_HEIGHT = 52;
const FIRST_CURVES = ["reward_mean", "completion_tokens_mean", "log_prob_difference_mean", "ESS", "kl_approx",
  "grad_norm", "entropy", "tokens_per_second"];

async function unpack(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function drawing(tag, attributes, ...children) {
  const element = document.createElementNS(byId("drawing").namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const number = (value, digits = 4) =>
  value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: digits });

// Curves

function curve(name, metrics) {
  const points = metrics.filter((row) => row[name] !== undefined && row[name] !== null).map((row) => [row.step, row[name]]);
  if (!points.length) return null;
  const values = points.map((point) => point[1]);
  const low = Math.min(...values), high = Math.max(...values), first = points[0][0], last = points.at(-1)[0];
  const x = (step) => (last === first ? 50 : (100 * (step - first)) / (last - first));
  const y = (value) => (high === low ? 50 : 95 - (90 * (value - low)) / (high - low));
  const isDot = points.length === 1, drawn = isDot ? [points[0], points[0]] : points;
  const path = drawn.map(([step, value]) => `${x(step).toFixed(2)},${y(value).toFixed(2)}`).join(" ");
  const parts = name.split(/(?<=_)/).flatMap((part) => [part, make("wbr")]);  // long names break after a _
  const figure = make("figure", { "data-metric": name },
    make("figcaption", {}, make("b", {}, ...parts), make("span", {}, `${number(low, 3)} … ${number(high, 3)}`)));
  figure.append(drawing("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", role: "img", "aria-label": `${name} by step` },
    drawing("line", { x1: 0, x2: 100, y1: 95, y2: 95 }),
    drawing("polyline", { class: isDot ? "dot" : "", points: path })));
  const span = figure.querySelector("span"), range = span.textContent;
  figure.addEventListener("mousemove", (event) => {
    const box = figure.querySelector("svg").getBoundingClientRect();
    const at = first + ((event.clientX - box.left) / box.width) * (last - first);
    const near = points.reduce((best, point) => (Math.abs(point[0] - at) < Math.abs(best[0] - at) ? point : best));
    span.textContent = `step ${near[0]}: ${number(near[1])}`;
  });
  figure.addEventListener("mouseleave", () => { span.textContent = range; });
  return figure;
}

function showHead(head) {
  byId("name").textContent = head.name;
  const steps = head.metrics.length, rollouts = head.index.step.length;
  byId("counts").textContent = `${steps} step${steps === 1 ? "" : "s"}, ${rollouts.toLocaleString("en")} rollouts`;
  for (const [name, value] of head.facts) byId("summary").append(make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  byId("config").textContent = head.config;
  byId("config-box").hidden = !head.config;
  const names = [...new Set(head.metrics.flatMap(Object.keys))].filter((name) => name !== "step");
  byId("curves").append(...FIRST_CURVES.filter((name) => names.includes(name)).map((name) => curve(name, head.metrics)).filter(Boolean));
  const others = names.filter((name) => !FIRST_CURVES.includes(name));
  byId("more-curves-box").hidden = !others.length;
  byId("more-curves-box").addEventListener("toggle", () => {
    byId("more-curves").append(...others.map((name) => curve(name, head.metrics)).filter(Boolean));
  }, { once: true });
}

// The list: only what is in sight is in the document, so that ten thousand rollouts scroll as ten.

class RolloutList {
  constructor(head, open) {
    this.index = head.index;
    this.previews = head.previews;
    this.open = open;
    this.shown = [];
    this.selected = null;
    this.texts = this.previews.map((preview, place) => `${preview} ${this.index.rollout_id[place]}`.toLowerCase());
    for (const [id, name] of [["split", "split"], ["status", "status"]]) {
      byId(id).append(make("option", { value: "" }, `any ${name}`),
        ...[...new Set(this.index[name])].sort().map((value) => make("option", { value }, value)));
    }
    byId("filters").addEventListener("input", () => this.filter());
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    byId("list").addEventListener("scroll", () => this.draw());
    byId("list").addEventListener("keydown", (event) => this.onKey(event));
    addEventListener("resize", () => this.draw());
  }

  filter() {
    const bound = (id, other) => (byId(id).value === "" ? other : Number(byId(id).value));
    const text = byId("search").value.trim().toLowerCase(), split = byId("split").value, status = byId("status").value;
    const [stepFrom, stepTo] = [bound("step-from", -Infinity), bound("step-to", Infinity)];
    const [rewardFrom, rewardTo] = [bound("reward-from", -Infinity), bound("reward-to", Infinity)];
    const { index } = this;
    this.shown = [];
    for (let place = 0; place < index.step.length; place++) {
      const isShown = index.step[place] >= stepFrom && index.step[place] <= stepTo &&
        index.reward[place] >= rewardFrom && index.reward[place] <= rewardTo &&
        (!split || index.split[place] === split) && (!status || index.status[place] === status) &&
        (!text || this.texts[place].includes(text));
      if (isShown) this.shown.push(place);
    }
    const keys = { best: (p) => -index.reward[p], worst: (p) => index.reward[p], long: (p) => -index.num_completion_tokens[p] };
    const key = keys[byId("order").value];
    if (key) this.shown.sort((a, b) => key(a) - key(b) || a - b);
    const rewards = this.shown.map((place) => index.reward[place]);
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
    byId("found").textContent = rewards.length
      ? `${rewards.length.toLocaleString("en")} found, mean reward ${number(mean, 3)}` : "None found; widen the filters.";
    byId("list-space").style.height = `${this.shown.length * ITEM_HEIGHT}px`;
    byId("list").scrollTop = 0;
    this.draw();
  }

  draw() {
    const list = byId("list");
    const first = Math.max(0, Math.floor(list.scrollTop / ITEM_HEIGHT) - 4);
    const last = Math.min(this.shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ITEM_HEIGHT) + 4);
    list.querySelectorAll(".item").forEach((item) => item.remove());
    for (let row = first; row < last; row++) {
      const place = this.shown[row], { index } = this;
      list.append(make("div", {
        class: "item", role: "option", "data-place": place, "aria-selected": String(place === this.selected),
        style: `top:${row * ITEM_HEIGHT}px`, onclick: () => this.select(place).then(showBelow),
      },
      make("div", {}, make("span", {}, `step ${index.step[place]} · ${index.rollout_id[place]}`),
        make("span", { class: "reward" }, number(index.reward[place], 3))),
      make("div", {}, make("span", { class: "preview" }, this.previews[place] || "(no answer)"),
        make("span", { class: index.status[place] }, index.status[place]))));
    }
  }

  async select(place) {
    this.selected = place;
    this.draw();
    await this.open(place);
  }

  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step || !this.shown.length) return;
    event.preventDefault();
    const row = Math.min(this.shown.length - 1, Math.max(0, this.shown.indexOf(this.selected) + step));
    const list = byId("list"), top = row * ITEM_HEIGHT;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ITEM_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ITEM_HEIGHT - list.clientHeight;
    this.select(this.shown[row]);
  }
}

// A rollout

function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  return content.map((part) => (part.type === "text" ? part.text : `[${part.type}]`)).join("");
}

function messageBox(message) {
  const box = make("div", { class: `message ${message.role}` },
    make("b", {}, message.name ? `${message.role} ${message.name}` : message.role));
  if (message.reasoning_content) {
    box.append(make("details", { open: "" }, make("summary", {}, "reasoning"),
      make("div", { class: "reasoning" }, message.reasoning_content)));
  }
  const text = textOf(message.content);
  if (message.role === "tool") {
    box.append(make("details", {}, make("summary", {}, text.slice(0, 80) || "(empty)"), make("div", { class: "text" }, text)));
  } else if (text) box.append(make("div", { class: "text" }, text));
  for (const call of message.tool_calls ?? []) {
    box.append(make("details", { class: "call" }, make("summary", {}, `calls ${call.function.name}`),
      make("pre", {}, JSON.stringify(call.function.arguments, null, 2))));
  }
  return box;
}

const SHADES = {
  "trained or context": null,
  "log-prob": (row, at) => (row.trained[at] ? Math.min(1, -row.logProbs[at] / 5) : null),
  "importance ratio": (row, at) => {
    const ratio = ratioOf(row, at);
    return ratio === null ? null : Math.max(-1, Math.min(1, Math.log(ratio) / Math.log(1.5)));
  },
  "advantage": (row, at) => (row.trained[at] && row.advantage !== null ? Math.max(-1, Math.min(1, row.advantage / 2)) : null),
  "policy version": (row, at, versions) => (row.trained[at] ? (versions.indexOf(row.versions[at]) + 1) / versions.length : null),
};
const LEGENDS = {
  "trained or context": "Underlined tokens were sampled and are trained; faint ones are context.",
  "log-prob": "The darker, the less likely the sampler found the token (full colour: −5 and below).",
  "importance ratio": "Trainer's probability over the sampler's: blue above 1, red below (full colour: a factor of 1.5).",
  "advantage": "Blue: made likelier; red: made less likely. It is the rollout's, the same on every trained token.",
  "policy version": "The darker, the newer the weights that sampled the token.",
};

function ratioOf(row, at) {
  const trainer = row.trainerLogProbs[at];
  return !row.trained[at] || trainer === null ? null : Math.exp(trainer - row.logProbs[at]);
}

function colour(shade) {
  if (shade === null) return null;
  const [hue, share] = shade < 0 ? ["var(--bad)", -shade] : ["var(--accent)", shade];
  return `background: color-mix(in srgb, ${hue} ${Math.round(70 * share)}%, transparent)`;
}

function tokenView(row, tokenTexts) {
  const view = make("div", {});
  const draw = (mode) => {
    const versions = [...new Set(row.versions.filter((version, at) => row.trained[at]))].sort((a, b) => a - b);
    const box = make("div", { class: "tokens" });
    row.ids.forEach((id, at) => {
      const shade = SHADES[mode] ? SHADES[mode](row, at, versions) : null;
      box.append(make("span", {
        class: `token ${row.trained[at] ? "trained" : "context"}`, style: colour(shade), "data-at": at, tabindex: at ? -1 : 0,
      }, tokenTexts[id] ?? ` ${id}`));
    });
    const about = (event) => {
      const at = event.target.dataset?.at;
      if (at !== undefined) showTip(event.target, aboutToken(row, Number(at), tokenTexts));
    };
    box.addEventListener("mouseover", about);
    box.addEventListener("focusin", about);
    box.addEventListener("mouseout", hideTip);
    box.addEventListener("focusout", hideTip);
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = step && box.children[Number(event.target.dataset.at) + step];
      if (next) next.focus();
    });
    const tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "colour" },
      ...Object.keys(SHADES).map((name) => make("button",
        { role: "tab", "aria-selected": String(name === mode), onclick: () => draw(name) }, name)));
    view.replaceChildren(tabs, make("p", { class: "legend" }, LEGENDS[mode]), box);
  };
  draw("trained or context");
  return view;
}

function aboutToken(row, at, tokenTexts) {
  const lines = [`${JSON.stringify(tokenTexts[row.ids[at]] ?? "")}  id ${row.ids[at]}, place ${at}`];
  if (!row.trained[at]) return `${lines[0]}\ncontext: not trained`;
  lines.push(`log-prob ${number(row.logProbs[at])} (probability ${number(Math.exp(row.logProbs[at]), 3)})`);
  const ratio = ratioOf(row, at);
  if (ratio !== null) lines.push(`trainer ${number(row.trainerLogProbs[at])}, importance ratio ${number(ratio)}`);
  if (row.advantage !== null) lines.push(`advantage ${number(row.advantage)}`);
  lines.push(`policy version ${row.versions[at]}`);
  return lines.join("\n");
}

function showTip(target, text) {
  const tip = byId("tip"), box = target.getBoundingClientRect();
  tip.textContent = text;
  tip.hidden = false;
  const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? box.bottom + 8 : box.top - tip.offsetHeight - 8}px`;
}

function showBelow() {  // on a narrow screen the rollout stands below the list, perhaps out of sight
  if (matchMedia("(max-width: 800px)").matches) byId("rollout").scrollIntoView({ block: "nearest" });
}

function hideTip() {
  byId("tip").hidden = true;
}

function showRollout(record, head, list) {
  hideTip();
  const { index } = head;
  const siblings = index.group_id.flatMap((group, place) =>
    (group === record.group_id && index.step[place] === record.step && index.split[place] === record.split ? [place] : []));
  const facts = [["step", record.step], ["split", record.split], ["reward", number(record.reward)],
    ...Object.entries(record.reward_breakdown ?? {}).map(([name, value]) => [name, number(value)]),
    ["turns", record.num_turns], ["sampled tokens", record.num_completion_tokens], ["seconds", number(record.seconds)],
    ["rows", record.rows.length || null]];
  const view = make("div", {});
  const views = { conversation: () => make("div", {}, ...record.messages.map(messageBox)) };
  record.rows.forEach((row, at) => {
    views[record.rows.length > 1 ? `tokens of row ${at + 1} of ${record.rows.length}` : "tokens"] = () => tokenView(row, head.tokenTexts);
  });
  const show = (name) => {
    tabs.querySelectorAll("button").forEach((tab) => tab.setAttribute("aria-selected", String(tab.textContent === name)));
    view.replaceChildren(views[name]());
  };
  const tabs = make("div", { class: "tabs", role: "tablist", "aria-label": "view" },
    ...Object.keys(views).map((name) => make("button", { role: "tab", onclick: () => show(name) }, name)));
  byId("rollout").replaceChildren(...[
    make("h2", {}, record.rollout_id, " ", make("span", { class: record.status },
      record.reason ? `${record.status}: ${record.reason}` : record.status)),
    make("div", { class: "facts" }, ...facts.filter(([, value]) => value !== null).map(([name, value]) =>
      make("span", {}, make("span", { class: "faint" }, `${name} `), String(value)))),
    record.error ? make("pre", { class: "error" }, record.error) : null,
    siblings.length > 1 ? make("div", { class: "siblings" }, make("span", { class: "faint" }, "group:"),
      ...siblings.map((place) => make("button", {
        "aria-pressed": String(index.rollout_id[place] === record.rollout_id), onclick: () => list.select(place),
      }, number(index.reward[place], 3)))) : null,
    record.rows.length > 1 ? make("p", { class: "faint" },
      `The history was rewritten, so this rollout forked into ${record.rows.length} rows, each trained with the same advantage.`) : null,
    record.split === "train" && head.hasRows && !record.rows.length ? make("p", { class: "faint" },
      "Nothing of it was trained: its group's rewards were all equal, or the report counts it as dropped.") : null,
    tabs, view].filter(Boolean));
  show(record.rows.length && location.hash === "#tokens" ? Object.keys(views)[1] : "conversation");
}

async function main() {
  const head = await unpack("head");
  const blocks = new Map();
  const open = async (place) => {
    const block = Math.floor(place / head.blockSize);
    if (!blocks.has(block)) blocks.set(block, unpack(`block-${block}`));
    const records = await blocks.get(block);
    if (list.selected === place) showRollout(records[place % head.blockSize], head, list);
  };
  const list = new RolloutList(head, open);
  showHead(head);
  list.filter();
  document.body.dataset.ready = "true";
}

main();
