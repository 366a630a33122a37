// Code shared by /admin and /review: sign-in, calls, dialogs, refresh.
import { at, copied, forms, paintStatus, pause, tell } from "/static/page.js";
import { call } from "/static/session.js";

const AGAIN_MS = 4_000;
const OWN = /^([a-z]{0,8}|[\da-f]{64})$/; // part of the address after #: a section or a project
const SIGN_IN = "/api/v1/admin/sign-in";

const desk = { network: null, isHere: true, isIn: null }; // isIn is null until it is known
let draw, read;

// Calls the peer. If the session has ended, the page shows the sign-in form.
export async function ask(method, path, body) {
  try {
    const said = await call(method, path, body);
    desk.isHere = true;
    return said;
  } catch (problem) {
    if (!problem.status) desk.isHere = false;
    if (path !== SIGN_IN && /40[13]/.test(problem.status)) desk.isIn = false;
    throw problem;
  }
}

// Runs an action, shows its result or problem, and refreshes the page.
export async function act(work) {
  const wasIn = desk.isIn;
  tell("Working …");
  try {
    tell((await work()) ?? "");
  } catch (problem) {
    tell(wasIn && !desk.isIn ? "Your session has ended: the token has expired or was revoked. Sign in again." : problem.message, "bad");
  }
  await look();
}

let isSending = false;

// Runs an action like `act`. Further clicks are ignored until it has ended.
export const once = (work) => isSending || act(() => {
  isSending = true;
  return work().finally(() => { isSending = false; });
});

// Asks for confirmation with the <template> `id`, then runs the action.
export function sure(id, facts, run) {
  const dialog = at("dialog");
  at("dialog div").replaceChildren(copied(id, facts));
  at("dialog .primary").textContent = at(`#${id}`).dataset.yes;
  dialog.returnValue = "";
  dialog.onclose = () => dialog.returnValue && run();
  dialog.showModal();
}

forms["sign-in"] = ({ token }) => signIn(token.trim());

const signIn = (token) => act(async () => {
  await ask("POST", SIGN_IN, { token });
  desk.isIn = true;
  at("#sign-in").reset();
});

export const signOut = () => act(async () => {
  await ask("POST", "/api/v1/admin/sign-out");
  desk.isIn = false;
});

export function paint() {
  const isAsked = desk.isIn === false, form = at("#sign-in");
  if (desk.isIn !== null) at("#asking")?.remove();
  at("#work").hidden = !desk.isIn;
  if (form.hidden === isAsked) {
    form.hidden = !isAsked;
    if (isAsked) form.elements.token.focus();
  }
  if (desk.isIn) draw();
  paintStatus(desk);
}

async function look() {
  if (desk.isIn !== false) {
    try {
      await read();
      desk.isIn ??= true; // stays false after a sign-out meanwhile
    } catch (problem) {
      if (problem.status && desk.isIn !== false) tell(problem.message, "bad");
    }
  }
  paint();
}

// Signs in with the token after the # of the address, if there is one.
async function followAddress() {
  const token = location.hash.slice(1);
  if (OWN.test(token)) return look();
  history.replaceState(null, "", location.pathname); // keeps the token from bystanders and from the history
  await signIn(token);
}

// Starts the page: `reads` fetches the data that `draws` renders.
export async function begin(reads, draws) {
  [read, draw] = [reads, draws];
  addEventListener("hashchange", followAddress);
  await followAddress();
  for (;; await pause(AGAIN_MS)) {
    desk.network ??= await call("GET", "/api/v1/network").catch(() => null);
    if (!document.hidden) await look();
  }
}
