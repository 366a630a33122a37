// What all pages share.
import { h, render } from "/vendor/preact.mjs";
import htm from "/vendor/htm.mjs";
import { call } from "/static/session.js";

export { render };
export const html = htm.bind(h);
const AGAIN_MS = 2_000;

export const at = (selector) => document.querySelector(selector);
export const allAt = (selector) => document.querySelectorAll(selector);
export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
export const focused = (element) => element?.focus({ preventScroll: true }); // where people type, once they have read what stands above

// What the peer says. While it does not answer, it is asked again, and `away` is called each time.
export async function patiently(path, away) {
  for (;;) {
    try {
      return await call("GET", path);
    } catch (problem) {
      if (problem.status) throw problem;
      away();
      await pause(AGAIN_MS);
    }
  }
}

// A copy of a <template>, about these facts: [data-if] goes unless its fact is true, and [data-text] gets one as its text.
export function copied(id, facts = {}) {
  const copy = at(`#${id}`).content.cloneNode(true);
  for (const part of copy.querySelectorAll("[data-if]")) if (!facts[part.dataset.if]) part.remove();
  for (const part of copy.querySelectorAll("[data-text]")) Object.assign(part, { dir: "auto", textContent: facts[part.dataset.text] });
  return copy;
}

// Fills a table. On a phone each row of a wide one is a card, and each cell says what it is.
export function fill(id, rows) {
  const table = at(`#${id}`), heads = [...table.tHead.rows[0].cells];
  table.hidden = !rows.length;
  table.nextElementSibling.hidden = !table.hidden;
  render(rows.map(([key, ...cells]) => html`<tr key=${key} data-row=${key}>${cells.map((cell, place) =>
    html`<td class=${heads[place].className} data-head=${heads[place].textContent}>${typeof cell === "string" ? html`<bdi>${cell}</bdi>` : cell}</td>`)}</tr>`), table.tBodies[0]);
}

// Of each form, by its id, what it does with its fields.
export const forms = {};

document.addEventListener("submit", (event) => {
  if (!(event.target.id in forms)) return;
  event.preventDefault();
  forms[event.target.id](Object.fromEntries(new FormData(event.target)));
});

export function tell(text = "", kind = "") {
  const told = at(".told"), isNew = told.textContent !== text;
  told.textContent = text;
  told.className = `told ${kind}`;
  if (kind && isNew) told.scrollIntoView({ block: "nearest" });
}

const Status = ({ network, isHere, who }) => html`
  ${network && html`<bdi>${network.name}</bdi>`}
  <span class=${isHere ? "here" : "away"}>${isHere ? "connected" : "not connected"}</span>
  ${who && html`<a href="/join" dir="auto">${who}</a>`}`;

// The line at the top right, and the notice of a peer that is away.
export function paintStatus(status) {
  render(html`<${Status} ...${status} />`, at("#status"));
  if (at("#away")) at("#away").hidden = status.isHere;
}
