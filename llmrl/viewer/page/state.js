// What the page shows, kept in the address, so that every state has a link. What is at its default is not in it.

const DEFAULTS = {
  run: "", split: "", status: "", stepFrom: "", stepTo: "", rewardFrom: "", rewardTo: "", lengthFrom: "", lengthTo: "",
  search: "", problem: "", order: "last", rollout: "", tab: "conversation", shade: "trained or context", row: "0", turn: "",
  smooth: "0", scale: "linear", text: "rendered",
};

// In a notebook's cell the address is the notebook's.
const isEmbedded = location.protocol === "about:";

class PageState {
  constructor() {
    this.listeners = [];
    this.values = this.read();
    addEventListener("hashchange", () => this.apply(this.read()));
  }

  read() {
    let given = {};
    try {
      given = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    } catch { /* of a link that somebody mangled nothing is taken */ }
    const known = Object.entries(given).filter(([name]) => name in DEFAULTS);
    return { ...DEFAULTS, ...Object.fromEntries(known) };
  }

  get step() {  // the one that is selected, null where none or several are
    const { stepFrom, stepTo } = this.values;
    return stepFrom !== "" && stepFrom === stepTo && isNumber(Number(stepFrom)) ? Number(stepFrom) : null;
  }

  // A change that one would go back from is an entry of the browser's history.
  set(changes, { isVisit = false } = {}) {
    const values = { ...this.values, ...Object.fromEntries(Object.entries(changes).map(([name, value]) => [name, String(value)])) };
    const hash = `#${new URLSearchParams(Object.entries(values).filter(([name, value]) => value !== DEFAULTS[name]))}`;
    if (!isEmbedded && hash !== (location.hash || "#")) {
      if (isVisit) location.hash = hash;
      else location.replace(hash);
    }
    this.apply(values);
  }

  apply(values) {
    const changed = new Set(Object.keys(DEFAULTS).filter((name) => values[name] !== this.values[name]));
    this.values = values;
    if (changed.size) this.listeners.forEach((listener) => listener(changed));
  }

  // `listener(changed)` is called with the names of what changed, where one of `names` did.
  on(names, listener) {
    this.listeners.push((changed) => { if (names.some((name) => changed.has(name))) listener(changed); });
  }
}

const state = new PageState();

const stepState = (step) => ({ stepFrom: step, stepTo: step });
