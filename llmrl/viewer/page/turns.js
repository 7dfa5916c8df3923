// An agent's requests as a tree: who asked what, what goes on from what, and which answers are trained.

// The turns from a root to one of them.
function turnPath(turns, place) {
  const path = [];
  for (let at = place; at !== null; at = turns[at].parent) path.unshift(at);
  return path;
}

// Places and depths, parents first: what goes on from a turn first stands below it, later branches are indented.
function turnOrder(turns) {
  const children = turns.map(() => []), roots = [], ordered = [];
  turns.forEach((turn, place) => (turn.parent === null ? roots : children[turn.parent]).push(place));
  const waiting = roots.map((place) => [place, 0]).reverse();
  while (waiting.length) {
    const [place, depth] = waiting.pop();
    ordered.push([place, depth]);
    waiting.push(...children[place].map((child, number) => [child, depth + Math.min(number, 1)]).reverse());
  }
  return ordered;
}

// What a turn was asked: the last message before its answer; of a root after what tells its agent.
function askedBy(turn) {
  const asked = turn.messages.slice(0, -1), system = turn.parent === null && asked.find((message) => message.role === "system");
  const said = [...new Set([system, asked.at(-1)])].filter(Boolean);
  return said.map((message) => [message.role + (message.name ? ` ${message.name}` : ""), textOf(message.content).slice(0, 200)]);
}

const isTrained = (record, turn) => record.split === "train" && turn.row !== null && turn.row < record.rows.length;

const sampledBy = (record, turn) => `${count(turn.num_completion_tokens, "token")}${isTrained(record, turn) ? ` in row ${turn.row + 1}` : ", not trained"}`;

function turnTree(record) {
  const { turns } = record, shown = Math.min(state.values.turn === "" ? Infinity : Math.max(0, Math.floor(Number(state.values.turn)) || 0), turns.length - 1);
  const sizeOf = (turn) => turn.num_kept_tokens + turn.num_context_tokens + turn.num_completion_tokens;
  const longest = Math.max(...turns.map(sizeOf), 1), path = new Set(turnPath(turns, shown));
  const piece = (kind, amount) => make("i", { class: kind, style: `width:${((100 * amount) / longest).toFixed(2)}%` });
  const numRoots = turns.filter((turn) => turn.parent === null).length;
  return make("div", {},
    make("div", { class: "rows turns", role: "group", "aria-label": "turns" },
      make("p", { class: "faint" }, `${count(turns.length, "answer")} to an agent; ${numRoots} of them ${numRoots === 1 ? "begins" : "begin"} a conversation. `
        + "Dotted: what an answer goes on from; grey: what it was told beyond; coloured: what was sampled and trained; hatched: what was sampled alone."),
      turnOrder(turns).map(([place, depth]) => {
        const turn = turns[place], from = turn.parent === null ? "root" : `from ${turn.parent + 1}`;
        return make("button", { class: `row${path.has(place) ? " on-path" : ""}`, "data-focus": `turn ${place}`, "aria-pressed": String(place === shown), onclick: () => state.set({ turn: place }) },
          make("span", { style: `padding-left:${Math.min(depth, 5) * 14}px` }, depth ? "└ " : "", `turn ${place + 1} `, make("span", { class: "faint" }, from)),
          make("span", {}, make("span", { class: "asked" }, askedBy(turn).flatMap(([who, text]) => [make("b", {}, `${who} `), `${text} `])),
            make("span", { class: "bar" }, piece("kept", turn.num_kept_tokens), piece("context", turn.num_context_tokens), piece(isTrained(record, turn) ? "trained" : "sampled", turn.num_completion_tokens))),
          make("span", { class: "faint" }, sampledBy(record, turn)));
      })),
    turnPath(turns, shown).map((place) => make("div", {},
      make("p", { class: "turn-title faint" }, `turn ${place + 1}, ${sampledBy(record, turns[place])} `,
        record.rows[turns[place].row] ? make("button", { onclick: () => state.set({ tab: "tokens", row: turns[place].row }) }, "tokens") : null),
      turns[place].messages.map(messageBox))));
}
