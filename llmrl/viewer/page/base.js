"use strict";
// What every part of the page uses: elements, numbers, colours.

// A table whose names come from a run or an address: it has no others than its own.
const table = (entries) => Object.assign(Object.create(null), entries);

const byId = (id) => document.getElementById(id);

async function unpack(id) {
  const bytes = Uint8Array.from(atob(byId(id).textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function dress(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const make = (tag, attributes = {}, ...children) => dress(document.createElement(tag), attributes, children);

const drawing = (tag, attributes = {}, ...children) =>
  dress(document.createElementNS(byId("drawing").namespaceURI, tag), attributes, children);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function number(value, digits = 4) {  // what is not finite comes by its name
  if (!isNumber(value)) return value === null || value === undefined ? "–" : String(value);
  const size = Math.abs(value);
  if (size && (size < 1e-4 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  return value.toLocaleString("en", { maximumSignificantDigits: Math.max(digits, size >= 1000 ? Math.ceil(Math.log10(size)) : 0) });
}

const count = (amount, noun) => `${amount.toLocaleString("en")} ${noun}${amount === 1 ? "" : "s"}`;

const mean = (values) => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

// Of rollouts, by their places in the index: a rollout without a score has no reward.
const rewardsOf = (index, places) => places.filter((place) => index.is_scored[place] !== false).map((place) => index.reward[place]).filter(isNumber);

// Spread arguments have a limit, so no Math.min(...values).
const extent = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// Of rewards: from --low over --middle to --high, between the lowest and the highest of the page. A reward that nobody
// gave has none.
const rewards = { low: 0, high: 1 };

function rewardColour(reward, isScored = true) {
  if (isScored === false || !isNumber(reward)) return "var(--unscored)";
  const share = rewards.high > rewards.low ? Math.max(0, Math.min(1, (reward - rewards.low) / (rewards.high - rewards.low))) : 1;
  const [from, to, part] = share < 0.5 ? ["--low", "--middle", 2 * share] : ["--middle", "--high", 2 * share - 1];
  return `color-mix(in oklab, var(${to}) ${Math.round(100 * part)}%, var(${from}))`;
}

const rewardChip = (reward, isScored = true) => make("span", {
  class: "chip", style: `background:${rewardColour(reward, isScored)}`,
  title: isScored === false ? "not scored" : `reward ${number(reward)}`,
}, isScored === false ? "–" : number(reward, 3));

// A name that may break after its underscores and slashes.
const breakable = (name) => name.split(/(?<=[_/])/).flatMap((part) => [part, make("wbr")]);

const isNarrow = () => matchMedia("(max-width: 800px)").matches;

function showTip(target, text) {
  const tip = byId("tip"), box = target.getBoundingClientRect();
  tip.textContent = text;
  tip.hidden = false;
  const below = box.bottom + 8 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? box.bottom + 8 : box.top - tip.offsetHeight - 8}px`;
}

const hideTip = () => { byId("tip").hidden = true; };
