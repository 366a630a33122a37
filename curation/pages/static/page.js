// Helpers of all pages.
import { h, render } from "/vendor/preact.mjs";
import htm from "/vendor/htm.mjs";
import { call } from "/static/session.js";

export { render };
export const html = htm.bind(h);
const AGAIN_MS = 2_000;

export const at = (selector) => document.querySelector(selector);
export const allAt = (selector) => document.querySelectorAll(selector);
export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
export const focused = (element) => element?.focus({ preventScroll: true }); // without scrolling past the text above

// Returns the peer's response to a GET. Retries while the peer is not responding, and calls `away` before each retry.
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

// Returns a copy of a <template>. Elements with [data-if] are removed unless the named fact is true; [data-text] names the fact that becomes their text.
export function copied(id, facts = {}) {
  const copy = at(`#${id}`).content.cloneNode(true);
  for (const part of copy.querySelectorAll("[data-if]")) if (!facts[part.dataset.if]) part.remove();
  for (const part of copy.querySelectorAll("[data-text]")) Object.assign(part, { dir: "auto", textContent: facts[part.dataset.text] });
  return copy;
}

// Fills a table. On a phone each row of a wide table is a card, whose cells repeat their headings.
export function fill(id, rows) {
  const table = at(`#${id}`), heads = [...table.tHead.rows[0].cells];
  table.hidden = !rows.length;
  table.nextElementSibling.hidden = !table.hidden;
  render(rows.map(([key, ...cells]) => html`<tr key=${key} data-row=${key}>${cells.map((cell, place) =>
    html`<td class=${heads[place].className} data-head=${heads[place].textContent}>${typeof cell === "string" ? html`<bdi>${cell}</bdi>` : cell}</td>`)}</tr>`), table.tBodies[0]);
}

// Handlers of submitted forms, by the form's id. Each gets the form's fields.
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
  <span class=${isHere ? "here" : "away"}>${isHere ? "connected" : "offline"}</span>
  ${who && html`<a href="/join" dir="auto">${who}</a>`}`;

// Renders the status at the top right, and the notice that the peer is not responding.
export function paintStatus(status) {
  render(html`<${Status} ...${status} />`, at("#status"));
  if (at("#away")) at("#away").hidden = status.isHere;
}
