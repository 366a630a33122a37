// What all pages share: templates in JavaScript, waiting for the peer, and the line at the top right.
import { h, render } from "/vendor/preact.mjs";
import htm from "/vendor/htm.mjs";
import { call } from "/static/session.js";

export { render };
export const html = htm.bind(h);
const AGAIN_MS = 2_000;

export const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

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

export const Told = ({ told }) => html`<p class=${`told ${told?.kind ?? ""}`} role="status">${told?.text}</p>`;
export const focused = (element) => element?.focus({ preventScroll: true }); // where people type, once they have read what stands above

const Status = ({ network, isHere, who }) => html`
  ${network && html`<span>${network.name}</span>`}
  <span class=${isHere ? "here" : "away"}>${isHere ? "connected" : "not connected"}</span>
  ${who && html`<a href="/join">${who}</a>`}`;

export function paintStatus(status) {
  render(html`<${Status} ...${status} />`, document.getElementById("status"));
}
