// What /admin and /review share.
import { at, copied, forms, paintStatus, pause, tell } from "/static/page.js";
import { call } from "/static/session.js";

const AGAIN_MS = 4_000;
const OWN = /^([a-z]{0,8}|[\da-f]{64})$/; // behind the # of an address: a section, or a project
const SIGN_IN = "/api/v1/admin/sign-in";

const desk = { network: null, isHere: true, isIn: null }; // null: not known yet
let draw, read;

// Where nobody is signed in any more, the page asks for a token.
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

// What somebody does: the page says what came of it, and what it shows is read again.
export async function act(work) {
  const wasIn = desk.isIn;
  tell("The peer works on it …");
  try {
    tell((await work()) ?? "");
  } catch (problem) {
    tell(wasIn && !desk.isIn ? "Sign in again: the token is over, or was taken back." : problem.message, "bad");
  }
  await look();
}

let isSending = false;

// The same, but a second click meanwhile does nothing.
export const once = (work) => isSending || act(() => {
  isSending = true;
  return work().finally(() => { isSending = false; });
});

// `id` is that of the <template> that asks, about these facts.
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
      desk.isIn ??= true; // who signs out meanwhile is out
    } catch (problem) {
      if (problem.status && desk.isIn !== false) tell(problem.message, "bad");
    }
  }
  paint();
}

// What else stands behind the # is a token, which signs in.
async function followAddress() {
  const token = location.hash.slice(1);
  if (OWN.test(token)) return look();
  history.replaceState(null, "", location.pathname); // nobody sees it over the shoulder, or finds it in the history
  await signIn(token);
}

// `reads` asks for what `draws` shows.
export async function begin(reads, draws) {
  [read, draw] = [reads, draws];
  addEventListener("hashchange", followAddress);
  await followAddress();
  for (;; await pause(AGAIN_MS)) {
    desk.network ??= await call("GET", "/api/v1/network").catch(() => null);
    if (!document.hidden) await look();
  }
}
