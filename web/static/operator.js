// What /admin and /review share: an operator signs in, what the peer says is read again and again, and steps that cannot be undone.
import { html, paintStatus, pause, render } from "/static/page.js";
import { call } from "/static/session.js";

const AGAIN_MS = 4_000;
const TOKEN = /^[\w-]{32}$/; // of `peer web token`, behind the # of an address
const SIGN_IN = "/api/v1/admin/sign-in";

export const desk = { phase: "loading", network: null, isHere: true, told: null, sure: null };
let place, Work, read;

// Where nobody is signed in any more, the page asks for a token.
export async function ask(method, path, body) {
  try {
    const said = await call(method, path, body);
    desk.isHere = true;
    return said;
  } catch (problem) {
    if (!problem.status) desk.isHere = false;
    if (problem.status === 401 || (problem.status === 403 && path !== SIGN_IN)) desk.phase = "sign-in";
    throw problem;
  }
}

export function tell(text, kind = "") {
  desk.told = text && { text, kind };
  paint();
}

// What somebody does: the page says what came of it, and what it shows is read again. Returns whether it was done.
export async function act(work) {
  tell("The peer works on it …");
  const before = desk.phase;
  let isDone = true;
  try {
    tell((await work()) ?? "");
  } catch (problem) {
    isDone = false;
    tell(desk.phase !== before ? "Sign in again: the token is over, or was taken back." : problem.message, "bad");
  }
  await look();
  return isDone;
}

export function sure(title, text, yes, run) {
  desk.sure = { title, text, yes, run };
  paint();
}

const shown = (element) => element && !element.open && element.showModal();
const closed = (event) => event.target.closest("dialog").close();

const Sure = ({ sure: { title, text, yes, run } }) => html`
  <dialog ref=${shown} aria-labelledby="sure" onClose=${() => { desk.sure = null; paint(); }}>
    <h2 id="sure">${title}</h2><p>${text}</p>
    <div class="tools"><button onClick=${closed} autofocus>No</button>
      <button class="primary" onClick=${(event) => { closed(event); run(); }}>${yes}</button></div>
  </dialog>`;

async function signIn(token) {
  desk.phase = "sign-in";
  if (!await act(() => ask("POST", SIGN_IN, { token }).then(() => ""))) return;
  desk.phase = "work";
  await look();
}

export async function signOut() {
  await ask("POST", "/api/v1/admin/sign-out").catch(() => {});
  desk.phase = "sign-in";
  paint();
}

const SignIn = () => html`
  <section class="card narrow">
    <h1>For operators of this peer</h1>
    <p>Type <code>peer web token</code> where the peer runs. It prints a token, which is good for a day.</p>
    <form onSubmit=${(event) => { event.preventDefault(); signIn(new FormData(event.target).get("token").trim()); }}>
      <label>Token<input name="token" type="password" required autocomplete="off" ref=${(element) => element?.focus()} /></label>
      <button class="primary">Sign in</button>
    </form>
  </section>`;

const Page = () => html`
  ${!desk.isHere && html`<p class="notice warn" role="status">This peer does not answer at the moment. The page goes on when it is back.</p>`}
  ${desk.phase === "loading" ? html`<p class="quiet">Asking the peer …</p>` : desk.phase === "sign-in" ? html`<${SignIn} />` : html`<${Work} />`}
  <p class=${`told ${desk.told?.kind ?? ""}`} role="status">${desk.told?.text}</p>
  ${desk.sure && html`<${Sure} sure=${desk.sure} />`}`;

export function paint() {
  render(html`<${Page} />`, document.getElementById(place));
  paintStatus({ ...desk, who: null });
}

export async function look() {
  if (desk.phase !== "sign-in") {
    try {
      await read();
      desk.phase = "work";
    } catch (problem) {
      if (problem.status && desk.phase !== "sign-in") desk.told = { text: problem.message, kind: "bad" };
    }
  }
  paint();
}

// A token behind the # signs in; what else stands there is the page's own.
async function followAddress() {
  const token = location.hash.slice(1);
  if (!TOKEN.test(token)) return look();
  history.replaceState(null, "", location.pathname); // nobody sees it over the shoulder, or finds it in the history
  await signIn(token);
}

// `work`: the component of those who are signed in; `reads` what it shows.
export async function begin(id, work, reads) {
  [place, Work, read] = [id, work, reads];
  paint();
  addEventListener("hashchange", () => followAddress());
  await followAddress();
  for (;; await pause(AGAIN_MS)) {
    if (document.hidden && desk.network) continue;
    desk.network ??= await call("GET", "/api/v1/network").catch(() => null);
    await look();
  }
}

export const when = (ms) => new Date(ms).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });

// On a phone each row of a wide table is a card, and each cell says what it is.
export const Table = ({ caption, heads, rows, empty, isNarrow }) => (rows.length ? html`
  <table class=${isNarrow ? "" : "rows"}><caption>${caption}</caption>
    <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
    <tbody>${rows.map(({ key, cells, ...more }) => html`<tr key=${key} ...${more}>${cells.map((cell, place) => html`<td data-head=${heads[place]}>${cell}</td>`)}</tr>`)}</tbody>
  </table>` : html`<p class="quiet">${empty}</p>`);
